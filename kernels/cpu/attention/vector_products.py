"""Steps of `many_queries` by vectors of float32; other dtypes and codes are converted to float32 first."""

from __future__ import annotations

import numpy as np

from ..code_vectors import E4M3, E5M2, INT4, INT8, widened
from ..kernel import bfloats, device_function, floats, rounded_up
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
)
from .many_queries import KEYS, attention_by, block_by, place

# Numbers of the formats of codes, in arguments of the kernel.
FORMATS = {"int4": 0, "int8": 1, "e4m3": 2, "e4m3_rows": 2, "e5m2": 3}
_widen_int4, _widen_int8, _widen_e4m3, _widen_e5m2 = (widened(codes) for codes in (INT4, INT8, E4M3, E5M2))


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
def _pack_keys(k_cache, v_cache, _row_scales, memory, starts, keys, values, begin, end, size, v_size):
    floats, _, _, longs = memory
    stride = rounded_up(v_size, LANES)
    for key in range(begin, end):
        widen(k_cache, longs[starts + key], floats, keys + key * size, size)
        widen(v_cache, longs[starts + KEYS + key], floats, values + key * stride, v_size)


@device_function
def _widen_codes(number, cache, start, scales, scale_start, memory, to, size):
    """Widen a row of the format with a number. scales: their address."""
    if number == 0:
        _widen_int4(cache, start, bfloats(scales), scale_start, size, memory, to)
    elif number == 1:
        _widen_int8(cache, start, floats(scales), scale_start, size, memory, to)
    elif number == 2:
        _widen_e4m3(cache, start, floats(scales), scale_start, size, memory, to)
    else:
        _widen_e5m2(cache, start, floats(scales), scale_start, size, memory, to)


@device_function
def _pack_codes(k_cache, v_cache, row_scales, memory, starts, keys, values, begin, end, size, v_size):
    """Pack keys and values in codes; their sizes are multiples of 32."""
    number, k_scales, v_scales = row_scales
    wide, _, _, longs = memory
    for key in range(begin, end):
        start, scale_start = longs[starts + key], longs[starts + 2 * KEYS + key]
        _widen_codes(number, k_cache, start, k_scales, scale_start, wide, keys + key * size, size)
        start, scale_start = longs[starts + KEYS + key], longs[starts + 3 * KEYS + key]
        _widen_codes(number, v_cache, start, v_scales, scale_start, wide, values + key * v_size, v_size)


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


attend_block = block_by(_score, _weigh, _add_values)
attend = attention_by(pack_rows, _pack_keys, attend_block, store)
attend_codes = attention_by(pack_rows, _pack_codes, attend_block, store)
