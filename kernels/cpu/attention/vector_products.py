"""Steps of `many_queries` by vectors of float32; other dtypes and codes are converted to float32 first."""

from __future__ import annotations

import numpy as np
import torch

from ...attention.call import LATENT_FORMS
from ...core.dtypes import kv_kind
from ..code_vectors import CODES, NVFP4_LATENT, widened
from ..kernel import bfloats, device_function, floats, rounded_up, uint8s
from ..tiles import pack_columns, store_part_of_rows
from ..vectors import (
    LANES,
    OUTER_ROWS,
    add_outer_products,
    exp2_of,
    fill,
    load_part,
    load_vector,
    multiply_add,
    store_vector,
    sum_of,
)
from .many_queries import KEYS, attention_by, block_by, place, zero_sums

# Numbers of formats, in arguments of the kernel.
_BFLOAT16, _INT4, _INT8, _E4M3, _E5M2, _NVFP4, _FLOAT32, _PACKED, _NVFP4_LATENT = range(9)
_NUMBERS = {"int4": _INT4, "int8": _INT8, "e4m3": _E4M3, "e4m3_rows": _E4M3, "e5m2": _E5M2, "nvfp4": _NVFP4}
_widen_int4, _widen_int8, _widen_e4m3, _widen_e5m2, _widen_nvfp4 = (
    widened(CODES[name]) for name in ("int4", "int8", "e4m3", "e5m2", "nvfp4")
)
_widen_nvfp4_latent = widened(NVFP4_LATENT)
_NVFP4_UNIT = CODES["nvfp4"].unit
_PACKED_FORM, _NVFP4_FORM = LATENT_FORMS["packed"], LATENT_FORMS["nvfp4_latent"]
_RECORDS = {_PACKED_FORM.num_bytes: _PACKED, _NVFP4_FORM.num_bytes: _NVFP4_LATENT}
# Latents of a record, and its rotated numbers.
_LATENTS, _ROPE = _PACKED_FORM.num_codes, _PACKED_FORM.num_numbers - _PACKED_FORM.num_codes
# Bytes before a record's scales, and before its rotated numbers.
_PACKED_SCALES, _PACKED_ROPE = _PACKED_FORM.code_bytes, _PACKED_FORM.code_bytes + _PACKED_FORM.scale_bytes
_NVFP4_ROPE, _NVFP4_SCALES = _NVFP4_FORM.code_bytes, _NVFP4_FORM.code_bytes + _NVFP4_FORM.rope_bytes
_PACKED_GROUP = _PACKED_FORM.group


def number_of_format(cache: torch.Tensor) -> int:
    """Return the number of a cache's format."""
    if cache.dtype == torch.uint8:
        return _RECORDS[cache.shape[-1]]
    if cache.dtype == torch.float32:
        return _FLOAT32
    return _NUMBERS.get(kv_kind(cache.dtype).name, _BFLOAT16)


@device_function
def pack_rows(q, memory, starts, to, size):
    floats, _, _, longs = memory
    for half in range(2):
        for column in range(0, size, LANES):
            pack_columns(q, longs, starts + half * LANES, column, size - column, floats, to + place(column, half))


@device_function
def widen(cache, start, floats, to, size):
    for column in range(0, size, LANES):
        store_vector(floats, to + column, load_part(cache, start + column, size - column))


@device_function
def _are_finite(floats, values, stride, v_size, begin, end):
    """Return whether packed values are finite."""
    total = fill(np.float32(0))
    for key in range(begin, end):
        total = multiply_add(zero_sums(floats, values + key * stride, v_size), fill(np.float32(1)), total)
    return sum_of(total) == np.float32(0)


@device_function
def _pack_keys(k_cache, v_cache, _row_scales, memory, starts, keys, values, begin, end, size, v_size):
    floats, _, _, longs = memory
    stride = rounded_up(v_size, LANES)
    for key in range(begin, end):
        widen(k_cache, longs[starts + key], floats, keys + key * size, size)
    if values == keys:
        return _are_finite(floats, keys, size, v_size, begin, end)
    for key in range(begin, end):
        widen(v_cache, longs[starts + KEYS + key], floats, values + key * stride, v_size)
    return _are_finite(floats, values, stride, v_size, begin, end)


