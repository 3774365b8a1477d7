"""Intrinsics that multiply a few rows with a block of 64 outputs of int8 or int4 weights.

AVX-512's VNNI adds four products of bytes in one instruction. AVX2 takes three to five. Sums have the same bits,
because both are exact in int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..kernel import cpu_features
from ..vectors import (
    LANES,
    VECTOR,
    WORDS,
    at,
    call,
    emitted,
    load_vector,
    multiples,
    prefetch,
    splat,
    steps,
    sum_from_zero,
)

BLOCK, _VECTORS = 64, 64 // LANES
# Columns that one instruction multiplies.
_QUAD = 4
# Distance in bytes at which weights are prefetched. limits.md compares distances.
_AHEAD = 4096
_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_BYTES, _SHORTS = ir.VectorType(_BYTE, 64), ir.VectorType(ir.IntType(16), 32)
_HAS_VNNI = cpu_features().get("avx512vnni", False)
# Whether this CPU has the instructions for these tiles.
HAS_TILES = _HAS_VNNI or (cpu_features().get("avx2", False) and cpu_features().get("fma", False))


def _at(builder: ir.IRBuilder, pointer: ir.Value, number: int) -> ir.Value:
    return builder.gep(pointer, [ir.Constant(_INT, number)])


def _vectors(builder: ir.IRBuilder, pointer: ir.Value, element: ir.Type, count: int = _VECTORS) -> list[ir.Value]:
    """Load vectors of 16 elements that follow each other."""
    places = (at(builder, pointer, ir.Constant(_INT, i * LANES), element) for i in range(count))
    return [builder.load(place, align=element.width // 8 if element != _FLOAT else 4) for place in places]


def _avx2(builder: ir.IRBuilder, name: str, result: ir.VectorType, a: ir.Value, b: ir.Value) -> ir.Value:
    """Call an instruction of AVX2 for both halves of vectors of 64 bytes."""

    def half(vector: ir.Value, first: int) -> ir.Value:
        count = vector.type.count // 2
        lanes = ir.Constant(ir.VectorType(_INT, count), list(range(first * count, (first + 1) * count)))
        return builder.shuffle_vector(vector, vector, lanes)

    half_result = ir.VectorType(result.element, result.count // 2)
    low, high = (call(builder, f"x86.avx2.{name}", half_result, half(a, i), half(b, i)) for i in range(2))
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_INT, result.count), list(range(result.count))))


def _add_int8_products(builder: ir.IRBuilder, word: ir.Value, weights: Sequence[ir.Value], totals: Any) -> None:
    """Add four unsigned bytes times four signed ones of each weight.

    AVX2 adds products of bytes in pairs, which could exceed 16 bits. So even and odd bytes are multiplied apart, as 16
    bits.
    """
    if _HAS_VNNI:
        factor = splat(builder, word, WORDS)
        for weight, total in zip(weights, totals, strict=True):
            args = builder.load(total), factor, weight
            builder.store(call(builder, "x86.avx512.vpdpbusd.512", WORDS, *args), total)
        return
    eight, mask = ir.Constant(_INT, 8), ir.Constant(_INT, 0x00FF00FF)
    parts = builder.and_(word, mask), builder.and_(builder.lshr(word, eight), mask)
    even, odd = (builder.bitcast(splat(builder, part, WORDS), _SHORTS) for part in parts)
    shift = ir.Constant(_SHORTS, [8] * 32)
    for weight, total in zip(weights, totals, strict=True):
        shorts = builder.bitcast(weight, _SHORTS)
        of_even = builder.ashr(builder.shl(shorts, shift), shift)
        value = builder.add(builder.load(total), _avx2(builder, "pmadd.wd", WORDS, of_even, even))
        value = builder.add(value, _avx2(builder, "pmadd.wd", WORDS, builder.ashr(shorts, shift), odd))
        builder.store(value, total)


def _plus_code_products(
    builder: ir.IRBuilder, weights: Sequence[ir.Value], factors: Sequence[ir.Value], total: ir.Value
) -> ir.Value:
    """Return a total plus weights of 0 to 24 times signed bytes, each vector of weights with its factor.

    The sum of four products is at most 12,288, which fits 16 bits.
    """
    if _HAS_VNNI:
        for weight, factor in zip(weights, factors, strict=True):
            total = call(builder, "x86.avx512.vpdpbusd.512", WORDS, total, weight, factor)
        return total
    shorts = ir.Constant(_SHORTS, [0] * 32)
    for weight, factor in zip(weights, factors, strict=True):
        operands = builder.bitcast(weight, _BYTES), builder.bitcast(factor, _BYTES)
        shorts = builder.add(shorts, _avx2(builder, "pmadd.ub.sw", _SHORTS, *operands))
    ones = ir.Constant(_SHORTS, [1] * 32)
    return builder.add(total, _avx2(builder, "pmadd.wd", WORDS, shorts, ones))


def int8_tile(num_rows: int) -> Any:
    """Return an intrinsic: `num_rows` rows of unsigned codes times a block of signed codes and its scales.

    Codes of a row are four bytes apart. `sums` gets float32. Each sum begins with an int32 of `start`.
    """

    @emitted()
    def tile(builder, codes, width, w, start, scale, sums):
        step = builder.add(width, ir.Constant(width.type, 4))
        rows = multiples(builder, builder.bitcast(codes, _BYTE.as_pointer()), step, num_rows)
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
                _add_int8_products(builder, word, weights, row_totals)
        scales = _vectors(builder, scale, _FLOAT)
        for number, row_totals in enumerate(totals):
            for i, (factor, total) in enumerate(zip(scales, row_totals, strict=True)):
                to = at(builder, sums, ir.Constant(_INT, number * BLOCK + i * LANES), _FLOAT)
                builder.store(builder.fmul(builder.sitofp(builder.load(total), VECTOR), factor), to, align=4)

    return tile


def numbers_of_codes(builder: ir.IRBuilder, words: ir.Value, numbers: Sequence[int]) -> tuple[ir.Value, ir.Value]:
    """Return the values of the codes in the low and in the high bits of each byte, as bytes."""
    four, mask = (ir.Constant(WORDS, [number] * LANES) for number in (4, 0x0F0F0F0F))
    low, high = builder.and_(words, mask), builder.and_(builder.lshr(words, four), mask)
    if list(numbers) == list(range(16)):
        return low, high
    table = ir.Constant(_BYTES, [ir.Constant(_BYTE, numbers[i % 16]) for i in range(64)])

    def look_up(codes: ir.Value) -> ir.Value:
        operands = table, builder.bitcast(codes, _BYTES)
        if _HAS_VNNI:
            looked_up = call(builder, "x86.avx512.pshuf.b.512", _BYTES, *operands)
        else:
            looked_up = _avx2(builder, "pshuf.b", _BYTES, *operands)
        return builder.bitcast(looked_up, WORDS)

    return look_up(low), look_up(high)


def code_tile(num_rows: int, numbers: Sequence[int], step: int) -> Any:
    """Return an intrinsic: `num_rows` rows of signed codes times a block of 4-bit weights, as float32 in `sums`.

    numbers: the values of the codes 0 to 15, from 0 to 255. A row has `row_bytes`: its codes, then for every `step`
    columns a float32 scale and an int32 with which its sums begin. w: 64 bytes for 16 outputs and 8 columns, the first
    four columns in the low bits. scales: bfloat16, `num_outputs` for every `group` columns, a multiple of `step`.
    zeros: in the shape of scales. Each is multiplied by the int32 and the row's scale, and added; a null pointer for 0.
    """

    @emitted()
    def tile(builder, codes, row_bytes, width, group, w, scales, zeros, num_outputs, sums):
        rows = multiples(builder, builder.bitcast(codes, _BYTE.as_pointer()), row_bytes, num_rows)
        # Sum in local variables, which LLVM keeps in registers or on the stack. If `sums` held them, LLVM would keep
        # them twice.
        row_sums = [[sum_from_zero(builder) for _ in range(_VECTORS)] for _ in rows]

        def multiply(begin: ir.Value, firsts: Sequence[ir.Value]) -> list[list[ir.Value]]:
            """Return the totals of `step` columns, which begin with the rows' firsts."""
            row_totals = [[first] * _VECTORS for first in firsts]
            for i in range(0, step, 2 * _QUAD):
                column = builder.add(begin, ir.Constant(begin.type, i))
                source = builder.gep(w, [builder.mul(column, ir.Constant(begin.type, BLOCK // 2))])
                for line in range(0, _QUAD * BLOCK, 64):
                    prefetch(builder, _at(builder, source, _AHEAD + line))
                row_factors = []
                for row in rows:
                    factors = []
                    for half in range(2):
                        place = _at(builder, builder.gep(row, [column]), half * _QUAD)
                        word = builder.load(builder.bitcast(place, _INT.as_pointer()), align=1)
                        factors.append(splat(builder, word, WORDS))
                    row_factors.append(factors)
                for index, words in enumerate(_vectors(builder, builder.bitcast(source, _INT.as_pointer()), _INT)):
                    weights = numbers_of_codes(builder, words, numbers)
                    for factors, totals in zip(row_factors, row_totals, strict=True):
                        totals[index] = _plus_code_products(builder, weights, factors, totals[index])
            return row_totals

        def add(weight: ir.Value, factor: ir.Value, total: ir.Value) -> None:
            # Use one fused multiply-add, which LLVM does not reorder, so that a row has the same bits in tiles of one,
            # two and four rows.
            operands = weight, factor, builder.load(total)
            builder.store(call(builder, f"fma.v{LANES}f32", VECTOR, *operands), total)

        with steps(builder, builder.sdiv(width, group), 1) as group_number:
            of_group = builder.mul(group_number, num_outputs)
            indices = [builder.add(of_group, ir.Constant(of_group.type, i * LANES)) for i in range(_VECTORS)]
            w_scales = [load_vector.emit(builder, scales, index) for index in indices]
            with steps(builder, group, step) as column_of_group:
                begin = builder.add(builder.mul(group_number, group), column_of_group)
                # After a row's codes, each step has eight bytes: the row's scale and the first total.
                at_numbers = builder.add(width, builder.sdiv(begin, ir.Constant(begin.type, step // 8)))
                row_scales, firsts = [], []
                for row in rows:
                    pair = builder.bitcast(builder.gep(row, [at_numbers]), _INT.as_pointer())
                    row_scales.append(splat(builder, builder.bitcast(builder.load(pair, align=1), _FLOAT)))
                    firsts.append(splat(builder, builder.load(_at(builder, pair, 1), align=1), WORDS))
                row_totals = multiply(begin, firsts)
                for row_scale, totals, to in zip(row_scales, row_totals, row_sums, strict=True):
                    for w_scale, total, place in zip(w_scales, totals, to, strict=True):
                        add(builder.fmul(row_scale, w_scale), builder.sitofp(total, VECTOR), place)
                with builder.if_then(builder.icmp_unsigned("!=", zeros, ir.Constant(zeros.type, None))):
                    w_zeros = [load_vector.emit(builder, zeros, index) for index in indices]
                    for row_scale, first, to in zip(row_scales, firsts, row_sums, strict=True):
                        of_x = builder.fmul(row_scale, builder.sitofp(first, VECTOR))
                        for w_zero, place in zip(w_zeros, to, strict=True):
                            add(w_zero, of_x, place)
        for number, total in enumerate(chain(*row_sums)):
            to = at(builder, sums, ir.Constant(_INT, number * LANES), _FLOAT)
            builder.store(builder.load(total), to, align=4)

    return tile
