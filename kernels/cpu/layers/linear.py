"""Numba kernels that multiply few rows, by one matrix or one for each group of rows. They read weights once.

`kernels.cpu.products` chooses when they run.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from .. import kernel as nb
from ..launch import NumbaLaunch
from ..vectors import OPERAND_SIZES, OUTPUTS, product_tile
from . import tile_linear

_tile_1, _tile_2, _tile_4 = product_tile(1), product_tile(2), product_tile(4)


@nb.device_function
def _multiply_group(x, rows, has_rows, w, weights, step, size, out, begin, stop, num_outputs, output, x_stride):
    """Compute a tile of outputs for a group's entries, four, two or one at a time, while its weights are cached."""
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


@nb.device_function
def _multiply(x, w, out, rows, ends, has_rows, sizes):
    """Compute all products; threads get equal shares of the tiles of outputs, of groups with entries."""
    num_groups, num_outputs, size, x_stride, w_group, w_stride = sizes
    tiles, in_use, begin = num_outputs // OUTPUTS, np.int64(0), np.int64(0)
    for group in range(num_groups):
        in_use += np.int64(ends[group] > begin)
        begin = np.int64(ends[group])
    first, end = nb.share(in_use * tiles)
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


@nb.Kernel
def _linear(arguments):
    values = nb.unpack(arguments, 14)
    is_bf16, is_rounded, x, w, out, rows, ends = values[1:8]
    indices_and_sizes = nb.int64s(rows), nb.int32s(ends), rows != 0, values[8:]
    if is_rounded:
        _multiply(nb.bfloats(x), nb.bfloats(w), nb.bfloats(out), *indices_and_sizes)
    elif is_bf16:
        _multiply(nb.bfloats(x), nb.bfloats(w), nb.floats(out), *indices_and_sizes)
    else:
        _multiply(nb.floats(x), nb.floats(w), nb.floats(out), *indices_and_sizes)


# Most rows per group, on average, for these kernels if no tiles are used. Without AMX, bfloat16 has no limit.
_MAX_ROWS = {torch.float32: 32, torch.bfloat16: 5}
# From this average number of rows per group on, float32 is multiplied in blocks of 32 rows.
_MIN_ROWS_IN_BLOCKS = 17


def max_rows(weight: torch.Tensor) -> float:
    """Return the largest average number of rows per group for which these kernels are fast.

    weights: [num_groups, out_features, in_features]. Return 0 if the kernels do not take this dtype or these sizes.
    """
    if tile_linear.takes(weight):
        return math.inf
    if not takes_rows(weight):
        return 0
    if weight.dtype == torch.bfloat16 and not tile_linear.multiplies(weight.dtype):
        return math.inf
    return _MAX_ROWS[weight.dtype]


def takes_rows(weight: torch.Tensor) -> bool:
    """Return whether weights [..., out_features, in_features] can be multiplied row by row, as `by_row` asks for."""
    size = OPERAND_SIZES.get(weight.dtype)
    num_outputs, in_features = weight.shape[-2:]
    if size is None or weight.stride(-1) != 1:
        return False
    return num_outputs % OUTPUTS == 0 and in_features % size == 0


def has_invariant_rows(weight: torch.Tensor) -> bool:
    """Return whether `linear` takes a weight [out_features, in_features] with `by_row`."""
    return takes_rows(weight) or _by_amx(weight)


def _by_amx(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and tile_linear.takes(weight)


def takes(weight: torch.Tensor) -> bool:
    """Return whether `linear` takes a weight [out_features, in_features].

    It multiplies in blocks, or row by row in bfloat16 on a CPU without AMX.
    """
    is_alone = weight.dtype == torch.bfloat16 and not tile_linear.multiplies(weight.dtype)
    return tile_linear.takes(weight) or (is_alone and max_rows(weight[None]) > 0)


def _in_blocks(weight: torch.Tensor, num_entries: int, by_row: bool) -> bool:
    if by_row:
        return False
    num_groups = len(weight) if weight.dim() == 3 else 1
    is_many = weight.dtype == torch.bfloat16 or num_entries >= _MIN_ROWS_IN_BLOCKS * num_groups
    return is_many and tile_linear.takes(weight)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, by_row: bool = False
) -> torch.Tensor:
    """Return x [num_rows, in_features] times a weight that `takes` accepts, plus a bias: [num_rows, out_features].

    The bias is contiguous. All tensors have one dtype. by_row: whether a row's bits must not depend on other rows;
    `has_invariant_rows` must accept the weight.
    """
    if by_row and _by_amx(weight):
        return tile_linear.linear(x, weight, bias=bias, has_single_tiles=True)
    if _in_blocks(weight, len(x), by_row):
        return tile_linear.linear(x, weight, bias=bias)
    out = grouped_linear(x, weight[None], _end(len(x)), dtype=x.dtype, by_row=by_row)
    if bias is not None:
        out += bias
    return out


@lru_cache(maxsize=1024)
def _end(num_entries: int) -> torch.Tensor:
    return torch.tensor([num_entries], dtype=torch.int32)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    by_row: bool = False,
) -> torch.Tensor:
    """Return x [num_rows, in_features] times each group's weights, [num_entries, out_features] of float32 or x's dtype.

    ends: int32 [num_groups], the end of each group's entries. Results beyond the last end are not written.
    rows: int64 [num_entries], each entry's row of x; None if entries are rows.
    by_row: whether a row's bits must not depend on other rows; `takes_rows` must accept the weights.
    """
    num_entries, (num_groups, num_outputs, size) = _num_entries(x, rows), weight.shape
    if _in_blocks(weight, num_entries, by_row):
        return tile_linear.linear(x, weight, ends, rows, dtype=dtype)
    out = torch.empty(num_entries, num_outputs, dtype=dtype)
    sizes = num_groups, num_outputs, size, x.stride(0), weight.stride(0), weight.stride(1)
    launch = _launch(x.dtype == torch.bfloat16, dtype == torch.bfloat16, num_entries, *sizes)
    launch({"x": x, "weight": weight, "out": out, "rows": rows, "ends": ends})
    return out


@lru_cache(maxsize=1024)
def _launch(is_bf16: bool, is_rounded: bool, num_entries: int, *sizes: int) -> NumbaLaunch:
    arguments: tuple[int | str, ...] = is_bf16, is_rounded, "x", "weight", "out", "rows", "ends", *sizes
    return NumbaLaunch(_linear.address, num_entries * sizes[1] * sizes[2], arguments)


def linear_and_silu(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return silu(gate) * up of the two halves of a product's outputs, in x's dtype [num_entries, out_features / 2].

    The product is `linear` or, with ends, `grouped_linear`. Return None if no kernel does it in one pass.
    """
    if not _in_blocks(weight, _num_entries(x, rows), by_row=False):
        return None
    return tile_linear.linear(x, weight, ends, rows, is_gated=True)


def _num_entries(x: torch.Tensor, rows: torch.Tensor | None) -> int:
    if rows is None:
        return len(x)
    return len(rows)
