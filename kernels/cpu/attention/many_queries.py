"""Numba kernel of paged attention for sequences with many queries: packs keys once for several blocks of queries.

Matrices are transposed: scores are [keys, rows], where rows are queries of the heads that share a KV head. So a vector
holds one score for each of 16 rows, and the softmax needs no sums within a vector. Matrices are stored as tiles of 16 x
16, see `place`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import kernel as nb
from ..vectors import (
    LANES,
    LOG2_E,
    distances,
    exp2_of,
    fill,
    larger,
    largest_of,
    load_part,
    load_vector,
    multiply_add,
    softcapped,
    store_vector,
    within,
)

# Rows of a block, in two vectors; keys that are packed at once; keys of a step.
ROWS, KEYS, STEP = 2 * LANES, 128, 32
LOWEST = -3e38  # below every score, but finite: a difference of infinities is NaN
Step = Callable[..., Any]


@nb.device_function
def visible(position, length, window_left, window_right, chunk_size):
    """Return the first key that a query sees and one past the last. If first >= last, the query sees no keys."""
    first, end = max(0, position - window_left), max(0, min(length, position + window_right + 1))
    if chunk_size > 0:
        chunk = position // chunk_size * chunk_size
        first, end = max(first, chunk), max(0, min(end, chunk + chunk_size))
    return first, end


@nb.inlined
def options_of(addresses, values):
    """Return sinks and slopes as `number_of_head` takes them, the softcap in base 2, and the address of lse or 0."""
    sinks, slopes, lse = addresses
    sinks_are_bf16, slopes_are_bf16, cap = values
    return (sinks, sinks_are_bf16), (slopes, slopes_are_bf16), nb.as_float(cap), lse


@nb.device_function
def number_of_head(numbers, head):
    """Return a head's sink or slope in base 2; 0 if there are none. numbers: address, and whether it is bfloat16."""
    address, is_bf16 = numbers
    if address == 0:
        return np.float32(0)
    if is_bf16 != 0:
        return nb.load(nb.bfloats(address), head) * np.float32(LOG2_E)
    return nb.load(nb.floats(address), head) * np.float32(LOG2_E)


@nb.device_function
def first_sum(sinks, head):
    """Return the largest score and the sum of weights before the first key: the sink's, if there is one."""
    if sinks[0] == 0:
        return np.float32(LOWEST), np.float32(0)
    return max(number_of_head(sinks, head), np.float32(LOWEST)), np.float32(1)


@nb.device_function
def log_sum_exp(largest, total):
    """Return the natural logarithm of a row's sum, -inf if it has no terms."""
    if largest <= np.float32(LOWEST):
        return np.float32(-np.inf)
    return largest * np.float32(1 / LOG2_E) + np.log(total)


@nb.device_function
def clear_rows(out, lse, sinks, first, end, num_tokens, num_heads, size, stride_token, stride_head):
    """Set the rows of tokens from `first` to before `end` to their values without keys."""
    for token in range(first, end):
        for head in range(num_heads):
            start = token * stride_token + head * stride_head
            for i in range(size):
                nb.store(out, start + i, 0.0)
            if lse != 0:  # not by assignment, which numba drops in inlined code
                largest, total = first_sum(sinks, head)
                nb.store(nb.floats(lse), head * num_tokens + token, log_sum_exp(largest, total))


@nb.inlined
def changed_score(score, cap, slope, distance):
    """Return scores after softcap, unless `cap` is 0, and after ALiBi, whose slopes are negative."""
    if cap > np.float32(0):
        score = softcapped(score, cap)
    return multiply_add(slope, distance, score)


@nb.device_function
def place(index, half):
    """Return the offset of 16 rows of a key or element in a matrix of tiles of 16 x 16, with rows in two halves."""
    return index // LANES * (LANES * ROWS) + half * (LANES * LANES) + index % LANES * LANES


@nb.device_function
def _hide(memory, scores, bounds, chunk, begin, end):
    """Set the scores that a block's rows must not see to -inf."""
    floats, _, ints, _ = memory
    for step in range(begin, end, STEP):
        if chunk + step < ints[bounds + ROWS - 1] or chunk + step + STEP > ints[bounds + ROWS]:
            for key in range(step, step + STEP):
                for half in range(2):
                    to, first = scores + place(key, half), bounds + half * LANES
                    score = load_vector(floats, to)
                    score = within(score, chunk + key, ints, first, first + ROWS, np.float32(-np.inf))
                    store_vector(floats, to, score)


