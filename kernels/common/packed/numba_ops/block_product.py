"""Numba kernels of products with int8 and int4 weights in blocks of 64 outputs, the orders of oneDNN and of ATen.

They round or widen the rows, multiply, scale, and add the bias in one pass over the weights.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils

from paged.kernels.common.numba_ops import kernel as nb
from paged.kernels.common.numba_ops.launch import SCRATCH, LoopLaunch
from paged.kernels.common.numba_ops.vectors import (
    LANES,
    VECTOR,
    WORDS,
    at,
    call,
    emitted,
    multiply_add,
    prefetch,
    splat,
    steps,
    sum_from_zero,
)
from paged.kernels.common.packed.numba_ops.product import exact, round_row_to_int8, scale_row

_BLOCK, _VECTORS = 64, 64 // LANES
# Columns that one instruction multiplies, and those that oneDNN stores a multiple of.
_QUAD, _COLUMNS = 4, 64
# Rows that are multiplied while a block is in the cache, and those at once. 32 of 4,096 columns take 512 KB in float32.
_CHUNK, _MOST_ROWS = 32, 4
# Bytes by which weights are read ahead.
_AHEAD = 2048
_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_ZERO = ir.Constant(VECTOR, [0.0] * LANES)


def _at(builder: ir.IRBuilder, pointer: ir.Value, number: int) -> ir.Value:
    return builder.gep(pointer, [ir.Constant(_INT, number)])


def _pointers(builder: ir.IRBuilder, pointer: ir.Value, step: ir.Value, count: int) -> list[ir.Value]:
    pointers = [pointer]
    while len(pointers) < count:
        pointers.append(builder.gep(pointers[-1], [step]))
    return pointers


def _vectors(builder: ir.IRBuilder, pointer: ir.Value, element: ir.Type, count: int = _VECTORS) -> list[ir.Value]:
    """Load vectors of 16 elements that follow each other."""
    places = (at(builder, pointer, ir.Constant(_INT, i * LANES), element) for i in range(count))
    return [builder.load(place, align=element.width // 8 if element != _FLOAT else 4) for place in places]


def _int8_tile(num_rows: int) -> Any:
    """Return an intrinsic: `num_rows` rows of unsigned codes times a block of signed ones and its scales, as float32 in
    `sums`. Each sum begins with an int32 of `start`."""

    @emitted()
    def tile(builder, codes, width, w, start, scale, sums):
        rows, firsts = _pointers(builder, codes, width, num_rows), _vectors(builder, start, _INT)
        totals = [[cgutils.alloca_once(builder, WORDS) for _ in firsts] for _ in rows]
        for own in totals:
            for total, first in zip(own, firsts, strict=True):
                builder.store(first, total)
        with steps(builder, width, _QUAD) as i:
            source = builder.gep(w, [builder.mul(i, ir.Constant(i.type, _BLOCK))])
            for line in range(0, _QUAD * _BLOCK, 64):
                prefetch(builder, _at(builder, source, _AHEAD + line))
            weights = _vectors(builder, builder.bitcast(source, _INT.as_pointer()), _INT)
            for row, own in zip(rows, totals, strict=True):
                word = builder.load(builder.bitcast(builder.gep(row, [i]), _INT.as_pointer()), align=1)
                factor = splat(builder, word, WORDS)
                for weight, total in zip(weights, own, strict=True):
                    args = builder.load(total), factor, weight
                    builder.store(call(builder, "x86.avx512.vpdpbusd.512", WORDS, *args), total)
        scales = _vectors(builder, scale, _FLOAT)
        for number, own in enumerate(totals):
            for i, (factor, total) in enumerate(zip(scales, own, strict=True)):
                to = at(builder, sums, ir.Constant(_INT, number * _BLOCK + i * LANES), _FLOAT)
                builder.store(builder.fmul(builder.sitofp(builder.load(total), VECTOR), factor), to, align=4)

    return tile


def _int4_tile(num_rows: int) -> Any:
    """Return an intrinsic: `num_rows` rows of float32 times a block of int4 weights, in `sums`.

    A weight is (code - 8) * scale + zero. pairs: both, in bfloat16, `num_outputs` for each group of columns.
    group_sums: sum of each group of a row.
    """

    @emitted()
    def tile(builder, x, width, group, w, pairs, num_outputs, group_sums, sums):
        num_groups = builder.sdiv(width, group)
        rows, sums_of = (
            _pointers(builder, pointer, step, num_rows) for pointer, step in ((x, width), (group_sums, num_groups))
        )
        places = [
            [at(builder, sums, ir.Constant(_INT, row * _BLOCK + i * LANES), _FLOAT) for i in range(_VECTORS)]
            for row in range(num_rows)
        ]
        for place in chain(*places):
            builder.store(_ZERO, place, align=4)
        table = ir.Constant(VECTOR, [float(code - 8) for code in range(LANES)])
        four, sixteen, upper = (ir.Constant(WORDS, [number] * LANES) for number in (4, 16, -1 << 16))
        with steps(builder, num_groups, 1) as number:
            totals = [[sum_from_zero(builder) for _ in own] for own in places]
            begin = builder.mul(number, group)
            with steps(builder, group, 2) as i:
                column = builder.add(begin, i)
                source = builder.gep(w, [builder.mul(column, ir.Constant(i.type, _BLOCK // 2))])
                prefetch(builder, _at(builder, source, _AHEAD))
                for step in range(2):
                    bytes_of = _vectors(builder, _at(builder, source, step * _BLOCK // 2), _BYTE, 2)
                    low = [builder.zext(half, WORDS) for half in bytes_of]
                    codes = [*low, *(builder.lshr(half, four) for half in low)]
                    weights = [call(builder, "x86.avx512.permvar.sf.512", VECTOR, table, each) for each in codes]
                    for row, own in zip(rows, totals, strict=True):
                        factor = splat(builder, builder.load(_at(builder, builder.gep(row, [column]), step), align=4))
                        for weight, total in zip(weights, own, strict=True):
                            builder.store(multiply_add.emit(builder, factor, weight, builder.load(total)), total)
            words = _vectors(builder, builder.gep(pairs, [builder.mul(number, num_outputs)]), _INT)
            scales = [builder.bitcast(builder.shl(each, sixteen), VECTOR) for each in words]
            zeros = [builder.bitcast(builder.and_(each, upper), VECTOR) for each in words]
            for own_sums, own, to in zip(sums_of, totals, places, strict=True):
                of_x = splat(builder, builder.load(builder.gep(own_sums, [number]), align=4))
                for scale, zero, total, place in zip(scales, zeros, own, to, strict=True):
                    value = multiply_add.emit(builder, zero, of_x, builder.load(place, align=4))
                    value = multiply_add.emit(builder, scale, builder.load(total), value)
                    builder.store(value, place, align=4)

    return tile


_int8_1, _int8_2, _int8_4 = _int8_tile(1), _int8_tile(2), _int8_tile(4)
_int4_1, _int4_2, _int4_4 = _int4_tile(1), _int4_tile(2), _int4_tile(4)


@nb.device_function
def _rows_at_once(count):
    return 4 if count >= 4 else 2 if count >= 2 else 1


@exact
def _write(sums, scales, row, count, bias, output, has_bias, out, to, num_outputs):
    for i in range(count):
        scale = scales[row + i]
        scale_row(sums, i * _BLOCK, scale, bias, output, has_bias, out, to + (row + i) * num_outputs, _BLOCK)


@exact
def _multiply_int8(x, out, addresses, sizes):
    input_scale, w, start, scale, bias, scratch = addresses
    num_rows, num_outputs, size, stride = sizes
    width = nb.rounded_up(size, _COLUMNS)
    scratch += nb.thread_index() * (_CHUNK * (width + 4) + 4 * _MOST_ROWS * _BLOCK)
    row_scales, sums = scratch + _CHUNK * width, scratch + _CHUNK * (width + 4)
    first, end = nb.share(num_outputs // _BLOCK)
    for begin in range(0, num_rows, _CHUNK):
        count = min(_CHUNK, num_rows - begin)
        for row in range(count):
            place = (begin + row) * stride
            nb.floats(row_scales)[row] = round_row_to_int8(x, place, input_scale, nb.uint8s(scratch), row * width, size)
        for block in range(first, end):
            output, done = block * _BLOCK, np.int64(0)
            block_w, block_start, block_scale = w + output * width, start + output * 4, scale + output * 4
            rest = width, nb.uint8s(block_w), nb.int32s(block_start), nb.floats(block_scale), nb.floats(sums)
            while done < count:
                at_once, codes = _rows_at_once(count - done), nb.uint8s(scratch + done * width)
                if at_once == 4:
                    _int8_4(codes, *rest)
                elif at_once == 2:
                    _int8_2(codes, *rest)
                else:
                    _int8_1(codes, *rest)
                to = begin * num_outputs + output
                _write(
                    nb.floats(sums), nb.floats(row_scales), done, at_once, nb.floats(bias), output, bias != 0, out, to,
                    num_outputs,
                )  # fmt: skip
                done += at_once


@nb.device_function
def _widen(x, first, size, group, row, group_sums):
    """Copy a row as float32, with the sum of each group of its columns."""
    for number in range(size // group):
        total = np.float32(0)
        for i in range(number * group, (number + 1) * group):
            value = nb.load(x, first + i)
            row[i] = value
            total += value
        group_sums[number] = total


@nb.device_function
def _multiply_int4(x, out, addresses, sizes):
    w, pairs, bias, scratch = addresses
    num_rows, num_outputs, size, stride, group = sizes
    row_bytes, sums_bytes = 4 * size, 4 * (size // group)
    scratch += nb.thread_index() * (_CHUNK * (row_bytes + sums_bytes + 4) + 4 * _MOST_ROWS * _BLOCK)
    group_sums = scratch + _CHUNK * row_bytes
    ones, sums = group_sums + _CHUNK * sums_bytes, group_sums + _CHUNK * (sums_bytes + 4)
    for i in range(_CHUNK):
        nb.floats(ones)[i] = 1
    first, end = nb.share(num_outputs // _BLOCK)
    for begin in range(0, num_rows, _CHUNK):
        count = min(_CHUNK, num_rows - begin)
        for row in range(count):
            own, own_sums = nb.floats(scratch + row * row_bytes), nb.floats(group_sums + row * sums_bytes)
            _widen(x, (begin + row) * stride, size, group, own, own_sums)
        for block in range(first, end):
            output, done = block * _BLOCK, np.int64(0)
            block_w, block_pairs = nb.uint8s(w + output * (size // 2)), nb.int32s(pairs + output * 4)
            while done < count:
                at_once, own = _rows_at_once(count - done), nb.floats(scratch + done * row_bytes)
                rest = num_outputs, nb.floats(group_sums + done * sums_bytes), nb.floats(sums)
                if at_once == 4:
                    _int4_4(own, size, group, block_w, block_pairs, *rest)
                elif at_once == 2:
                    _int4_2(own, size, group, block_w, block_pairs, *rest)
                else:
                    _int4_1(own, size, group, block_w, block_pairs, *rest)
                to = begin * num_outputs + output
                _write(
                    nb.floats(sums), nb.floats(ones), done, at_once, nb.floats(bias), output, bias != 0, out, to,
                    num_outputs,
                )  # fmt: skip
                done += at_once


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
    scratch = _CHUNK * (-(-columns // _COLUMNS) * _COLUMNS + 4) // 4 + _MOST_ROWS * _BLOCK
    return LoopLaunch(_int8_product.address, rows * outputs * columns, (*names, *sizes), scratch_size=scratch)


@lru_cache(maxsize=1024)
def _launch_int4(is_bf16: bool, *sizes: int) -> LoopLaunch:
    rows, outputs, columns, _, group = sizes
    names = is_bf16, "x", "out", "w", "pairs", "bias", SCRATCH
    scratch = _CHUNK * (columns + columns // group + 1) + _MOST_ROWS * _BLOCK
    return LoopLaunch(_int4_product.address, rows * outputs * columns, (*names, *sizes), scratch_size=scratch)
