"""Numba kernels of products with int8 and int4 weights in blocks of 64 outputs, the orders of oneDNN and of ATen.

They round or widen the rows, multiply, scale, and add the bias in one pass over the weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...numba_ops import kernel as nb
from ...numba_ops.launch import SCRATCH, LoopLaunch
from .block_tiles import BLOCK, int4_tile, int8_tile
from .product import exact, round_row_to_int8, scale_row

# Columns of int8 weights are stored as a multiple.
_COLUMNS = 64
# Rows that are multiplied while a block is in the cache, and sums at once. 32 of 4,096 columns take 512 KB in float32.
_CHUNK, _SUMS = 32, 4 * BLOCK


def _multiply_by(tiles: tuple[Any, Any, Any]) -> Any:
    """Return a function that multiplies `count` rows with a block. A row has `row_bytes`, the last four its scale."""
    one_row, two_rows, four_rows = tiles

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


_multiply_int8_block = _multiply_by((int8_tile(1), int8_tile(2), int8_tile(4)))
_multiply_int4_block = _multiply_by((int4_tile(1), int4_tile(2), int4_tile(4)))


@exact
def _multiply_int8(x, out, addresses, sizes):
    input_scale, w, start, scale, bias, scratch = addresses
    num_rows, num_outputs, size, stride = sizes
    width = nb.rounded_up(size, _COLUMNS)
    row_bytes = width + 4
    rows = scratch + nb.thread_index() * (_CHUNK * row_bytes + 4 * _SUMS)
    sums = rows + _CHUNK * row_bytes
    first, end = nb.share(num_outputs // BLOCK)
    for begin in range(0, num_rows, _CHUNK):
        count = min(_CHUNK, num_rows - begin)
        for row in range(count):
            place, to = (begin + row) * stride, rows + row * row_bytes
            nb.floats(to + width)[0] = round_row_to_int8(x, place, input_scale, nb.uint8s(to), 0, size)
        for output in range(first * BLOCK, end * BLOCK, BLOCK):
            of_block = nb.int32s(start + output * 4), nb.floats(scale + output * 4)
            block = width, nb.uint8s(w + output * width), *of_block
            to = begin * num_outputs + output
            _multiply_int8_block(rows, row_bytes, count, block, sums, bias, output, out, to, num_outputs)


@nb.device_function
def _widen(x, first, size, group, row):
    """Copy a row as float32; after it write the sum of each group of its columns, and 1."""
    for number in range(size // group):
        total = np.float32(0)
        for i in range(number * group, (number + 1) * group):
            value = nb.load(x, first + i)
            row[i] = value
            total += value
        row[size + number] = total
    row[size + size // group] = np.float32(1)


@nb.device_function
def _multiply_int4(x, out, addresses, sizes):
    w, pairs, bias, scratch = addresses
    num_rows, num_outputs, size, stride, group = sizes
    row_bytes = 4 * (size + size // group + 1)
    rows = scratch + nb.thread_index() * (_CHUNK * row_bytes + 4 * _SUMS)
    sums = rows + _CHUNK * row_bytes
    first, end = nb.share(num_outputs // BLOCK)
    for begin in range(0, num_rows, _CHUNK):
        count = min(_CHUNK, num_rows - begin)
        for row in range(count):
            _widen(x, (begin + row) * stride, size, group, nb.floats(rows + row * row_bytes))
        for output in range(first * BLOCK, end * BLOCK, BLOCK):
            block = size, group, nb.uint8s(w + output * (size // 2)), nb.int32s(pairs + output * 4), num_outputs
            to = begin * num_outputs + output
            _multiply_int4_block(rows, row_bytes, count, block, sums, bias, output, out, to, num_outputs)


@nb.Kernel
def _int8_product(arguments):
    values = nb.unpack(arguments, 14)
    if values[1]:
        _multiply_int8(nb.bfloats(values[2]), nb.bfloats(values[3]), values[4:10], values[10:])
    else:
        _multiply_int8(nb.floats(values[2]), nb.floats(values[3]), values[4:10], values[10:])


@nb.Kernel
def _int4_product(arguments):
    values = nb.unpack(arguments, 13)
    if values[1]:
        _multiply_int4(nb.bfloats(values[2]), nb.bfloats(values[3]), values[4:8], values[8:])
    else:
        _multiply_int4(nb.floats(values[2]), nb.floats(values[3]), values[4:8], values[8:])


# Of the formats that the CPU has the instructions for.
_NEEDED = {"int8": ("avx512vnni", _int8_product), "int4": ("avx512f", _int4_product)}
KERNELS = {form: kernel for form, (name, kernel) in _NEEDED.items() if nb.cpu_features().get(name, False)}


def int8_product(
    x: torch.Tensor,
    input_scale: torch.Tensor | None,
    blocks: torch.Tensor,
    start: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return rounded x [num_rows, columns], by a given scale or one for each row, times weights, plus a float32 bias.

    blocks: int8, of 64 outputs, in each four columns of every output before the next four. start: int32 [num_outputs],
    -128 times the sum of an output's codes. scale: float32 [num_outputs].
    """
    out = x.new_empty(len(x), len(scale))
    launch = _launch_int8(x.dtype == torch.bfloat16, *out.shape, x.shape[1], x.stride(0))
    launch({"x": x, "out": out, "input_scale": input_scale, "w": blocks, "start": start, "scale": scale, "bias": bias})
    return out


def int4_product(
    x: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor, group: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x [num_rows, columns] times weights in ATen's order for AVX-512, plus a float32 bias.

    pairs: scale and zero, bfloat16 [groups, num_outputs, 2]; a weight is (code - 8) * scale + zero.
    """
    out = x.new_empty(len(x), len(packed))
    launch = _launch_int4(x.dtype == torch.bfloat16, *out.shape, x.shape[1], x.stride(0), group)
    launch({"x": x, "out": out, "w": packed, "pairs": pairs, "bias": bias})
    return out


@lru_cache(maxsize=1024)
def _launch_int8(is_bf16: bool, *sizes: int) -> LoopLaunch:
    rows, outputs, columns, _ = sizes
    names = is_bf16, "x", "out", "input_scale", "w", "start", "scale", "bias", SCRATCH
    scratch = _CHUNK * (-(-columns // _COLUMNS) * _COLUMNS + 4) // 4 + _SUMS
    return LoopLaunch(_int8_product.address, rows * outputs * columns, (*names, *sizes), scratch_size=scratch)


@lru_cache(maxsize=1024)
def _launch_int4(is_bf16: bool, *sizes: int) -> LoopLaunch:
    rows, outputs, columns, _, group = sizes
    names = is_bf16, "x", "out", "w", "pairs", "bias", SCRATCH
    scratch = _CHUNK * (columns + columns // group + 1) + _SUMS
    return LoopLaunch(_int4_product.address, rows * outputs * columns, (*names, *sizes), scratch_size=scratch)