@nb.device_function
def _change(memory, scores, alibi, cap, chunk, begin, end, scale):
    """Scale a block's scores, then apply softcap and ALiBi."""
    floats, zeros, factor = memory[0], fill(np.float32(0)), fill(scale)
    for half in range(2):
        slope = load_vector(floats, alibi + half * LANES)
        positions = load_vector(floats, alibi + ROWS + half * LANES)
        for key in range(begin, end):
            at = scores + place(key, half)
            score = multiply_add(load_vector(floats, at), factor, zeros)
            distance = distances(positions, fill(np.float32(chunk + key)))
            store_vector(floats, at, changed_score(score, cap, slope, distance))


@nb.device_function
def _largest(floats, scores, begin, end, half):
    m0 = load_vector(floats, scores + place(begin, half))
    m1, m2, m3 = m0, m0, m0
    for key in range(begin, end, 4):
        at = scores + place(key, half)
        m0, m1 = larger(m0, load_vector(floats, at)), larger(m1, load_vector(floats, at + LANES))
        m2, m3 = larger(m2, load_vector(floats, at + 2 * LANES)), larger(m3, load_vector(floats, at + 3 * LANES))
    return larger(larger(m0, m1), larger(m2, m3))


@nb.device_function
def _multiply(floats, sums, v_size, half, factor):
    zeros = fill(np.float32(0))
    for column in range(v_size):
        at = sums + place(column, half)
        store_vector(floats, at, multiply_add(load_vector(floats, at), factor, zeros))


@nb.inlined
def zero_sums(numbers, start, size):
    """Return a vector of sums of products of 0 with `size` numbers: 0, or in a lane NaN if one is not finite."""
    zeros = fill(np.float32(0))
    total = zeros
    for i in range(0, size, LANES):
        total = multiply_add(load_part(numbers, start + i, size - i), zeros, total)
    return total


def block_by(score: Step, weigh: Step, add_values: Step, weights_of: Step, value_of: Step) -> Any:
    """Return a function that attends with a block's rows over packed keys, and multiplies by these steps.

    weights_of, value_of: return the weights of a key, and a packed value.
    """

    @nb.device_function
    def add_visible_values(memory, values, scores, weights, sums, bounds, chunk, begin, end, v_size, value_stride):
        """Add weighted values to rows that see them. `add_values` adds 0 times an infinite value, NaN, to others."""
        floats, _, ints, _ = memory
        for key in range(begin, end):
            for half in range(2):
                weight, first = weights_of(memory, scores, weights, key, half), bounds + half * LANES
                for column in range(v_size):
                    value, to = fill(value_of(memory, values, key, column, value_stride)), sums + place(column, half)
                    product = multiply_add(weight, value, fill(np.float32(0)))
                    product = within(product, chunk + key, ints, first, first + ROWS, np.float32(0))
                    total = multiply_add(product, fill(np.float32(1)), load_vector(floats, to))
                    store_vector(floats, to, total)

    @nb.device_function
    def attend_block(memory, areas, options, block, chunk, begin, end, size, v_size, value_stride, scale, are_finite):
        """Attend with a block's rows over the keys of a chunk, by online softmax (Milakov and Gimelshein, 2018).

        value_stride: distance between two packed values.
        are_finite: whether all packed values are.
        """
        queries, sums, state, bounds, alibi, keys, values, scores, weights, _, _ = areas
        _, slopes, cap, _ = options
        floats = memory[0]
        queries += block * ROWS * nb.rounded_up(size, LANES)
        sums += block * ROWS * nb.rounded_up(v_size, LANES)
        state += block * 2 * ROWS
        bounds += block * 2 * ROWS
        score(memory, queries, keys, scores, begin, end, size)
        if cap > np.float32(0) or slopes[0] != 0:
            _change(memory, scores, alibi + block * 2 * ROWS, cap, chunk, begin, end, scale)
            scale = np.float32(1)
        _hide(memory, scores, bounds, chunk, begin, end)
        zeros, ones, minus_ones, factor = fill(np.float32(0)), fill(np.float32(1)), fill(np.float32(-1)), fill(scale)
        for half in range(2):
            largest, total = state + half * LANES, state + ROWS + half * LANES
            before = load_vector(floats, largest)
            new_largest = larger(before, multiply_add(_largest(floats, scores, begin, end, half), factor, zeros))
            shift = multiply_add(new_largest, minus_ones, zeros)
            weighed = weigh(floats, scores, weights, begin, end, half, factor, shift)
            fallen = multiply_add(before, ones, shift)
            rescale = exp2_of(fallen)
            store_vector(floats, largest, new_largest)
            store_vector(floats, total, multiply_add(load_vector(floats, total), rescale, weighed))
            if largest_of(multiply_add(fallen, minus_ones, zeros)) > np.float32(0):
                _multiply(floats, sums, v_size, half, rescale)
        if are_finite:
            add_values(memory, values, scores, weights, sums, begin, end, v_size, value_stride)
        else:
            add_visible_values(
                memory, values, scores, weights, sums, bounds, chunk, begin, end, v_size, value_stride
            )  # fmt: skip

    return attend_block


