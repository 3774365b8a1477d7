"""Steps of `many_queries` by vectors of float32; other dtypes and codes are converted to float32 first."""

from __future__ import annotations

import numpy as np
import torch

from ...core.dtypes import kv_kind
from ..code_vectors import CODES, widened
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
_BFLOAT16, _INT4, _INT8, _E4M3, _E5M2, _NVFP4, _FLOAT32 = range(7)
_NUMBERS = {"int4": _INT4, "int8": _INT8, "e4m3": _E4M3, "e4m3_rows": _E4M3, "e5m2": _E5M2, "nvfp4": _NVFP4}
_widen_int4, _widen_int8, _widen_e4m3, _widen_e5m2, _widen_nvfp4 = (
    widened(CODES[name]) for name in ("int4", "int8", "e4m3", "e5m2", "nvfp4")
)
_NVFP4_UNIT = CODES["nvfp4"].unit


def number_of_format(dtype: torch.dtype) -> int:
    """Return the number of a cache's format."""
    if dtype == torch.float32:
        return _FLOAT32
    return _NUMBERS.get(kv_kind(dtype).name, _BFLOAT16)


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
def _are_finite(floats, values, stride, begin, end):
    """Return whether packed values are finite."""
    total = fill(np.float32(0))
    for key in range(begin, end):
        total = multiply_add(zero_sums(floats, values + key * stride, stride), fill(np.float32(1)), total)
    return sum_of(total) == np.float32(0)


@device_function
def _pack_keys(k_cache, v_cache, _row_scales, memory, starts, keys, values, begin, end, size, v_size):
    floats, _, _, longs = memory
    stride = rounded_up(v_size, LANES)
    for key in range(begin, end):
        widen(k_cache, longs[starts + key], floats, keys + key * size, size)
        widen(v_cache, longs[starts + KEYS + key], floats, values + key * stride, v_size)
    return _are_finite(floats, values, stride, begin, end)


@device_function
def _widen_codes(number, cache, start, scales, scale_start, table_scale, memory, to, size):
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
    else:
        widen(floats(cache), start, memory, to, size)


@device_function
def _pack_codes(k_cache, v_cache, row_scales, memory, starts, keys, values, begin, end, size, v_size):
    """Pack keys and values of any formats; their sizes are multiples of 32. k_cache, v_cache: their addresses."""
    k_number, v_number, k_scales, v_scales, k_table, v_table = row_scales
    wide, _, _, longs = memory
    for key in range(begin, end):
        start, scale_start = longs[starts + key], longs[starts + 2 * KEYS + key]
        _widen_codes(k_number, k_cache, start, k_scales, scale_start, k_table, wide, keys + key * size, size)
        start, scale_start = longs[starts + KEYS + key], longs[starts + 3 * KEYS + key]
        _widen_codes(v_number, v_cache, start, v_scales, scale_start, v_table, wide, values + key * v_size, v_size)
    return _are_finite(wide, values, v_size, begin, end)


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
def _value_of(memory, values, key, column, v_size):
    return memory[0][values + key * rounded_up(v_size, LANES) + column]


@device_function
def _add_values(memory, values, scores, weights, sums, begin, end, v_size):
    floats = memory[0]
    stride = rounded_up(v_size, LANES)
    first, weights = values + begin * stride, scores + place(begin, 0)
    for column in range(0, stride, OUTER_ROWS):
        to = sums + place(column, 0)
        add_outer_products(floats, first + column, 1, stride, floats, weights, end - begin, floats, to, False, None)


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
