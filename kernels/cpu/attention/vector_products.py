"""Steps of `many_queries` by vectors of float32; other dtypes are converted to float32 first."""

from __future__ import annotations

import numpy as np

from ..kernel import device_function, rounded_up
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
def _pack_keys(k_cache, v_cache, memory, starts, keys, values, begin, end, size, v_size):
    floats, _, _, longs = memory
    stride = rounded_up(v_size, LANES)
    for key in range(begin, end):
        widen(k_cache, longs[starts + key], floats, keys + key * size, size)
        widen(v_cache, longs[starts + KEYS + key], floats, values + key * stride, v_size)


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
