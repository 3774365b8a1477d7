"""Numba kernel of paged attention for sequences with few queries, which reads keys in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernel as nb
from ..vectors import (
    LANES,
    count_from,
    distances,
    exp2_of,
    fill,
    larger,
    largest_of,
    load_vector,
    multiply_add,
    store_vector,
    sum_of,
)
from .few_formats import _KEYS, Format, _copy_scaled
from .many_queries import changed_score, clear_rows, first_sum, log_sum_exp, number_of_head, visible, zero_sums


@nb.device_function
def _place_of_key(block_table, table, key, block_size, stride_block, stride_slot):
    """Return the place of a key, and the number of keys from it to the end of its block."""
    index = key // block_size
    offset = key - index * block_size
    return np.int64(block_table[table + index]) * stride_block + offset * stride_slot, block_size - offset


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


def attention_by(keys: Format, values: Format) -> Any:
    """Return a kernel over sequences whose keys and values have these formats."""
    copy_query, fetch_keys, rows_scored, score = keys.copy_query, keys.fetch, keys.rows_scored, keys.score
    fetch_values, scale_weights, weigh, copy_sums = values.fetch, values.scale_weights, values.weigh, values.copy_sums
    rows_weighed, columns = values.rows_weighed, values.columns
    query_copies, query_floats = keys.query_copies, keys.query_floats
    fetch_k_scales, fetch_v_scales = keys.fetch_scales, values.fetch_scales

    @nb.device_function
    def fetch_next(caches, scales, strides, sizes, are_values, place, scale_place, num_heads, begin, end):
        """Prefetch a range of the keys or values that are read next, with their scales."""
        _, _, _, k_slot, k_head, _, v_slot, v_head = strides[:8]
        _, k_scale_slot, k_scale_head, _, v_scale_slot, v_scale_head = strides[11:]
        if are_values:
            fetch_values(caches[1], place, v_slot, v_head, num_heads, sizes[1], begin, end)
            fetch_v_scales(scales[1], scale_place, v_scale_slot, v_scale_head, num_heads, sizes[1], begin, end)
        else:
            fetch_keys(caches[0], place, k_slot, k_head, num_heads, sizes[0], begin, end)
            fetch_k_scales(scales[0], scale_place, k_scale_slot, k_scale_head, num_heads, sizes[0], begin, end)

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
        q, k_cache, v_cache, row_scales, factors, out, block_table, memory, options, strides, scale, at, seq, row,
        num_queries, context, length, head, end_head, group, num_tokens, size, v_size, block_size, window_left,
        window_right, chunk_size, next_keys,
    ):  # fmt: skip
        """Attend with queries of some heads over their keys, by online softmax (Milakov and Gimelshein, 2018).

        It returns whether all sums of values are finite.

        factors: of all scores and of all values.
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
        scores = at + rows * size * query_floats  # scores begin after the queries
        sums = scores + rows * _KEYS
        largest, totals = sums + rows * v_size, sums + rows * (v_size + 1)
        for r in range(rows):
            member = (head + r // of_head) * group + r % group
            start = (row + r % of_head // group) * q_token + member * q_head
            copy_query(q, start, queries, r * size * query_copies, size)
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
                            queries, r * size * query_copies, k_cache, key, k_slot, k_scales, place, k_scale_slot,
                            num_scores, size, scratch, to, num_rows,
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
                        if factors[0] != np.float32(1):
                            _copy_scaled(scratch, at_scores, factors[0], scratch, at_scores, padded)
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
        are_finite = sum_of(zero_sums(scratch, sums, rows * v_size)) == np.float32(0)
        for r in range(rows):
            token, member = row + r % of_head // group, (head + r // of_head) * group + r % group
            start, total = token * out_token + member * out_head, scratch[totals + r]
            if lse != 0:
                nb.store(nb.floats(lse), member * num_tokens + token, log_sum_exp(scratch[largest + r], total))
            inverse = np.float32(0)
            if total != 0:
                inverse = np.float32(1) / total
            copy_sums(scratch, sums + r * v_size, inverse * factors[1], out, start, v_size)
        return are_finite

    @nb.device_function
    def attend(q, k_cache, v_cache, scales, factors, out, ids, memory, options, sizes, strides, scale, at):
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
                            q, k_cache, v_cache, scales, factors, out, block_table, memory, options, strides,
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
