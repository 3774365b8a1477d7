"""Rows of float32 in the formats of a KV cache: the numba counterpart of `KvKind.encode`.

Rows lie in scratch memory, with zeros behind them up to a multiple of 16 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from ...cache.latent_cache import PACKED_GROUP
from ...core.checks import scale_strides
from ...core.dtypes import SMALLEST, kv_kind
from .. import kernel as nb
from ..vectors import (
    LANES,
    VECTOR,
    WORDS,
    call,
    emitted,
    fill,
    lanes_of,
    larger,
    largest_of,
    load_part,
    load_vector,
    multiply,
    multiply_add,
    number_of_e4m3,
    store_first,
    store_part,
    store_vector,
    sum_of,
)

_BYTE = ir.IntType(8)
# Formats, in arguments of kernels. Copied rows have the cache's dtype and no scale.
_COPIED, _FLOAT32, _BFLOAT16, _INT8, _E4M3_ROWS, _E4M3, _E5M2, _INT4, _NVFP4, _PACKED, _NVFP4_LATENT = range(11)
# Formats by names of `KvKind` or `RecordForm`, and those of plain numbers by dtype.
_FORMATS = {
    "int8": _INT8,
    "e4m3_rows": _E4M3_ROWS,
    "e4m3": _E4M3,
    "e5m2": _E5M2,
    "int4": _INT4,
    "nvfp4": _NVFP4,
    "packed": _PACKED,
    "nvfp4_latent": _NVFP4_LATENT,
}
_PLAIN_FORMATS = {torch.float32: _FLOAT32, torch.bfloat16: _BFLOAT16}
_INT4_GROUP, _NVFP4_GROUP, _PACKED_GROUP = 32, 16, PACKED_GROUP


def _each(number: int) -> ir.Constant:
    return ir.Constant(WORDS, [number] * LANES)


def _clamped(builder: ir.IRBuilder, vector: ir.Value, low: float, high: float) -> ir.Value:
    """Return numbers within two limits; the first for NaN."""
    low_vector, high_vector = ir.Constant(VECTOR, [low] * LANES), ir.Constant(VECTOR, [high] * LANES)
    above = larger.emit(builder, low_vector, vector)
    return builder.select(builder.fcmp_ordered(">", above, high_vector), high_vector, above)


def _rounded(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """Return the nearest whole numbers, ties to even."""
    return builder.fptosi(call(builder, f"rint.v{LANES}f32", VECTOR, vector), WORDS)


def _int8(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    return _rounded(builder, _clamped(builder, vector, -127.0, 127.0))


def _int4(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    return builder.add(_rounded(builder, _clamped(builder, vector, -8.0, 7.0)), _each(8))


def _float_codes(builder: ir.IRBuilder, vector: ir.Value, mantissa: int, bias: int, largest: int) -> ir.Value:
    """Return codes with their sign in bit 7, as `_encode` in core/dtypes.py."""
    shift = 23 - mantissa
    bits = builder.bitcast(vector, WORDS)
    magnitude = builder.and_(bits, _each(0x7FFFFFFF))
    is_odd = builder.and_(builder.lshr(magnitude, _each(shift)), _each(1))
    rounded = builder.add(builder.add(magnitude, _each((1 << (shift - 1)) - 1)), is_odd)
    normal = builder.sub(builder.lshr(rounded, _each(shift)), _each((127 - bias) << mantissa))
    normal = builder.select(builder.icmp_signed("<", normal, _each(largest)), normal, _each(largest))
    # In a sum with this power of two, float32 has the step of subnormal codes.
    exponent = 24 - bias - mantissa
    power = ir.Constant(VECTOR, [2.0**exponent] * LANES)
    shifted = builder.bitcast(builder.fadd(builder.bitcast(magnitude, VECTOR), power), WORDS)
    subnormal = builder.sub(shifted, _each((127 + exponent) << 23))
    is_subnormal = builder.icmp_signed("<", magnitude, _each((128 - bias) << 23))
    code = builder.select(is_subnormal, subnormal, normal)
    code = builder.select(builder.icmp_signed(">", magnitude, _each(0x7F800000)), _each(0x7F), code)
    return builder.or_(code, builder.and_(builder.lshr(bits, _each(24)), _each(0x80)))


def _e4m3(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    return _float_codes(builder, vector, 3, 7, 0x7E)


def _e5m2(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    return _float_codes(builder, vector, 2, 15, 0x7B)


def _e2m1(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    code = _float_codes(builder, vector, 1, 1, 7)
    sign = builder.and_(builder.lshr(code, _each(4)), _each(8))
    return builder.or_(builder.and_(code, _each(7)), sign)


def _code_store(encode: Callable[[ir.IRBuilder, ir.Value], ir.Value], numbers_per_byte: int = 1) -> Any:
    """Return an intrinsic that stores the codes of the first `count` of 16 numbers, or of all, from a byte on."""

    @emitted()
    def store(builder, codes, to, vector, count):
        words = encode(builder, vector)
        if numbers_per_byte == 2:
            even, odd = (lanes_of(builder, words, words, range(first, LANES, 2)) for first in range(2))
            words = builder.or_(even, builder.shl(odd, ir.Constant(odd.type, [4] * odd.type.count)))
            count = builder.ashr(count, ir.Constant(count.type, 1))
        packed = builder.trunc(words, ir.VectorType(_BYTE, words.type.count))
        store_first(builder, builder.gep(codes, [to]), packed, count)

    return store


_store_int8, store_e4m3, _store_e5m2 = (_code_store(encode) for encode in (_int8, _e4m3, _e5m2))
_store_int4, _store_e2m1 = _code_store(_int4, 2), _code_store(_e2m1, 2)


@nb.device_function
def largest_magnitude(row, start, size):
    """Return the largest magnitude of numbers without NaN, and their sum times 0: NaN if one of them is not finite."""
    zero = fill(np.float32(0))
    largest, not_finite = zero, zero
    for i in range(0, size, LANES):
        numbers = load_vector(row, start + i)
        largest = larger(larger(largest, numbers), multiply(numbers, fill(np.float32(-1))))
        not_finite = multiply_add(numbers, zero, not_finite)
    return largest_of(largest), sum_of(not_finite)


@nb.device_function
def _inverse_of(scale):
    """Return 1 / scale; 0 for a scale that is too small to divide by."""
    if np.abs(scale) < np.float32(SMALLEST):
        return np.float32(0)
    return np.float32(1) / scale


@nb.device_function
def _store_numbers(row, start, size, inverse, out, to):
    factor, num_whole = fill(inverse), size // LANES * LANES
    for i in range(0, num_whole, LANES):
        store_vector(out, to + i, multiply(load_vector(row, start + i), factor))
    if num_whole < size:
        numbers = multiply(load_vector(row, start + num_whole), factor)
        store_part(out, to + num_whole, numbers, size - num_whole)


@nb.device_function
def store_as(is_bf16, row, start, size, inverse, out, to):
    """Store numbers times `inverse` as float32 or bfloat16. out: an address."""
    if is_bf16:
        _store_numbers(row, start, size, inverse, nb.bfloats(out), to)
    else:
        _store_numbers(row, start, size, inverse, nb.floats(out), to)


@nb.device_function
def store_float8(row, start, size, inverse, is_e5m2, codes, to):
    """Store numbers times `inverse` as e4m3 or e5m2."""
    factor = fill(inverse)
    for i in range(0, size, LANES):
        numbers = multiply(load_vector(row, start + i), factor)
        if is_e5m2:
            _store_e5m2(codes, to + i, numbers, size - i)
        else:
            store_e4m3(codes, to + i, numbers, size - i)


@nb.device_function
def _store_scaled_row(row, start, size, is_int8, codes, to, scales, scale_at):
    """Store numbers as int8 or e4m3, divided by their scale: their largest magnitude / the largest code."""
    largest_code = np.float32(127) if is_int8 else np.float32(448)
    largest, not_finite = largest_magnitude(row, start, size)
    scales[scale_at] = largest / largest_code + not_finite
    inverse = largest_code / max(largest, np.float32(SMALLEST))
    if not is_int8:
        store_float8(row, start, size, inverse, False, codes, to)
        return
    for i in range(0, size, LANES):
        _store_int8(codes, to + i, multiply(load_vector(row, start + i), fill(inverse)), size - i)


@nb.device_function
def _store_int4_row(row, start, size, codes, to, scales, scale_at):
    """Store numbers as int4. Each 32 of them have a scale, the number of largest magnitude / -8."""
    zero, minus_one = fill(np.float32(0)), fill(np.float32(-1))
    for group in range(0, size, _INT4_GROUP):
        begin, count = start + group, size - group
        first, second = load_vector(row, begin), zero
        if count > LANES:
            second = load_vector(row, begin + LANES)
        largest = largest_of(larger(first, second))
        largest_below = largest_of(larger(multiply(first, minus_one), multiply(second, minus_one)))
        extreme = largest if largest > largest_below else -largest_below
        extreme += sum_of(multiply_add(first, zero, multiply(second, zero)))
        # Round towards 0: the upper half of a float32 is a bfloat16.
        word = np.uint32(np.float32(extreme * np.float32(-0.125)).view(np.uint32) & np.uint32(0xFFFF0000))
        scales[scale_at + group // _INT4_GROUP] = np.uint16(word >> np.uint32(16))
        inverse = fill(_inverse_of(word.view(np.float32)))
        byte = to + group // 2
        _store_int4(codes, byte, multiply(first, inverse), count)
        _store_int4(codes, byte + LANES // 2, multiply(second, inverse), count - LANES)


@nb.device_function
def _code_of_scale(number):
    """Return the e4m3 code of a positive number: the nearest, ties to even, at most 448."""
    number = np.float32(min(number, np.float32(448)))
    if number < np.float32(2.0**-6):  # a multiple of 2^-9
        return np.uint8(np.rint(number * np.float32(512)))
    word = number.view(np.int32)
    word += np.int32(0x7FFFF) + ((word >> np.int32(20)) & np.int32(1))
    # Float32's bias is 127, that of e4m3 is 7.
    return np.uint8((word >> np.int32(20)) - np.int32(120 << 3))


@nb.device_function
def store_nvfp4_row(row, start, size, inverse_table_scale, is_latent, codes, to, scales, scale_at):
    """Store numbers times `inverse_table_scale` as e2m1. Each 16 of them have an e4m3 scale, their largest / 6.

    is_latent: whether scales are at least 2^-9, and stand as those of latents in 352 bytes.
    """
    for group in range(0, size, _NVFP4_GROUP):
        numbers = multiply(load_vector(row, start + group), fill(inverse_table_scale))
        zero = fill(np.float32(0))
        largest = largest_of(larger(larger(zero, numbers), multiply(numbers, fill(np.float32(-1)))))
        code = _code_of_scale(largest * np.float32(1 / 6))
        index = group // _NVFP4_GROUP
        if is_latent:
            code = max(code, np.uint8(1))
            index = 8 * (index % 4) + index // 4
        inverse = np.float32(0)
        if code > np.uint8(0):
            inverse = np.float32(1) / number_of_e4m3(code)
        if sum_of(multiply(numbers, zero)) != np.float32(0):
            code = np.uint8(0x7F)
        scales[scale_at + index] = code
        _store_e2m1(codes, to + group // 2, multiply(numbers, fill(inverse)), size - group)


@nb.device_function
def store_row(row, start, size, target, place):
    """Store a row of float32 in a slot.

    target: see `target_of`.
    place: block, slot of the block and head.
    """
    form, cache, scales, table_scale = target[:4]
    block, slot, head = place
    to = block * target[4] + slot * target[5] + head * target[6]
    scale_at = block * target[7] + slot * target[8] + head * target[9]
    codes = nb.uint8s(cache)
    if form in (_INT8, _E4M3_ROWS):
        _store_scaled_row(row, start, size, form == _INT8, codes, to, nb.floats(scales), scale_at)
    elif form == _INT4:
        _store_int4_row(row, start, size, codes, to, nb.bfloats(scales), scale_at)
    elif form in (_NVFP4, _NVFP4_LATENT):
        inverse = np.float32(1)
        if table_scale != 0:
            inverse = np.float32(1) / nb.floats(table_scale)[0]
        store_nvfp4_row(row, start, size, inverse, form == _NVFP4_LATENT, codes, to, nb.uint8s(scales), scale_at)
    elif form == _PACKED:
        for group in range(size // _PACKED_GROUP):
            first = group * _PACKED_GROUP
            _store_scaled_row(
                row, start + first, _PACKED_GROUP, False, codes, to + first, nb.floats(scales), scale_at + group
            )
    else:
        inverse = np.float32(1)
        if scales != 0:
            inverse = np.float32(1) / nb.floats(scales)[scale_at]
        if form in (_E4M3, _E5M2):
            store_float8(row, start, size, inverse, form == _E5M2, codes, to)
        else:
            store_as(form == _BFLOAT16, row, start, size, inverse, cache, to)


@nb.device_function
def _widen(rows, start, size, wide, at):
    num_whole = size // LANES * LANES
    for i in range(0, num_whole, LANES):
        store_vector(wide, at + i, load_vector(rows, start + i))
    if num_whole < size:
        store_vector(wide, at + num_whole, load_part(rows, start + num_whole, size - num_whole))


@nb.device_function
def load_row(rows, is_bf16, start, size, wide, at):
    """Copy a row of float32 or bfloat16 as float32, with zeros up to a multiple of 16. rows: an address."""
    if is_bf16:
        _widen(nb.bfloats(rows), start, size, wide, at)
    else:
        _widen(nb.floats(rows), start, size, wide, at)


@nb.device_function
def _copy_row(rows, start, size, out, to):
    for i in range(size):
        out[to + i] = rows[start + i]


@nb.device_function
def copy_or_store_row(rows, is_bf16, start, size, wide, at, target, place):
    """Store a row in a slot, as it is or by way of `wide`; see `load_row` and `store_row`."""
    if target[0] != _COPIED:
        load_row(rows, is_bf16, start, size, wide, at)
        store_row(wide, at, size, target, place)
        return
    block, slot, head = place
    to = block * target[4] + slot * target[5] + head * target[6]
    if is_bf16:
        _copy_row(nb.bfloats(rows), start, size, nb.bfloats(target[1]), to)
    else:
        _copy_row(nb.floats(rows), start, size, nb.floats(target[1]), to)


def has_format(cache: torch.Tensor, kind: str | None = None) -> bool:
    """Return whether kernels write rows of a cache. kind: as in `target_of`."""
    return cache.dtype in _PLAIN_FORMATS or (kind or kv_kind(cache.dtype).name) in _FORMATS


def target_of(
    name: str,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    copied: torch.dtype | None = None,
    kind: str | None = None,
) -> list[int | str]:
    """Return the 10 arguments that describe a cache that `has_format`.

    name: "k" or "v".
    copied: dtype of rows that a cache of this dtype takes as they are.
    kind: name of the cache's `RecordForm` if it holds the codes of records, else None.
    """
    form = _PLAIN_FORMATS.get(cache.dtype)
    if form is None:
        form = _FORMATS[kind or kv_kind(cache.dtype).name]
    if cache.dtype == copied and scale is None:
        form = _COPIED
    pointers = f"{name}_cache_ptr", f"{name}_scale_ptr", f"{name}_table_scale_ptr"
    return [form, *pointers, *cache.stride()[:3], *scale_strides(scale=scale).values()]
