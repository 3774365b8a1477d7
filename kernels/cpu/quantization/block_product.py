"""Numba kernels of products with int8 and 4-bit weights in blocks of 64 outputs, for one matrix or all experts.

They round the rows to int8, multiply, scale, and add the bias in one pass over the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from ...quantization.packing import E2M1, E2M1_GROUPS, MXFP4_GROUP, NVFP4_GROUP
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from .block_tiles import BLOCK, HAS_TILES, code_tile, int8_tile
from .product import exact, round_row_to_int8, scale_row, scales_of

# Columns of int8 weights are padded to a multiple of this.
_COLUMNS = 64
# Columns of a row that share a scale, for int4 weights.
_STEP = 32
# Rows that are multiplied while a block of weights is in the cache, and sums that a tile of four rows holds. 32 rows of
# 4,096 columns take 512 KB in float32.
_CHUNK, _SUMS = 32, 4 * BLOCK
# Subtracted from int4 codes if the weights have no zero points.
INT4_OFFSET = 8
# E2M1's values, doubled to be integers, plus 12 to be unsigned bytes, which VNNI takes.
E2M1_OFFSET = 12
E2M1_NUMBERS = [E2M1_OFFSET + int(2 * sign * value) for sign in (1, -1) for value in E2M1]


def _multiply_by(tile: Callable[[int], Any]) -> Any:
    """Return a function that multiplies `count` rows with a block. The last 4 of a row's `row_bytes` are its scale."""
    one_row, two_rows, four_rows = tile(1), tile(2), tile(4)

    @exact
    def multiply(rows, row_bytes, count, block, sums, bias, output, out, to, num_outputs):
        done = np.int64(0)
        while done < count:
            num_rows, first_row = count - done, nb.floats(rows + done * row_bytes)
            if num_rows >= 4:
                num_rows = np.int64(4)
                four_rows(first_row, *block, nb.floats(sums))
            elif num_rows >= 2:
                num_rows = np.int64(2)
                two_rows(first_row, *block, nb.floats(sums))
            else:
                one_row(first_row, *block, nb.floats(sums))
            for i in range(num_rows):
                row = done + i
                scale = nb.floats(rows + (row + 1) * row_bytes - 4)[0]
                scale_row(
                    nb.floats(sums), i * BLOCK, scale, nb.floats(bias), output, bias != 0, out, to + row * num_outputs,
                    BLOCK,
                )  # fmt: skip
            done += num_rows

    return multiply