@device_function
def _widen_packed(cache, start, memory, to):
    """Widen a record of latents in e4m3 with a float32 scale for each group."""
    for group in range(_LATENTS // _PACKED_GROUP):
        first, scale = group * _PACKED_GROUP, (start + _PACKED_SCALES) // 4 + group
        _widen_e4m3(
            uint8s(cache), start + first, floats(cache), scale, np.float32(1), _PACKED_GROUP, memory, to + first
        )
    widen(bfloats(cache), (start + _PACKED_ROPE) // 2, memory, to + _LATENTS, _ROPE)


@device_function
def _widen_nvfp4_record(cache, start, one, memory, to):
    """Widen a record of latents in NVFP4. one: address of the number 1."""
    codes, scales = uint8s(cache), uint8s(cache + start + _NVFP4_SCALES)
    _widen_nvfp4_latent(codes, start, scales, 0, np.float32(_NVFP4_UNIT), _LATENTS, memory, to)
    _widen_e4m3(codes, start + _NVFP4_ROPE, floats(one), 0, np.float32(1), _ROPE, memory, to + _LATENTS)


@device_function
def widen_codes(number, cache, start, scales, scale_start, table_scale, memory, to, size):
    """Widen a row of the format with a number. cache, scales, table_scale: their addresses."""
    codes, ones = uint8s(cache), np.float32(1)
    if number == _INT4:
        _widen_int4(codes, start, bfloats(scales), scale_start, ones, size, memory, to)
    elif number == _INT8:
        _widen_int8(codes, start, floats(scales), scale_start, ones, size, memory, to)
    elif number == _E4M3:
        _widen_e4m3(codes, start, floats(scales), scale_start, ones, size, memory, to)
    elif number == _E5M2:
        _widen_e5m2(codes, start, floats(scales), scale_start, ones, size, memory, to)
    elif number == _NVFP4:
        factor = floats(table_scale)[0] * np.float32(_NVFP4_UNIT)
        _widen_nvfp4(codes, start, uint8s(scales), scale_start, factor, size, memory, to)
    elif number == _BFLOAT16:
        widen(bfloats(cache), start, memory, to, size)
    elif number == _PACKED:
        _widen_packed(cache, start, memory, to)
    elif number == _NVFP4_LATENT:
        _widen_nvfp4_record(cache, start, scales, memory, to)
    else:
        widen(floats(cache), start, memory, to, size)


@device_function
def _pack_codes(k_cache, v_cache, row_scales, memory, starts, keys, values, begin, end, size, v_size):
    """Pack keys and values of any formats; their sizes are multiples of 32. k_cache, v_cache: their addresses."""
    k_number, v_number, k_scales, v_scales, k_table, v_table = row_scales
    wide, _, _, longs = memory
    for key in range(begin, end):
        start, scale_start = longs[starts + key], longs[starts + 2 * KEYS + key]
        widen_codes(k_number, k_cache, start, k_scales, scale_start, k_table, wide, keys + key * size, size)
    if values == keys:
        return _are_finite(wide, keys, size, v_size, begin, end)
    for key in range(begin, end):
        start, scale_start = longs[starts + KEYS + key], longs[starts + 3 * KEYS + key]
        widen_codes(v_number, v_cache, start, v_scales, scale_start, v_table, wide, values + key * v_size, v_size)
    return _are_finite(wide, values, v_size, v_size, begin, end)


@device_function
def _score(memory, queries, keys, scores, begin, end, size):
    floats = memory[0]
    for key in range(begin, end, OUTER_ROWS):
        first = keys + key * size
        add_outer_products(floats, first, size, 1, floats, queries, size, floats, scores + place(key, 0), True, None)


@device_function
def _weigh(floats, scores, weights, begin, end, half, scale, shift):
    ones, total = fill(np.float32(1)), fill(np.float32(0))
    for key in range(begin, end):
        at = scores + place(key, half)
        weight = exp2_of(multiply_add(load_vector(floats, at), scale, shift))
        store_vector(floats, at, weight)
        total = multiply_add(ones, weight, total)
    return total


@device_function
def _weights_of(memory, scores, _weights, key, half):
    return load_vector(memory[0], scores + place(key, half))


@device_function
def _value_of(memory, values, key, column, value_stride):
    return memory[0][values + key * value_stride + column]


@device_function
def _add_values(memory, values, scores, weights, sums, begin, end, v_size, value_stride):
    floats = memory[0]
    first, weights = values + begin * value_stride, scores + place(begin, 0)
    for column in range(0, rounded_up(v_size, LANES), OUTER_ROWS):
        to = sums + place(column, 0)
        add_outer_products(
            floats, first + column, 1, value_stride, floats, weights, end - begin, floats, to, False, None
        )


@device_function
def store(memory, sums, out, starts, v_size):
    floats, _, _, longs = memory
    for half in range(2):
        for column in range(0, v_size, LANES):
            tile = sums + place(column, half)
            store_part_of_rows(floats, tile, out, longs, starts + half * LANES, column, v_size - column)


attend_block = block_by(_score, _weigh, _add_values, _weights_of, _value_of)
attend = attention_by(pack_rows, _pack_keys, attend_block, store)
attend_codes = attention_by(pack_rows, _pack_codes, attend_block, store)
