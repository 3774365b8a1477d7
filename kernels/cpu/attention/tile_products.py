"""Steps of `many_queries` in bfloat16 by AMX."""

from __future__ import annotations

import numpy as np

from .. import tiles
from ..kernel import device_function, load
from ..tiles import TILE_COLUMNS, TILE_ROWS
from ..vectors import (
    LANES,
    copy_words,
    exp2_of,
    fill,
    load_half_of_pairs,
    load_vector,
    multiply_add,
    store_pairs,
    sum_of,
)
from .many_queries import KEYS, STEP, attention_by, block_by, place, zero_sums

# Float32 words of one element in a half of a block's packed rows, to compute where the second half begins. Packed keys
# have the same layout.
_HALF = TILE_ROWS // 2


@device_function
def _pack_rows(q, memory, starts, to, size):
    floats, _, _, longs = memory
    for half in range(2):
        for column in range(0, size, TILE_COLUMNS):
            tiles.pack_tile(q, longs, starts + half * TILE_ROWS, column, floats, to + (half * size + column) * _HALF)


@device_function
def _pack_keys(k_cache, v_cache, _row_scales, memory, starts, keys, values, begin, end, size, v_size):
    """Pack keys as rows and values as columns; return whether all values are finite."""
    _, halves, _, longs = memory
    total = fill(np.float32(0))
    for key in range(begin, end):
        for column in range(0, size, TILE_COLUMNS):
            copy_words(k_cache, longs[starts + key] + column, halves, 2 * keys + key * size + column)
        total = multiply_add(zero_sums(v_cache, longs[starts + KEYS + key], v_size), fill(np.float32(1)), total)
    for key in range(begin, end, TILE_COLUMNS):
        for column in range(0, v_size, TILE_ROWS):
            to = 2 * values + column * KEYS + key
            tiles.transpose_tile(v_cache, longs, starts + KEYS + key, column, halves, to, KEYS)
    return sum_of(total) == np.float32(0)


@device_function
def _score(memory, queries, keys, scores, begin, end, size):
    floats, halves, _, _ = memory
    for key in range(begin, end, STEP):
        tiles.zero_sums()
        first = 2 * keys + key * size
        steps = size // TILE_COLUMNS
        tiles.add_products(
            halves, first, first + TILE_ROWS * size, None, None, size, floats, queries, size * _HALF, steps
        )
        tiles.store_sums(floats, scores + place(key, 0))


@device_function
def _weigh(floats, scores, weights, begin, end, half, scale, shift):
    """Write the weights of neighbouring keys as pairs; return their sum."""
    ones, total = fill(np.float32(1)), fill(np.float32(0))
    for key in range(begin, end, 2):
        at = scores + place(key, half)
        a = exp2_of(multiply_add(load_vector(floats, at), scale, shift))
        b = exp2_of(multiply_add(load_vector(floats, at + LANES), scale, shift))
        store_pairs(floats, weights + (half * KEYS + key) * _HALF, a, b)
        total = multiply_add(ones, multiply_add(ones, a, b), total)
    return total


@device_function
def _weights_of(memory, _scores, weights, key, half):
    return load_half_of_pairs(memory[0], weights + (half * KEYS + key // 2 * 2) * _HALF, key % 2 == 1)


@device_function
def _value_of(memory, values, key, column, _value_stride):
    return load(memory[1], 2 * values + column * KEYS + key)


@device_function
def _add_values(memory, values, scores, weights, sums, begin, end, v_size, _value_stride):
    floats, halves, _, _ = memory
    for column in range(0, v_size, 2 * TILE_ROWS):
        to = sums + place(column, 0)
        tiles.load_sums(floats, to)
        first = 2 * values + column * KEYS + begin
        tiles.add_products(
            halves, first, first + TILE_ROWS * KEYS, None, None, KEYS, floats, weights + begin * _HALF, KEYS * _HALF,
            (end - begin) // TILE_COLUMNS,
        )  # fmt: skip
        tiles.store_sums(floats, to)


@device_function
def _store(memory, sums, out, starts, v_size):
    floats, _, _, longs = memory
    for half in range(2):
        for column in range(0, v_size, 2 * LANES):
            first, second = sums + place(column, half), sums + place(column + LANES, half)
            tiles.store_rows(floats, first, second, out, longs, starts + half * LANES, column)


attend_block = block_by(_score, _weigh, _add_values, _weights_of, _value_of)
attend = attention_by(_pack_rows, _pack_keys, attend_block, _store)