def attention_by(pack_rows: Step, pack_keys: Step, attend_block: Step, store: Step) -> Any:
    """Return a kernel over sequences that packs by these steps, and attends with each block by `attend_block`.

    pack_keys: returns whether all values are finite. It takes the caches' formats and the addresses of scales, and
        reads starts of keys, of values and of their scales. Packed keys that are values, too, lie in the place of both.
    """

    @nb.inlined
    def attend_rows(
        q, k_cache, v_cache, row_scales, out, block_table, table, memory, areas, options, sizes, strides, scale, row,
        num_queries, length, head, begin_row, end_row,
    ):  # fmt: skip
        """Attend with rows of one KV head of a sequence."""
        sinks, slopes, _, lse = options
        k_scale_block, k_scale_slot, k_scale_head, v_scale_block, v_scale_slot, v_scale_head = row_scales[6:]
        _, _, _, group, _, num_tokens, size, v_size, block_size, window_left, window_right, chunk_size = sizes
        q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, out_token, out_head, _ = strides
        queries, sums, state, bounds, alibi, keys, values, _, _, rows, slots = areas
        floats, _, ints, longs = memory
        num_blocks, context = (end_row - begin_row + ROWS - 1) // ROWS, length - num_queries
        q_size, sums_size = ROWS * nb.rounded_up(size, LANES), ROWS * nb.rounded_up(v_size, LANES)
        value_stride = nb.rounded_up(v_size, LANES)
        if values == keys:
            value_stride = size
        first = end = np.int64(0)
        for i in range(num_blocks * ROWS):
            r = min(begin_row + i, end_row - 1)  # pad the block with copies of its last row
            query = r // group
            q_at, member, token = i // ROWS * 2 * ROWS + i % ROWS, head * group + r % group, row + query
            longs[rows + q_at] = token * q_token + member * q_head
            longs[rows + q_at + ROWS] = token * out_token + member * out_head
            low, end = visible(context + query, length, window_left, window_right, chunk_size)
            if i == 0:
                first = low
            ints[bounds + q_at], ints[bounds + q_at + ROWS] = np.int32(low), np.int32(end)
            floats[state + q_at], floats[state + q_at + ROWS] = first_sum(sinks, member)
            floats[alibi + q_at] = -number_of_head(slopes, member)
            floats[alibi + q_at + ROWS] = np.float32(context + query)
        for block in range(num_blocks):
            pack_rows(q, memory, rows + block * 2 * ROWS, queries + block * q_size, size)
        for i in range(0, num_blocks * sums_size, LANES):
            store_vector(floats, sums + i, fill(np.float32(0)))
        for chunk in range(first // KEYS * KEYS, end, KEYS):
            begin = nb.rounded_up(max(chunk, first - STEP + 1), STEP) - chunk
            stop = min(KEYS, nb.rounded_up(end - chunk, STEP))
            for i in range(begin, stop):
                key = min(max(chunk + i, first), end - 1)  # pad steps with visible keys
                index = key // block_size
                block_id, offset = np.int64(block_table[table + index]), key - index * block_size
                longs[slots + i] = block_id * k_block + offset * k_slot + head * k_head
                longs[slots + KEYS + i] = block_id * v_block + offset * v_slot + head * v_head
                longs[slots + 2 * KEYS + i] = block_id * k_scale_block + offset * k_scale_slot + head * k_scale_head
                longs[slots + 3 * KEYS + i] = block_id * v_scale_block + offset * v_scale_slot + head * v_scale_head
            are_finite = pack_keys(
                k_cache, v_cache, row_scales[:6], memory, slots, keys, values, begin, stop, size, v_size
            )
            for block in range(num_blocks):
                at = bounds + block * 2 * ROWS
                low = max(begin, (ints[at] - chunk) // STEP * STEP)
                high = min(stop, nb.rounded_up(ints[at + 2 * ROWS - 1] - chunk, STEP))
                if low < high:
                    attend_block(
                        memory, areas, options, block, chunk, low, high, size, v_size, value_stride, scale, are_finite
                    )
        if lse != 0:
            for r in range(begin_row, end_row):
                at = state + (r - begin_row) // ROWS * 2 * ROWS + (r - begin_row) % ROWS
                to = (head * group + r % group) * num_tokens + row + r // group
                nb.store(nb.floats(lse), to, log_sum_exp(floats[at], floats[at + ROWS]))
        for i in range(num_blocks * 2 * ROWS):
            floats[state + i] = np.float32(1) / max(floats[state + i], np.float32(1e-30))  # 0 if no key is visible
        for block in range(num_blocks):
            for half in range(2):
                inverse = load_vector(floats, state + (block * 2 + 1) * ROWS + half * LANES)
                _multiply(floats, sums + block * sums_size, v_size, half, inverse)
            store(memory, sums + block * sums_size, out, rows + block * 2 * ROWS + ROWS, v_size)

    @nb.inlined
    def attend(tensors, values):
        """Attend with all sequences that have many queries; threads get equal shares of pairs of rows and keys."""
        q, k_cache, v_cache, out = tensors
        block_table, cu_seqlens_q, seq_lens = nb.int32s(values[5]), nb.int32s(values[6]), nb.int32s(values[7])
        options = options_of(values[8:11], values[48:51])
        row_scales = values[52:64]
        scratch = values[11] + nb.thread_index() * values[12] * 4  # in bytes
        memory = nb.floats(scratch), nb.bfloats(scratch), nb.int32s(scratch), nb.int64s(scratch)
        scale, areas, sizes, strides = nb.as_float(values[13]), values[14:25], values[25:37], values[37:48]
        num_seqs, min_queries, num_kv_heads, group, num_rows, num_tokens, _, v_size = sizes[:8]
        window_left, window_right, chunk_size = sizes[9:]
        if nb.thread_index() == 0:  # one thread clears the rows of no sequence
            last = np.int64(cu_seqlens_q[num_seqs])
            no_sinks, num_heads = (np.int64(0), np.int64(0)), num_kv_heads * group
            clear_rows(
                out, options[3], no_sinks, last, num_tokens, num_tokens, num_heads, v_size, strides[8], strides[9]
            )
        first, end = np.int64(0), np.int64(0)
        for is_counted in range(2):
            num_before = np.int64(0)
            for seq in range(num_seqs):
                row = np.int64(cu_seqlens_q[seq])
                num_queries, length = np.int64(cu_seqlens_q[seq + 1]) - row, np.int64(seq_lens[seq])
                if num_queries < min_queries:
                    continue
                for head in range(num_kv_heads):
                    for begin_row in range(0, num_queries * group, num_rows):
                        end_row = min(begin_row + num_rows, num_queries * group)
                        if first <= num_before < end:
                            attend_rows(
                                q, k_cache, v_cache, row_scales, out, block_table, seq * strides[10], memory, areas,
                                options, sizes, strides, scale, row, num_queries, length, head, begin_row, end_row,
                            )  # fmt: skip
                        middle = length - num_queries + (begin_row + end_row) // 2 // group
                        first_key, end_key = visible(middle, length, window_left, window_right, chunk_size)
                        num_before += (end_row - begin_row) * (max(0, end_key - first_key) + STEP)
            if is_counted == 0:
                first, end = nb.share(num_before)

    return attend
