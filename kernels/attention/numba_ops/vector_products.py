"""Attention of many queries by vectors of float32, of which all others are made first; see `many_queries`."""

from __future__ import annotations

import numpy as np

from paged.kernels.attention.numba_ops.many_queries import KEYS, ROWS, attention_by, place
from paged.kernels.common.numba_ops.kernel import device_function, load, rounded_up, store
from paged.kernels.common.numba_ops.tiles import pack_tile, store_rows
from paged.kernels.common.numba_ops.vectors import (
    LANES,
    OUTER_ROWS,
    add_outer_products,
    exp2_of,
    fill,
    load_vector,
    multiply_add,
    store_vector,
)


@device_function
def _pack_columns(q, memory, starts, to, begin, end):
    floats, _, _, longs = memory
    for row in range(ROWS):
        half, lane = row // LANES, row % LANES
        for column in range(begin, end):
            floats[to + place(column, half) + lane] = load(q, longs[starts + row] + column)


@device_function
def _pack_rows(q, memory, starts, to, size):
    _pack_columns(q, memory, starts, to, 0, size)


@device_function
def _pack_float32_rows(q, memory, starts, to, size):
    floats, _, _, longs = memory
    whole = size // LANES * LANES
    for half in range(2):
        for column in range(0, whole, LANES):
            pack_tile(q, longs, starts + half * LANES, column, floats, to + place(column, half))
    _pack_columns(q, memory, starts, to, whole, size)


@device_function
def _widen(cache, start, floats, to, size):
    whole = size // LANES * LANES
    for column in range(0, whole, LANES):
        store_vector(floats, to + column, load_vector(cache, start + column))
    for column in range(whole, size):
        floats[to + column] = load(cache, start + column)


@device_function
def _pack_keys(k_cache, v_cache, memory, starts, keys, values, begin, end, size, v_size):
    floats, _, _, longs = memory
    stride = rounded_up(v_size, LANES)
    for key in range(begin, end):
        _widen(k_cache, longs[starts + key], floats, keys + key * size, size)
        _widen(v_cache, longs[starts + KEYS + key], floats, values + key * stride, v_size)


@device_function
def _score(memory, queries, keys, scores, begin, end, size):
    floats = memory[0]
    for key in range(begin, end, OUTER_ROWS):
        first = keys + key * size
        add_outer_products(floats, first, size, 1, floats, queries, size, floats, scores + place(key, 0), True, None)


@device_function
def _weigh(floats, scores, weights, begin, end, half, scale, shift):
    one, total = fill(np.float32(1)), fill(np.float32(0))
    for key in range(begin, end):
        at = scores + place(key, half)
        weight = exp2_of(multiply_add(load_vector(floats, at), scale, shift))
        store_vector(floats, at, weight)
        total = multiply_add(one, weight, total)
    return total


@device_function
def _add_values(memory, values, scores, weights, sums, begin, end, v_size):
    floats = memory[0]
    stride = rounded_up(v_size, LANES)
    first, weights = values + begin * stride, scores + place(begin, 0)
    for column in range(0, stride, OUTER_ROWS):
        add_outer_products(
            floats,
            first + column,
            1,
            stride,
            floats,
            weights,
            end - begin,
            floats,
            sums + place(column, 0),
            False,
            None,
        )


@device_function
def _store_columns(memory, sums, out, starts, begin, end):
    floats, _, _, longs = memory
    for row in range(ROWS):
        half, lane = row // LANES, row % LANES
        for column in range(begin, end):
            store(out, longs[starts + row] + column, floats[sums + place(column, half) + lane])


@device_function
def _store(memory, sums, out, starts, v_size):
    _store_columns(memory, sums, out, starts, 0, v_size)


@device_function
def _store_float32(memory, sums, out, starts, v_size):
    floats, _, _, longs = memory
    whole = v_size // ROWS * ROWS
    for half in range(2):
        for column in range(0, whole, ROWS):
            first, second = sums + place(column, half), sums + place(column + LANES, half)
            store_rows(floats, first, second, out, longs, starts + half * LANES, column)
    _store_columns(memory, sums, out, starts, whole, v_size)


attend = attention_by(_pack_rows, _pack_keys, _score, _weigh, _add_values, _store)
attend_float32 = attention_by(_pack_float32_rows, _pack_keys, _score, _weigh, _add_values, _store_float32)
