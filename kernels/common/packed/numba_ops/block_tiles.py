"""Intrinsics that multiply a few rows with a block of 64 outputs of int8 or int4 weights."""

from __future__ import annotations

from itertools import chain
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ...numba_ops.vectors import (
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

BLOCK, _VECTORS = 64, 64 // LANES
# Columns that one instruction multiplies.
_QUAD = 4
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


def int8_tile(num_rows: int) -> Any:
    """Return an intrinsic: `num_rows` rows of unsigned codes, four bytes apart, times a block of signed ones and its
    scales, as float32 in `sums`. Each sum begins with an int32 of `start`."""

    @emitted()
    def tile(builder, codes, width, w, start, scale, sums):
        step = builder.add(width, ir.Constant(width.type, 4))
        rows = _pointers(builder, builder.bitcast(codes, _BYTE.as_pointer()), step, num_rows)
        firsts = _vectors(builder, start, _INT)
        totals = [[cgutils.alloca_once(builder, WORDS) for _ in firsts] for _ in rows]
        for row_totals in totals:
            for total, first in zip(row_totals, firsts, strict=True):
                builder.store(first, total)
        with steps(builder, width, _QUAD) as i:
            source = builder.gep(w, [builder.mul(i, ir.Constant(i.type, BLOCK))])
            for line in range(0, _QUAD * BLOCK, 64):
                prefetch(builder, _at(builder, source, _AHEAD + line))
            weights = _vectors(builder, builder.bitcast(source, _INT.as_pointer()), _INT)
            for row, row_totals in zip(rows, totals, strict=True):
                word = builder.load(builder.bitcast(builder.gep(row, [i]), _INT.as_pointer()), align=1)
                factor = splat(builder, word, WORDS)
                for weight, total in zip(weights, row_totals, strict=True):
                    args = builder.load(total), factor, weight
                    builder.store(call(builder, "x86.avx512.vpdpbusd.512", WORDS, *args), total)
        scales = _vectors(builder, scale, _FLOAT)
        for number, row_totals in enumerate(totals):
            for i, (factor, total) in enumerate(zip(scales, row_totals, strict=True)):
                to = at(builder, sums, ir.Constant(_INT, number * BLOCK + i * LANES), _FLOAT)
                builder.store(builder.fmul(builder.sitofp(builder.load(total), VECTOR), factor), to, align=4)

    return tile


def int4_tile(num_rows: int) -> Any:
    """Return an intrinsic: `num_rows` rows of float32 times a block of int4 weights, in `sums`.

    A weight is (code - 8) * scale + zero. pairs: both, in bfloat16, `num_outputs` for each group of columns. The sum of
    each group follows a row, then one number more.
    """

    @emitted()
    def tile(builder, x, width, group, w, pairs, num_outputs, sums):
        num_groups = builder.sdiv(width, group)
        step = builder.add(builder.add(width, num_groups), ir.Constant(width.type, 1))
        rows = _pointers(builder, x, step, num_rows)
        sums_of = [builder.gep(row, [width]) for row in rows]
        places = [
            [at(builder, sums, ir.Constant(_INT, row * BLOCK + i * LANES), _FLOAT) for i in range(_VECTORS)]
            for row in range(num_rows)
        ]
        for place in chain(*places):
            builder.store(_ZERO, place, align=4)
        table = ir.Constant(VECTOR, [float(code - 8) for code in range(LANES)])
        four, sixteen, upper = (ir.Constant(WORDS, [number] * LANES) for number in (4, 16, -1 << 16))
        with steps(builder, num_groups, 1) as number:
            totals = [[sum_from_zero(builder) for _ in row_places] for row_places in places]
            begin = builder.mul(number, group)
            with steps(builder, group, 2) as i:
                column = builder.add(begin, i)
                source = builder.gep(w, [builder.mul(column, ir.Constant(i.type, BLOCK // 2))])
                prefetch(builder, _at(builder, source, _AHEAD))
                for odd in range(2):
                    bytes_of = _vectors(builder, _at(builder, source, odd * BLOCK // 2), _BYTE, 2)
                    low = [builder.zext(half, WORDS) for half in bytes_of]
                    codes = [*low, *(builder.lshr(half, four) for half in low)]
                    weights = [call(builder, "x86.avx512.permvar.sf.512", VECTOR, table, indices) for indices in codes]
                    for row, row_totals in zip(rows, totals, strict=True):
                        factor = splat(builder, builder.load(_at(builder, builder.gep(row, [column]), odd), align=4))
                        for weight, total in zip(weights, row_totals, strict=True):
                            builder.store(multiply_add.emit(builder, factor, weight, builder.load(total)), total)
            words = _vectors(builder, builder.gep(pairs, [builder.mul(number, num_outputs)]), _INT)
            scales = [builder.bitcast(builder.shl(word, sixteen), VECTOR) for word in words]
            zeros = [builder.bitcast(builder.and_(word, upper), VECTOR) for word in words]
            for group_sums, row_totals, to in zip(sums_of, totals, places, strict=True):
                of_x = splat(builder, builder.load(builder.gep(group_sums, [number]), align=4))
                for scale, zero, total, place in zip(scales, zeros, row_totals, to, strict=True):
                    value = multiply_add.emit(builder, zero, of_x, builder.load(place, align=4))
                    value = multiply_add.emit(builder, scale, builder.load(total), value)
                    builder.store(value, place, align=4)

    return tile