def _multiply_groups(multiply_chunk: Any) -> Any:
    """Return a function for all groups from a function for a chunk of a group's entries and blocks of outputs.

    Threads get equal shares of the work. Four rows of a block take about as long as one.
    """

    @exact
    def multiply(x, out, places, addresses, sizes):
        rows, ends = places
        num_groups, num_entries, num_outputs = sizes[:3]
        num_blocks = num_outputs // BLOCK
        total, begin = np.int64(0), np.int64(0)
        for group in range(num_groups):
            stop = np.int64(nb.int32s(ends)[group]) if ends else num_entries
            for entry in range(begin, stop, _CHUNK):
                total += (min(_CHUNK, stop - entry) + 3) // 4
            begin = stop
        first, end = nb.share(total * num_blocks)
        done, begin = np.int64(0), np.int64(0)
        for group in range(num_groups):
            stop = np.int64(nb.int32s(ends)[group]) if ends else num_entries
            for entry in range(begin, stop, _CHUNK):
                count = min(_CHUNK, stop - entry)
                cost = (count + 3) // 4
                low = max(first - done + cost - 1, 0) // cost
                high = min(max(end - done + cost - 1, 0) // cost, num_blocks)
                if low < high:
                    multiply_chunk(x, out, rows, (entry, count, group, low, high), addresses, sizes[2:])
                done += cost * num_blocks
            begin = stop

    return multiply


@exact
def _row_of(rows, entry):
    return nb.int64s(rows)[entry] if rows else entry


_multiply_int8_block = _multiply_by(int8_tile)


@exact
def _multiply_int8_chunk(x, out, rows_of_x, chunk, addresses, sizes):
    input_scale, w, start, scale, bias, scratch = addresses
    entry, count, group, low, high = chunk
    num_outputs, size, stride = sizes
    width = nb.rounded_up(size, _COLUMNS)
    row_bytes = width + 4
    rows = scratch + nb.thread_index() * (_CHUNK * row_bytes + 4 * _SUMS)
    sums = rows + _CHUNK * row_bytes
    for row in range(count):
        place, to = _row_of(rows_of_x, entry + row) * stride, rows + row * row_bytes
        nb.floats(to + width)[0] = round_row_to_int8(x, place, input_scale, nb.uint8s(to), 0, size)
    of_group = group * num_outputs
    if bias:
        bias += of_group * 4
    for output in range(low * BLOCK, high * BLOCK, BLOCK):
        place = of_group + output
        of_block = nb.int32s(start + place * 4), nb.floats(scale + place * 4)
        block = width, nb.uint8s(w + place * width), *of_block
        to = entry * num_outputs + output
        _multiply_int8_block(rows, row_bytes, count, block, sums, bias, output, out, to, num_outputs)


_multiply_int8 = _multiply_groups(_multiply_int8_chunk)


@exact
def _round_groups(x, first, width, step, offset, codes, numbers):
    """Write a row's signed codes; for each `step` columns also write their scale and -offset times their sum."""
    for number in range(width // step):
        start = number * step
        divisor, scale = scales_of(x, first + start, step, 0, np.float32(127))
        total = np.int32(0)
        for i in range(start, start + step):
            value = np.float32(nb.load(x, first + i) / divisor)
            # Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
            code = np.int32(np.float32(value + np.float32(12582912)).view(np.int32) - np.int32(0x4B400000))
            codes[i] = np.uint8(code)
            total += code
        nb.floats(numbers + 8 * number)[0] = scale
        nb.int32s(numbers + 8 * number)[1] = -offset * total


def _multiply_codes(numbers: Sequence[int], offset: int, group_of_x: int) -> Any:
    """Return a function for codes that stand for these numbers minus the offset.

    `step`, the columns of x that share a scale, is passed to `_round_groups` as `group_of_x`: a constant would triple
    that function's time.
    """
    multiply_block = _multiply_by(partial(code_tile, numbers=numbers, step=group_of_x))

    @exact
    def multiply_chunk(x, out, rows_of_x, chunk, addresses, sizes):
        w, scales, zeros, bias, factor, scratch = addresses
        entry, count, group, low, high = chunk
        num_outputs, width, stride, step, columns = sizes
        row_bytes = width + 8 * (width // step) + 4
        rows = scratch + nb.thread_index() * nb.rounded_up(_CHUNK * row_bytes + 4 * _SUMS, 64)
        sums = rows + _CHUNK * row_bytes
        for row in range(count):
            place, to = _row_of(rows_of_x, entry + row) * stride, rows + row * row_bytes
            _round_groups(x, place, width, step, np.int32(offset), nb.uint8s(to), to + width)
            nb.floats(to + row_bytes - 4)[0] = nb.floats(factor)[group] if factor else np.float32(1)
        of_group = group * num_outputs
        if bias:
            bias += of_group * 4
        for output in range(low * BLOCK, high * BLOCK, BLOCK):
            at_scale = 2 * (of_group * (width // columns) + output)
            of_zeros = zeros
            if zeros:
                of_zeros = zeros + at_scale
            codes = nb.uint8s(w + (of_group + output) * (width // 2))
            of_block = codes, nb.bfloats(scales + at_scale), nb.bfloats(of_zeros)
            block = row_bytes, width, columns, *of_block, num_outputs
            to = entry * num_outputs + output
            multiply_block(rows, row_bytes, count, block, sums, bias, output, out, to, num_outputs)

    multiply = _multiply_groups(multiply_chunk)

    @exact
    def multiply_of_dtype(values):
        if values[1]:
            multiply(nb.bfloats(values[2]), nb.bfloats(values[3]), values[4:6], values[6:12], values[12:])
        else:
            multiply(nb.floats(values[2]), nb.floats(values[3]), values[4:6], values[6:12], values[12:])

    return multiply_of_dtype


_multiply_int4 = _multiply_codes(range(16), INT4_OFFSET, _STEP)
_multiply_mxfp4 = _multiply_codes(E2M1_NUMBERS, E2M1_OFFSET, MXFP4_GROUP)
_multiply_nvfp4 = _multiply_codes(E2M1_NUMBERS, E2M1_OFFSET, NVFP4_GROUP)


@nb.Kernel
def _int8_product(arguments):
    values = nb.unpack(arguments, 17)
    if values[1]:
        _multiply_int8(nb.bfloats(values[2]), nb.bfloats(values[3]), values[4:6], values[6:12], values[12:])
    else:
        _multiply_int8(nb.floats(values[2]), nb.floats(values[3]), values[4:6], values[6:12], values[12:])


@nb.Kernel
def _int4_product(arguments):
    _multiply_int4(nb.unpack(arguments, 19))


@nb.Kernel
def _mxfp4_product(arguments):
    _multiply_mxfp4(nb.unpack(arguments, 19))


@nb.Kernel
def _nvfp4_product(arguments):
    _multiply_nvfp4(nb.unpack(arguments, 19))


_KERNELS = {"int8": _int8_product, "int4": _int4_product, "mxfp4": _mxfp4_product, "nvfp4": _nvfp4_product}
# Products by format, if the CPU has the instructions for them.
KERNELS = _KERNELS if HAS_TILES else {}


def int8_product(
    x: torch.Tensor,
    input_scale: torch.Tensor | None,
    blocks: torch.Tensor,
    start: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rounded x [num_rows, columns], by a given scale or one for each row, times weights, plus a float32 bias.

    blocks: int8, in blocks of 64 outputs; a block holds four columns of every output, then the next four.
    start: int32 [num_outputs], -128 times the sum of an output's codes.
    scale: float32 [num_outputs].
    ends, rows: as in `code_product`.
    """
    num_groups = _num_groups(ends)
    num_entries = len(x) if rows is None else len(rows)
    out = x.new_empty(num_entries, scale.shape[-1])
    launch = _launch_int8(x.dtype == torch.bfloat16, num_groups, *out.shape, x.shape[1], x.stride(0))
    weights = {"w": blocks, "start": start, "scale": scale, "bias": bias}
    launch({"x": x, "out": out, "rows": rows, "ends": ends, "input_scale": input_scale, **weights})
    return out


def code_product(
    x: torch.Tensor,
    form: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zeros: torch.Tensor | None,
    factor: torch.Tensor | None,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [num_rows, columns] times 4-bit weights, plus a float32 bias; groups of x are rounded to int8 first.

    A group of x has 32 columns, with NVFP4 16. codes: uint8 [num_outputs, columns / 2] in the order of `code_blocks`.
    scale, zeros: bfloat16 [groups, num_outputs]. factor: float32 [], for all weights; None for 1.

    With ends, int32 [num_experts], the end of each expert's entries, weights and bias have a first dimension of
    experts. rows: int64 [num_entries], each entry's row of x; None if entries are rows. Results beyond the last end are
    not written.
    """
    *_, num_scales, num_outputs = scale.shape
    num_entries = len(x) if rows is None else len(rows)
    out = x.new_empty(num_entries, num_outputs)
    sizes = _num_groups(ends), *out.shape, x.shape[1], x.stride(0), E2M1_GROUPS.get(form, _STEP), num_scales
    weights = {"w": codes, "scale": scale, "zeros": zeros, "bias": bias, "factor": factor}
    launch = _launch_codes(form, x.dtype == torch.bfloat16, *sizes)
    launch({"x": x, "out": out, "rows": rows, "ends": ends, **weights})
    return out


def _num_groups(ends: torch.Tensor | None) -> int:
    if ends is None:
        return 1
    return len(ends)


@lru_cache(maxsize=1024)
def _launch_int8(is_bf16: bool, *sizes: int) -> NumbaLaunch:
    _, entries, outputs, columns, _ = sizes
    names = is_bf16, "x", "out", "rows", "ends", "input_scale", "w", "start", "scale", "bias", SCRATCH
    scratch = _CHUNK * (-(-columns // _COLUMNS) * _COLUMNS + 4) // 4 + _SUMS
    return NumbaLaunch(_int8_product.address, entries * outputs * columns, (*names, *sizes), scratch_size=scratch)


@lru_cache(maxsize=1024)
def _launch_codes(form: str, is_bf16: bool, *sizes: int) -> NumbaLaunch:
    *_, entries, outputs, columns, _, step, num_scales = sizes
    names = is_bf16, "x", "out", "rows", "ends", "w", "scale", "zeros", "bias", "factor", SCRATCH
    scratch = -(-(_CHUNK * (columns + 8 * (columns // step) + 4) + 4 * _SUMS) // 64) * 16
    arguments: tuple[int | str, ...] = *names, *sizes[:-1], columns // num_scales
    return NumbaLaunch(KERNELS[form].address, entries * outputs * columns, arguments, scratch_size=scratch)
