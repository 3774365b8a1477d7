"""Products of few rows with weights by numba, which read every weight once: a matrix for each group of rows."""

from __future__ import annotations

import numpy as np
import torch

from paged.kernels.common.numba_ops.kernel import (
    Kernel,
    bfloats,
    device_function,
    floats,
    int32s,
    int64s,
    share,
    unpack,
)
from paged.kernels.common.numba_ops.launch import LoopLaunch
from paged.kernels.common.numba_ops.vectors import OPERAND_SIZES, OUTPUTS, product_tile

_tile_1, _tile_2, _tile_4 = product_tile(1), product_tile(2), product_tile(4)


@device_function
def _multiply_group(x, rows, has_rows, w, weights, step, size, out, begin, stop, num_outputs, output, x_stride):
    """A tile's outputs for the entries of a group: by four, two, or one, while the weights stay in the cache."""
    entry = begin
    while entry < stop:
        r0, r1, r2, r3 = entry, min(entry + 1, stop - 1), min(entry + 2, stop - 1), min(entry + 3, stop - 1)
        to = entry * num_outputs + output
        if has_rows:
            r0, r1, r2, r3 = rows[r0], rows[r1], rows[r2], rows[r3]
        if stop - entry >= 4:
            starts = r0 * x_stride, r1 * x_stride, r2 * x_stride, r3 * x_stride
            _tile_4(x, starts, w, weights, step, size, out, to, num_outputs)
            entry += 4
        elif stop - entry >= 2:
            _tile_2(x, (r0 * x_stride, r1 * x_stride), w, weights, step, size, out, to, num_outputs)
            entry += 2
        else:
            _tile_1(x, (r0 * x_stride,), w, weights, step, size, out, to, num_outputs)
            entry += 1


@device_function
def _multiply(x, w, out, rows, ends, has_rows, sizes):
    """Every thread takes as many tiles of outputs, of groups that have entries, as the others."""
    num_groups, num_outputs, size, x_stride, w_group, w_stride = sizes
    tiles, in_use, begin = num_outputs // OUTPUTS, np.int64(0), np.int64(0)
    for group in range(num_groups):
        in_use += np.int64(ends[group] > begin)
        begin = np.int64(ends[group])
    first, end = share(in_use * tiles)
    done, begin = np.int64(0), np.int64(0)
    for group in range(num_groups):
        stop = np.int64(ends[group])
        if stop > begin:
            for tile in range(max(first - done, 0), min(end - done, tiles)):
                output = tile * OUTPUTS
                weights = group * w_group + output * w_stride
                _multiply_group(
                    x, rows, has_rows, w, weights, w_stride, size, out, begin, stop, num_outputs, output, x_stride
                )  # fmt: skip
            done += tiles
        begin = stop


@Kernel
def _linear(arguments):
    values = unpack(arguments, 13)
    is_bf16, x, w, out, rows, ends = values[1:7]
    if is_bf16:
        _multiply(bfloats(x), bfloats(w), floats(out), int64s(rows), int32s(ends), rows != 0, values[7:])
    else:
        _multiply(floats(x), floats(w), floats(out), int64s(rows), int32s(ends), rows != 0, values[7:])


def takes(weight: torch.Tensor) -> bool:
    """Whether there are loops for weights [num_groups, out_features, in_features] of such a type and sizes."""
    size = OPERAND_SIZES.get(weight.dtype)
    _, num_outputs, in_features = weight.shape
    is_even = size is not None and num_outputs % OUTPUTS == 0 and in_features % size == 0
    return is_even and weight.stride(2) == 1


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Products of x [num_rows, in_features] with the group's weights, float32 [num_entries, out_features].

    ends int32 [num_groups]: where each group's entries end; rows int64 [num_entries]: an entry's row of x, its own if
    None. What lies beyond the last end is not written.
    """
    num_groups, num_outputs, size = weight.shape
    out = torch.empty(len(x) if rows is None else len(rows), num_outputs)
    sizes = num_groups, num_outputs, size, x.stride(0), weight.stride(0), weight.stride(1)
    tensors = {"x": x, "weight": weight, "out": out, "rows": rows, "ends": ends}
    arguments: tuple[int | str, ...] = x.dtype == torch.bfloat16, *tensors, *sizes
    LoopLaunch(_linear.address, len(out) * num_outputs * size, arguments)(tensors)
    return out
