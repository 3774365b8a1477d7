"""Numba kernel of paged attention for sequences with few queries, which reads keys in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import kernel as nb
from ..code_pairs import NUMBERS_PER_WORD, PAIR_CODES, PairCodes, columns_of_sums, pair_products, weighted_pair_sums
from ..code_vectors import CODES, NUMBERS, Codes, code_products, weighted_code_sums
from ..vectors import (
    HAS_WIDE_VECTORS,
    LANES,
    count_from,
    distances,
    exp2_of,
    fill,
    larger,
    largest_of,
    load_part,
    load_vector,
    multiply_add,
    prefetch_row,
    store_part,
    store_products,
    store_vector,
    sum_of,
    weighted_sums,
)
from .many_queries import changed_score, clear_rows, first_sum, log_sum_exp, number_of_head, visible

# Keys whose scores a thread holds at once. With 16 rows of head_dim 128, scores and accumulators take 12 KB.
_KEYS = 64
# Pointer to a thread's copy of bfloat16 queries. With wide vectors the copy is bfloat16, because sums of pairs fit into
# registers; else it is float32.
_copied_bfloats = nb.bfloats if HAS_WIDE_VECTORS else nb.floats
_add_to_one, _add_to_two, _add_to_four = weighted_sums(1), weighted_sums(2), weighted_sums(4)
Step = Callable[..., Any]
# Bytes of a cache line, and of scales by what makes a pointer to them.
_LINE = 64
_SCALE_BYTES = {nb.floats: 4, nb.bfloats: 2, nb.uint8s: 1}


class Format(NamedTuple):
    """A format of keys and of values: the steps that read them, and pointers to what they read.

    Attributes:
        copy_query: copies a query.
        fetch: prefetches keys or values.
        fetch_scales: prefetches their scales.
        rows_scored: returns how many of a head's last rows `score` takes next.
        score: computes products of queries and keys.
        scale_weights: multiplies the weights of keys before `weigh`.
        rows_weighed: returns how many of a head's last rows `weigh` takes next.
        weigh: adds `columns` weighted values of keys.
        columns: values of a row that are weighed together.
        copy_sums: writes a row of sums, times a factor.
        unit: factor of all numbers, besides that of a table, for the scale of scores and for `copy_sums`.
        bfloats, floats: make pointers to a cache and to copied queries beside queries of this dtype.
        scales: makes a pointer to scales.
    """

    copy_query: Step
    fetch: Step
    fetch_scales: Step
    rows_scored: Step
    score: Step
    scale_weights: Step
    rows_weighed: Step
    weigh: Step
    columns: int
    copy_sums: Step
    unit: float
    bfloats: tuple[Any, Any]
    floats: tuple[Any, Any]
    scales: Any


@nb.device_function
def _place_of_key(block_table, table, key, block_size, stride_block, stride_slot):
    """Return the place of a key, and the number of keys from it to the end of its block."""
    index = key // block_size
    offset = key - index * block_size
    return np.int64(block_table[table + index]) * stride_block + offset * stride_slot, block_size - offset


@nb.device_function
def _fetch_keys(cache, start, stride, head_stride, num_heads, size, begin, end):
    """Prefetch a range of keys or values that are `stride` apart."""
    for key in range(begin, end):
        for head in range(num_heads):
            prefetch_row(cache, start + key * stride + head * head_stride, size)


@nb.device_function
def _fetch_nibbles(cache, start, stride, head_stride, num_heads, size, begin, end):
    _fetch_keys(cache, start, stride, head_stride, num_heads, size // 2, begin, end)


def _fetch_scales_of(scales_per_line: int) -> Step:
    """Return the step that prefetches the scales of a range of keys or values; many heads' lie in one cache line."""

    @nb.device_function
    def fetch(scales, start, stride, head_stride, num_heads, begin, end):
        heads_per_line = max(1, scales_per_line // max(1, head_stride))
        for key in range(begin, end):
            for head in range(0, num_heads, heads_per_line):
                prefetch_row(scales, start + key * stride + head * head_stride, 1)

    return fetch


@nb.inlined
def _fetch_no_scales(_scales, _start, _stride, _head_stride, _num_heads, _begin, _end):
    pass


@nb.inlined
def _copy_query(q, start, queries, to, size):
    for i in range(0, size, LANES):
        store_part(queries, to + i, load_part(q, start + i, size - i), size - i)


@nb.device_function
def _copy_even_and_odd(q, start, queries, to, size):
    """Copy a query with the even ones of 32 numbers before the odd ones."""
    for chunk in range(0, size, 2 * LANES):
        for i in range(LANES):
            queries[to + chunk + i] = nb.load(q, start + chunk + 2 * i)
            queries[to + chunk + LANES + i] = nb.load(q, start + chunk + 2 * i + 1)


@nb.device_function
def _copy_in_turn(sums, start, factor, out, to, size):
    """Undo the order of `_copy_even_and_odd`, times a factor."""
    for chunk in range(0, size, 2 * LANES):
        for i in range(LANES):
            nb.store(out, to + chunk + 2 * i, sums[start + chunk + i] * factor)
            nb.store(out, to + chunk + 2 * i + 1, sums[start + chunk + LANES + i] * factor)


def _copy_query_in_quarters(numbers: int) -> Step:
    """Return the step that copies a query with every fourth of `numbers` numbers in turn."""
    count = numbers // NUMBERS_PER_WORD

    @nb.device_function
    def copy_query(q, start, queries, to, size):
        for chunk in range(0, size, numbers):
            for quarter in range(NUMBERS_PER_WORD):
                for i in range(count):
                    queries[to + chunk + quarter * count + i] = q[start + chunk + NUMBERS_PER_WORD * i + quarter]

    return copy_query


def _copy_pair_sums(numbers: int) -> Step:
    """Return the step that undoes the order of `weighted_pair_sums`, times a factor."""
    columns = tuple(columns_of_sums(numbers))

    @nb.device_function
    def copy_sums(sums, start, factor, out, to, size):
        for chunk in range(0, size, numbers):
            for i in range(numbers):
                nb.store(out, to + chunk + columns[i], sums[start + chunk + i] * factor)

    return copy_sums


def _scores_by(products_of: Callable[[int, int], Any], num_rows: int, num_sums: int) -> Step:
    """Return a function that computes the products of `num_rows` queries with keys in codes.

    products_of: returns the intrinsic for a number of keys and of rows; see `code_products`.
    num_sums: vectors of sums that it holds.
    """
    num_together = num_sums // num_rows
    products, products_of_one = products_of(num_together, num_rows), products_of(1, num_rows)

    @nb.inlined
    def score(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to):
        end_of_tiles = num_keys // num_together * num_together
        for i in range(0, end_of_tiles, num_together):
            products(
                queries, query, cache, key + i * stride, stride, scales, place + i * scale_stride, scale_stride, size,
                scratch, to + i, _KEYS,
            )  # fmt: skip
        for i in range(end_of_tiles, num_keys):
            products_of_one(
                queries, query, cache, key + i * stride, stride, scales, place + i * scale_stride, scale_stride, size,
                scratch, to + i, _KEYS,
            )  # fmt: skip

    return score


def _score_step(products_of: Callable[[int, int], Any], num_sums: int) -> Step:
    """Return the step that computes scores of keys in codes; see `_scores_by`."""
    score_one, score_two, score_four = (_scores_by(products_of, num_rows, num_sums) for num_rows in (1, 2, 4))

    @nb.inlined
    def score(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to, num_rows):
        """Compute the products of 1, 2 or 4 queries with keys that are `stride` bytes apart; see `code_products`."""
        if num_rows == 4:
            score_four(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to)
        elif num_rows == 2:
            score_two(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to)
        else:
            score_one(queries, query, cache, key, stride, scales, place, scale_stride, num_keys, size, scratch, to)

    return score


def _weigh_step(sums_of: Callable[[int], Any], numbers_per_byte: int, num_scales: int, most_rows: int) -> Step:
    """Return the step that adds weighted values in codes.

    sums_of: returns the intrinsic for a number of rows; see `weighted_code_sums`.
    num_scales: scales of 32 numbers.
    most_rows: rows that share reads of values, 2 or 4.
    """
    add_to_one, add_to_two, add_to_most = sums_of(1), sums_of(2), sums_of(most_rows)

    @nb.inlined
    def weigh(
        scratch,
        sums,
        step,
        cache,
        value,
        stride,
        scales,
        place,
        scale_stride,
        column,
        num_keys,
        size,
        weights,
        num_rows,
    ):
        """Add weighted values of keys, from a column on, to the sums of 1, 2 or 4 rows; see `_weigh`."""
        value += column // numbers_per_byte
        place = place + column // NUMBERS * num_scales
        if num_rows == 4:
            add_to_most(
                scratch, sums, step, weights, _KEYS, cache, value, stride, scales, place, scale_stride, num_keys
            )
        elif num_rows == 2:
            add_to_two(scratch, sums, step, weights, _KEYS, cache, value, stride, scales, place, scale_stride, num_keys)
        else:
            add_to_one(scratch, sums, step, weights, _KEYS, cache, value, stride, scales, place, scale_stride, num_keys)

    return weigh


def _scale_step(unit: float) -> Step:
    """Return the step that multiplies weights by their values' scales, of which each row has one, and by a unit."""

    @nb.device_function
    def scale_weights(scratch, weights, num_rows, scales, place, stride, num_keys):
        for key in range(num_keys):
            scale = scales[place + key * stride] * np.float32(unit)
            for row in range(num_rows):
                scratch[weights + row * _KEYS + key] *= scale

    return scale_weights


@nb.inlined
def _keep_weights(_scratch, _weights, _num_rows, _scales, _place, _stride, _num_keys):
    pass


@nb.inlined
def _score(queries, query, cache, key, stride, num_keys, size, scratch, to):
    """Compute the products of a query with keys that are `stride` apart."""
    end_of_vectors, end_of_tiles = size // LANES * LANES, num_keys // LANES * LANES
    for index in range(0, end_of_tiles, LANES):
        store_products(queries, query, cache, key + index * stride, stride, end_of_vectors, scratch, to + index)
    for index in range(end_of_tiles, num_keys):
        products = fill(np.float32(0))
        for i in range(0, end_of_vectors, LANES):
            products = multiply_add(
                load_vector(queries, query + i), load_vector(cache, key + index * stride + i), products
            )
        scratch[to + index] = sum_of(products)
    if end_of_vectors < size:
        for index in range(num_keys):
            for i in range(end_of_vectors, size):
                scratch[to + index] += nb.load(queries, query + i) * nb.load(cache, key + index * stride + i)


@nb.device_function
def _rows_together(num_rows):
    """Return how many of a head's last `num_rows` rows share the next reads of values.

    More sums than 16 vectors of 512 bits do not fit into registers.
    """
    if HAS_WIDE_VECTORS and num_rows >= 4:
        return 4
    if HAS_WIDE_VECTORS and num_rows >= 2:
        return 2
    return 1


@nb.device_function
def _up_to_two(num_rows):
    """Return how many of a head's last rows share the next reads of values of which a row has eight vectors of sums."""
    return min(num_rows, 2)


@nb.inlined
def _weigh(scratch, sums, step, cache, value, stride, num_keys, size, weights, num_rows):
    """Add the weighted values of keys, `stride` apart, to the sums of 1, 2 or 4 rows.

    It adds the first 32 elements of `size`, or all if there are fewer.
    """
    if size >= 2 * LANES and num_rows == 4:
        _add_to_four(scratch, sums, step, weights, _KEYS, cache, value, stride, num_keys)
    elif size >= 2 * LANES and num_rows == 2:
        _add_to_two(scratch, sums, step, weights, _KEYS, cache, value, stride, num_keys)
    elif size >= 2 * LANES:
        _add_to_one(scratch, sums, step, weights, _KEYS, cache, value, stride, num_keys)
    else:
        for row in range(num_rows):
            for i in range(0, size, LANES):
                total = load_part(scratch, sums + row * step + i, size - i)
                for key in range(num_keys):
                    values = load_part(cache, value + key * stride + i, size - i)
                    total = multiply_add(fill(scratch[weights + row * _KEYS + key]), values, total)
                store_part(scratch, sums + row * step + i, total, size - i)


@nb.inlined
def _one_row(_num_rows):
    """Return how many rows share the next reads of keys: plain ones are read again, from the L1 cache."""
    return 1


@nb.inlined
def _score_unscaled(
    queries, query, cache, key, stride, _scales, _place, _scale_stride, num_keys, size, scratch, to, _num_rows
):
    _score(queries, query, cache, key, stride, num_keys, size, scratch, to)


@nb.inlined
def _weigh_unscaled(
    scratch, sums, step, cache, value, stride, _scales, _place, _scale_stride, column, num_keys, size, weights, num_rows
):
    _weigh(scratch, sums, step, cache, value + column, stride, num_keys, size, weights, num_rows)


@nb.inlined
def _weights(scratch, scores, num_keys, scale, largest):
    """Replace a row's scores by 2^(score * scale - largest so far); return the largest scaled score and the sum.

    Scores are padded with 0 to a multiple of `LANES`.
    """
    maxima = fill(np.float32(-np.inf))
    for j in range(0, num_keys, LANES):
        maxima = larger(maxima, load_vector(scratch, scores + j))
    new_largest = max(largest, largest_of(maxima) * scale)
    ones, factor, below = fill(np.float32(1)), fill(scale), fill(-new_largest)
    total = fill(np.float32(0))
    for j in range(0, num_keys, LANES):
        weights = exp2_of(multiply_add(factor, load_vector(scratch, scores + j), below))
        store_vector(scratch, scores + j, weights)
        total = multiply_add(ones, weights, total)
    return new_largest, nb.exp2(largest - new_largest), sum_of(total)


@nb.device_function
def _change(scratch, scores, num_keys, scale, cap, slope, distance):
    """Scale a row's scores, then apply softcap and ALiBi. distance: from the first key to the row's position."""
    zeros, factor = fill(np.float32(0)), fill(scale)
    for j in range(0, num_keys, LANES):
        away = distances(fill(distance), count_from(np.float32(j)))
        score = multiply_add(load_vector(scratch, scores + j), factor, zeros)
        score = changed_score(score, cap, fill(slope), away)
        store_vector(scratch, scores + j, score)


@nb.inlined
def _copy_scaled(source, start, factor, target, to, size):
    for i in range(0, size, LANES):
        scaled = multiply_add(load_part(source, start + i, size - i), fill(factor), fill(np.float32(0)))
        store_part(target, to + i, scaled, size - i)


def attention_by(keys: Format, values: Format) -> Any:
    """Return a kernel over sequences whose keys and values have these formats."""
    copy_query, fetch_keys, rows_scored, score = keys.copy_query, keys.fetch, keys.rows_scored, keys.score
    fetch_values, scale_weights, weigh, copy_sums = values.fetch, values.scale_weights, values.weigh, values.copy_sums
    rows_weighed, columns = values.rows_weighed, values.columns
    fetch_k_scales, fetch_v_scales = keys.fetch_scales, values.fetch_scales

    @nb.device_function
    def fetch_next(caches, scales, strides, sizes, are_values, place, scale_place, num_heads, begin, end):
        """Prefetch a range of the keys or values that are read next, with their scales."""
        _, _, _, k_slot, k_head, _, v_slot, v_head = strides[:8]
        _, k_scale_slot, k_scale_head, _, v_scale_slot, v_scale_head = strides[11:]
        if are_values:
            fetch_values(caches[1], place, v_slot, v_head, num_heads, sizes[1], begin, end)
            fetch_v_scales(scales[1], scale_place, v_scale_slot, v_scale_head, num_heads, begin, end)
        else:
            fetch_keys(caches[0], place, k_slot, k_head, num_heads, sizes[0], begin, end)
            fetch_k_scales(scales[0], scale_place, k_scale_slot, k_scale_head, num_heads, begin, end)

    @nb.device_function
    def next_places(block_table, table, strides, block_size, are_values, key, head):
        """Return where a key or value that is read next begins, and its scales."""
        block, slot, of_head, scale_block, scale_slot, scale_head = strides[2:5] + strides[11:14]
        if are_values:
            block, slot, of_head, scale_block, scale_slot, scale_head = strides[5:8] + strides[14:]
        place, _ = _place_of_key(block_table, table, key, block_size, block, slot)
        scale_place, _ = _place_of_key(block_table, table, key, block_size, scale_block, scale_slot)
        return place + head * of_head, scale_place + head * scale_head

    @nb.device_function
    def attend_heads(
        q, k_cache, v_cache, row_scales, value_factor, out, block_table, memory, options, strides, scale, at, seq, row,
        num_queries, context, length, head, end_head, group, num_tokens, size, v_size, block_size, window_left,
        window_right, chunk_size, next_keys,
    ):  # fmt: skip
        """Attend with queries of some heads over their keys, by online softmax (Milakov and Gimelshein, 2018).

        It returns whether all sums of values are finite.

        value_factor: of all values.
        context: position of the first query.
        next_keys: place of the keys that are read next, for prefetching.
        """
        scratch, queries = memory
        sinks, slopes, cap, lse = options
        q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, out_token, out_head, table_stride = strides[
            :11
        ]
        k_scales, v_scales = row_scales
        k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head = strides[11:]
        table, num_heads, of_head = seq * table_stride, end_head - head, num_queries * group
        rows = num_heads * of_head
        scores = at + rows * size  # scores begin after the queries
        sums = scores + rows * _KEYS
        largest, totals = sums + rows * v_size, sums + rows * (v_size + 1)
        for r in range(rows):
            member = (head + r // of_head) * group + r % group
            start = (row + r % of_head // group) * q_token + member * q_head
            copy_query(q, start, queries, r * size, size)
            for i in range(v_size):
                scratch[sums + r * v_size + i] = np.float32(0)
            scratch[largest + r], scratch[totals + r] = first_sum(sinks, member)
        first_key, _ = visible(context, length, window_left, window_right, chunk_size)
        _, end_key = visible(context + num_queries - 1, length, window_left, window_right, chunk_size)
        for tile in range(first_key, end_key, _KEYS):
            num_keys = min(_KEYS, end_key - tile)
            j = 0
            while j < num_keys:
                start, room = _place_of_key(block_table, table, tile + j, block_size, k_block, k_slot)
                scales, _ = _place_of_key(block_table, table, tile + j, block_size, k_scale_block, k_scale_slot)
                run = min(num_keys - j, room)
                are_values = j + run == num_keys
                next_key = tile if are_values else tile + j + run
                following, next_scales = next_places(
                    block_table, table, strides, block_size, are_values, next_key, head
                )
                # Mask invisible keys: a full vector of keys is faster than single keys.
                num_scores = min(nb.rounded_up(run, LANES), room, _KEYS - j)
                share = (run + rows - 1) // rows  # keys to prefetch with each row
                for h in range(num_heads):
                    key = start + (head + h) * k_head
                    place = scales + (head + h) * k_scale_head
                    r, end_row = h * of_head, (h + 1) * of_head
                    while r < end_row:
                        num_rows = rows_scored(end_row - r)
                        begin, end = r * share, min((r + num_rows) * share, run)
                        fetch_next(
                            (k_cache, v_cache), row_scales, strides, (size, v_size), are_values, following, next_scales,
                            num_heads, begin, end,
                        )  # fmt: skip
                        to = scores + r * _KEYS + j
                        score(
                            queries, r * size, k_cache, key, k_slot, k_scales, place, k_scale_slot, num_scores, size,
                            scratch, to, num_rows,
                        )  # fmt: skip
                        r += num_rows
                j += run
            padded = nb.rounded_up(num_keys, LANES)
            for query in range(num_queries):
                position = context + query
                first, end = visible(position, length, window_left, window_right, chunk_size)
                for h in range(num_heads):
                    for i in range(group):
                        r, member, factor = h * of_head + query * group + i, (head + h) * group + i, scale
                        at_scores = scores + r * _KEYS
                        if cap > np.float32(0) or slopes[0] != 0:
                            slope = -number_of_head(slopes, member)
                            _change(scratch, at_scores, padded, scale, cap, slope, np.float32(position - tile))
                            factor = np.float32(1)
                        if first > tile or end < tile + padded:
                            for j in range(padded):
                                if tile + j < first or tile + j >= end:
                                    scratch[at_scores + j] = np.float32(-np.inf)
                        new_largest, rescale, total = _weights(scratch, at_scores, padded, factor, scratch[largest + r])
                        scratch[largest + r] = new_largest
                        scratch[totals + r] = scratch[totals + r] * rescale + total
                        if rescale != np.float32(1):
                            _copy_scaled(scratch, sums + r * v_size, rescale, scratch, sums + r * v_size, v_size)
            j = 0
            while j < num_keys:
                start, room = _place_of_key(block_table, table, tile + j, block_size, v_block, v_slot)
                scales, _ = _place_of_key(block_table, table, tile + j, block_size, v_scale_block, v_scale_slot)
                run = min(num_keys - j, room)
                are_values = j + run < num_keys
                following, next_scales = next_keys, scales
                if are_values or tile + _KEYS < end_key:
                    next_key = tile + j + run
                    following, next_scales = next_places(
                        block_table, table, strides, block_size, are_values, next_key, head
                    )
                share = (run + rows - 1) // rows
                for h in range(num_heads):
                    value, r, end_row = start + (head + h) * v_head, h * of_head, (h + 1) * of_head
                    place = scales + (head + h) * v_scale_head
                    while r < end_row:
                        num_rows = rows_weighed(end_row - r)
                        begin, end, weights = r * share, min((r + num_rows) * share, run), scores + r * _KEYS + j
                        scale_weights(scratch, weights, num_rows, v_scales, place, v_scale_slot, run)
                        # Spread prefetches between the sums, because many at once delay the loads of values.
                        step = (num_rows * share * columns + v_size - 1) // v_size
                        for column in range(0, v_size, columns):
                            stop = min(begin + step, end)
                            fetch_next(
                                (k_cache, v_cache), row_scales, strides, (size, v_size), are_values, following,
                                next_scales, num_heads, begin, stop,
                            )  # fmt: skip
                            begin += step
                            to, width = sums + r * v_size + column, v_size - column
                            weigh(
                                scratch, to, v_size, v_cache, value, v_slot, v_scales, place, v_scale_slot, column, run,
                                width, weights, num_rows,
                            )  # fmt: skip
                        r += num_rows
                j += run
        num_sums, zero_sums = rows * v_size, fill(np.float32(0))
        for i in range(0, num_sums, LANES):
            zero_sums = multiply_add(load_part(scratch, sums + i, num_sums - i), fill(np.float32(0)), zero_sums)
        for r in range(rows):
            token, member = row + r % of_head // group, (head + r // of_head) * group + r % group
            start, total = token * out_token + member * out_head, scratch[totals + r]
            if lse != 0:
                nb.store(nb.floats(lse), member * num_tokens + token, log_sum_exp(scratch[largest + r], total))
            inverse = np.float32(0)
            if total != 0:
                inverse = np.float32(1) / total
            copy_sums(scratch, sums + r * v_size, inverse * value_factor, out, start, v_size)
        return sum_of(zero_sums) == np.float32(0)

    @nb.device_function
    def attend(q, k_cache, v_cache, scales, value_factor, out, ids, memory, options, sizes, strides, scale, at):
        """Attend with all sequences that have few queries; threads get equal shares of keys and heads, in order.

        The first thread sets the rows of empty sequences and of no sequence to 0.
        """
        block_table, cu_seqlens_q, seq_lens = ids
        (
            num_seqs,
            max_queries,
            num_kv_heads,
            max_rows,
            group,
            num_tokens,
            size,
            v_size,
            block_size,
            window_left,
            window_right,
            chunk_size,
        ) = sizes
        sinks, _, _, lse = options
        no_sinks, num_heads = (np.int64(0), np.int64(0)), num_kv_heads * group
        total = 0
        for seq in range(num_seqs):
            if cu_seqlens_q[seq + 1] - cu_seqlens_q[seq] <= max_queries:
                total += seq_lens[seq] * num_kv_heads
        first, end = nb.share(total)
        is_first = nb.thread_index() == 0
        if is_first:
            last = np.int64(cu_seqlens_q[num_seqs])
            clear_rows(out, lse, no_sinks, last, num_tokens, num_tokens, num_heads, v_size, strides[8], strides[9])
        first_of_seq = np.int64(0)
        for seq in range(num_seqs):
            row = np.int64(cu_seqlens_q[seq])
            num_queries, length = np.int64(cu_seqlens_q[seq + 1]) - row, np.int64(seq_lens[seq])
            if num_queries > max_queries:
                continue
            if length == 0 and is_first:
                end_row = row + num_queries
                clear_rows(out, lse, sinks, row, end_row, num_tokens, num_heads, v_size, strides[8], strides[9])
            if num_queries > 0 and length > 0:
                head = min(max(first - first_of_seq + length - 1, 0) // length, num_kv_heads)
                end_head = min(max(end - first_of_seq + length - 1, 0) // length, num_kv_heads)
                at_once = max(1, max_rows // (num_queries * group))
                while head < end_head:
                    stop = min(head + at_once, end_head)
                    next_seq, next_head = seq, stop
                    if stop == end_head:
                        next_seq, next_head = min(seq + 1, num_seqs - 1), np.int64(0)
                    next_keys = np.int64(block_table[next_seq * strides[10]]) * strides[2] + next_head * strides[4]
                    # Weights of keys that a query does not see are 0, and 0 times an infinite value is NaN. A query
                    # alone reads only keys that it sees.
                    query, num_together = np.int64(0), num_queries
                    while query < num_queries:
                        are_finite = attend_heads(
                            q, k_cache, v_cache, scales, value_factor, out, block_table, memory, options, strides,
                            scale, at, seq, row + query, num_together, length - num_queries + query, length, head, stop,
                            group, num_tokens, size, v_size, block_size, window_left, window_right, chunk_size,
                            next_keys,
                        )  # fmt: skip
                        if are_finite or num_together == 1:
                            query += num_together
                        else:
                            num_together = np.int64(1)
                    head = stop
            first_of_seq += length * num_kv_heads

    return attend


def _format_of(codes: Codes) -> Format:
    """Return the steps for rows in codes, which are read as bytes and multiplied as float32."""
    pointers = nb.uint8s, nb.floats
    fetch, copy_query, copy_sums = _fetch_keys, _copy_query, _copy_scaled
    if codes.numbers_per_byte == 2:
        fetch, copy_query, copy_sums = _fetch_nibbles, _copy_even_and_odd, _copy_in_turn
    scale_weights, unit = _scale_step(codes.unit), 1.0
    if codes.group_scales is not None:
        scale_weights, unit = _keep_weights, codes.unit
    return Format(
        copy_query=copy_query,
        fetch=fetch,
        fetch_scales=_fetch_scales_of(_LINE // _SCALE_BYTES[codes.scales]),
        rows_scored=_rows_together,
        score=_score_step(partial(code_products, codes), LANES),
        scale_weights=scale_weights,
        rows_weighed=_rows_together,
        weigh=_weigh_step(partial(weighted_code_sums, codes), codes.numbers_per_byte, codes.num_scales, 4),
        columns=NUMBERS,
        copy_sums=copy_sums,
        unit=unit,
        bfloats=pointers,
        floats=pointers,
        scales=codes.scales,
    )


def _format_of_pairs(codes: PairCodes, numbers: int) -> Format:
    """Return the steps for rows of 4-bit codes beside bfloat16 queries, `numbers` at once."""
    pointers = nb.uint8s, nb.bfloats
    return Format(
        copy_query=_copy_query_in_quarters(numbers),
        fetch=_fetch_nibbles,
        fetch_scales=_fetch_scales_of(_LINE // _SCALE_BYTES[codes.scales]),
        rows_scored=_rows_together,
        score=_score_step(partial(pair_products, codes, numbers), LANES // 2),
        scale_weights=_keep_weights,
        rows_weighed=_up_to_two,
        weigh=_weigh_step(partial(weighted_pair_sums, codes, numbers), 2, codes.num_scales, 2),
        columns=numbers,
        copy_sums=_copy_pair_sums(numbers),
        unit=codes.unit,
        bfloats=pointers,
        floats=pointers,
        scales=codes.scales,
    )


# Formats by names of `KvKind`; "" is the dtype of the queries, without scales.
FORMATS = {name: _format_of(codes) for name, codes in CODES.items()}
# Formats of 4 bits beside bfloat16 queries, by numbers that are read at once, and names.
FORMATS_OF_PAIRS = {
    numbers: {name: _format_of_pairs(codes, numbers) for name, codes in PAIR_CODES.items()} for numbers in (128, 64)
}
FORMATS[""] = Format(
    copy_query=_copy_query,
    fetch=_fetch_keys,
    fetch_scales=_fetch_no_scales,
    rows_scored=_one_row,
    score=_score_unscaled,
    scale_weights=_keep_weights,
    rows_weighed=_rows_together,
    weigh=_weigh_unscaled,
    columns=NUMBERS,
    copy_sums=_copy_scaled,
    unit=1.0,
    bfloats=(nb.bfloats, _copied_bfloats),
    floats=(nb.floats, nb.floats),
    scales=nb.floats,
)
