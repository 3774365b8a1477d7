"""Paged attention by numba for sequences with few queries: every query reads the keys where they lie."""

from __future__ import annotations

import numpy as np
import torch

from paged.kernels.attention.call import AttentionCall
from paged.kernels.attention.numba_ops.visible import visible
from paged.kernels.common.numba_ops.kernel import (
    Kernel,
    as_float,
    bfloats,
    bits,
    device_function,
    exp2,
    floats,
    int32s,
    load,
    rounded_up,
    share,
    store,
    thread_index,
    unpack,
)
from paged.kernels.common.numba_ops.launch import SCRATCH, LoopLaunch
from paged.kernels.common.numba_ops.vectors import (
    LANES,
    LOG2_E,
    exp2_of,
    fill,
    larger,
    largest_of,
    load_vector,
    multiply_add,
    store_sums,
    store_vector,
    sum_of,
)

# Keys whose scores a thread holds at once: with 16 rows they and the accumulators of head_dim 128 are 12 KB.
_KEYS = 64


@device_function
def _attend(q, k_cache, v_cache, out, ids, scratch, sizes, strides, scale, at):
    """Every sequence with few queries: a thread takes as many keys of heads as the others, sequence by sequence."""
    block_table, cu_seqlens_q, seq_lens = ids
    num_seqs, max_queries, num_kv_heads, group, size, v_size, block_size, left, right, chunk_size = sizes
    total = 0
    for seq in range(num_seqs):
        if cu_seqlens_q[seq + 1] - cu_seqlens_q[seq] <= max_queries:
            total += seq_lens[seq] * num_kv_heads
    first, end = share(total)
    begun = np.int64(0)
    for seq in range(num_seqs):
        row = np.int64(cu_seqlens_q[seq])
        num_queries, length = np.int64(cu_seqlens_q[seq + 1]) - row, np.int64(seq_lens[seq])
        if num_queries > max_queries:
            continue
        for head in range(num_kv_heads):
            if first <= begun < end and num_queries > 0:
                _attend_head(
                    q, k_cache, v_cache, out, block_table, scratch, strides, scale, at, seq, row, num_queries, length,
                    head, group, size, v_size, block_size, left, right, chunk_size,
                )  # fmt: skip
            begun += length


@device_function
def _run_of_keys(block_table, table, key, most, block_size, stride_block, stride_slot):
    """Where a key lies, and how many of `most` keys from it on lie in its block."""
    index = key // block_size
    offset = key - index * block_size
    return np.int64(block_table[table + index]) * stride_block + offset * stride_slot, min(most, block_size - offset)


@device_function
def _score(scratch, query, cache, key, size, to):
    total, whole = np.float32(0), size // LANES * LANES
    if whole > 0:
        products = fill(np.float32(0))
        for i in range(0, whole, LANES):
            products = multiply_add(load_vector(scratch, query + i), load_vector(cache, key + i), products)
        total = sum_of(products)
    for i in range(whole, size):
        total += scratch[query + i] * load(cache, key + i)
    scratch[to] = total


@device_function
def _score_4(scratch, query, cache, key, stride, size, to):
    """Four keys at once read the query once."""
    zero, whole = fill(np.float32(0)), size // LANES * LANES
    p0, p1, p2, p3 = zero, zero, zero, zero
    for i in range(0, whole, LANES):
        q = load_vector(scratch, query + i)
        p0 = multiply_add(q, load_vector(cache, key + i), p0)
        p1 = multiply_add(q, load_vector(cache, key + stride + i), p1)
        p2 = multiply_add(q, load_vector(cache, key + 2 * stride + i), p2)
        p3 = multiply_add(q, load_vector(cache, key + 3 * stride + i), p3)
    store_sums(scratch, to, p0, p1, p2, p3)
    for i in range(whole, size):
        for j in range(4):
            scratch[to + j] += scratch[query + i] * load(cache, key + j * stride + i)


@device_function
def _weigh(scratch, sums, cache, value, stride, num_keys, size, weights):
    """sums += the weighted values of keys that are `stride` apart."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        total = load_vector(scratch, sums + i)
        for key in range(num_keys):
            total = multiply_add(fill(scratch[weights + key]), load_vector(cache, value + key * stride + i), total)
        store_vector(scratch, sums + i, total)
    for i in range(whole, size):
        rest = scratch[sums + i]
        for key in range(num_keys):
            rest += scratch[weights + key] * load(cache, value + key * stride + i)
        scratch[sums + i] = rest


@device_function
def _weights(scratch, scores, num_keys, largest):
    """Make 2^(score - the largest so far) of a row's scores, in place, and of what lies behind them 0: how many are
    `LANES` in all. Returns the largest and the sum."""
    most = fill(largest)
    for j in range(0, num_keys, LANES):
        most = larger(most, load_vector(scratch, scores + j))
    most_of_all = largest_of(most)
    shift = np.float32(0) if most_of_all == np.float32(-np.inf) else most_of_all  # rows that see nothing yet
    one, below, total = fill(np.float32(1)), fill(-shift), fill(np.float32(0))
    for j in range(0, num_keys, LANES):
        weights = exp2_of(multiply_add(one, load_vector(scratch, scores + j), below))
        store_vector(scratch, scores + j, weights)
        total = multiply_add(one, weights, total)
    return most_of_all, exp2(largest - shift), sum_of(total)


@device_function
def _scale(scratch, start, size, factor):
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        scaled = multiply_add(load_vector(scratch, start + i), fill(factor), fill(np.float32(0)))
        store_vector(scratch, start + i, scaled)
    for i in range(whole, size):
        scratch[start + i] *= factor


@device_function
def _attend_head(
    q, k_cache, v_cache, out, block_table, scratch, strides, scale, at, seq, row, num_queries, length, head, group,
    size, v_size, block_size, left, right, chunk_size,
):  # fmt: skip
    """All queries of a group of heads over the keys of one, by the online softmax (Milakov and Gimelshein, 2018)."""
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, out_token, out_head, table_stride = strides
    rows, context, table = num_queries * group, length - num_queries, seq * table_stride
    queries, scores = at, at + rows * size
    sums = scores + rows * _KEYS
    largest, totals = sums + rows * v_size, sums + rows * (v_size + 1)
    for r in range(rows):
        start = (row + r // group) * q_token + (head * group + r % group) * q_head
        for i in range(size):
            scratch[queries + r * size + i] = load(q, start + i) * scale
        for i in range(v_size):
            scratch[sums + r * v_size + i] = np.float32(0)
        scratch[largest + r], scratch[totals + r] = np.float32(-np.inf), np.float32(0)
    first_key = max(0, context - left)
    if chunk_size > 0:
        first_key = max(first_key, context // chunk_size * chunk_size)
    end_key = min(length, length + right)
    for tile in range(first_key, end_key, _KEYS):
        num_keys = min(_KEYS, end_key - tile)
        j = 0
        while j < num_keys:
            start, run = _run_of_keys(block_table, table, tile + j, num_keys - j, block_size, k_block, k_slot)
            start += head * k_head
            for key in range(0, run - 3, 4):
                for r in range(rows):
                    _score_4(
                        scratch,
                        queries + r * size,
                        k_cache,
                        start + key * k_slot,
                        k_slot,
                        size,
                        scores + r * _KEYS + j + key,
                    )
            for key in range(run // 4 * 4, run):
                for r in range(rows):
                    _score(
                        scratch, queries + r * size, k_cache, start + key * k_slot, size, scores + r * _KEYS + j + key
                    )
            j += run
        for r in range(rows):
            position = context + r // group
            first, end = visible(position, length, left, right, chunk_size)
            at_scores, padded = scores + r * _KEYS, rounded_up(num_keys, LANES)
            if first > tile or end < tile + padded:
                for j in range(padded):
                    if tile + j < first or tile + j >= end:
                        scratch[at_scores + j] = np.float32(-np.inf)
            most, rescale, total = _weights(scratch, at_scores, padded, scratch[largest + r])
            scratch[largest + r] = most
            scratch[totals + r] = scratch[totals + r] * rescale + total
            _scale(scratch, sums + r * v_size, v_size, rescale)
        j = 0
        while j < num_keys:
            start, run = _run_of_keys(block_table, table, tile + j, num_keys - j, block_size, v_block, v_slot)
            start += head * v_head
            for r in range(rows):
                _weigh(scratch, sums + r * v_size, v_cache, start, v_slot, run, v_size, scores + r * _KEYS + j)
            j += run
    for r in range(rows):
        start = (row + r // group) * out_token + (head * group + r % group) * out_head
        total = scratch[totals + r]
        inverse = np.float32(0) if total == 0 else np.float32(1) / total
        for i in range(v_size):
            store(out, start + i, scratch[sums + r * v_size + i] * inverse)


@Kernel
def _paged_attention(arguments):
    values = unpack(arguments, 33)
    is_bf16, q, k_cache, v_cache, out, block_table, cu_seqlens_q, seq_lens, scratch, scratch_size = values[1:11]
    ids = int32s(block_table), int32s(cu_seqlens_q), int32s(seq_lens)
    at, scale = thread_index() * scratch_size, as_float(values[11])
    sizes, strides = values[12:22], values[22:]
    if is_bf16:
        tensors = bfloats(q), bfloats(k_cache), bfloats(v_cache), bfloats(out)
        _attend(*tensors, ids, floats(scratch), sizes, strides, scale, at)
    else:
        wide = floats(q), floats(k_cache), floats(v_cache), floats(out)
        _attend(*wide, ids, floats(scratch), sizes, strides, scale, at)


# What both loops of attention take first.
TENSORS = "q", "k_cache", "v_cache", "out", "block_table", "cu_seqlens_q", "seq_lens", SCRATCH


def sizes_of(call: AttentionCall) -> tuple[int, ...]:
    """What they take last: sizes, what is visible, and strides."""
    return (
        call.q.shape[2],
        call.v_cache.shape[3],
        call.k_cache.shape[1],
        *call.window,
        call.chunk_size,
        *call.q.stride()[:2],
        *call.k_cache.stride()[:3],
        *call.v_cache.stride()[:3],
        *call.out.stride()[:2],
        call.block_table.stride(0),
    )


def prepare(call: AttentionCall, max_queries: int) -> LoopLaunch:
    """A launch that fills the rows of calls like this, of the same lengths, that belong to sequences with up to
    `max_queries` queries, whose ids are checked; it takes contiguous cu_seqlens_q and seq_lens."""
    (_, num_q_heads, size), (_, _, num_kv_heads, v_size) = call.q.shape, call.v_cache.shape
    group = num_q_heads // num_kv_heads
    # Queries, scores, sums and the softmax's two numbers a row; lines of 64 bytes are of one thread.
    scratch_size = -(-max_queries * group * (size + _KEYS + v_size + 2) // 16) * 16
    arguments: tuple[int | str, ...] = (
        call.q.dtype == torch.bfloat16,
        *TENSORS,
        scratch_size,
        bits(call.softmax_scale * LOG2_E),
        len(call.seq_lens),
        max_queries,
        num_kv_heads,
        group,
        *sizes_of(call),
    )
    return LoopLaunch(_paged_attention.address, call.num_products, arguments, scratch_size=scratch_size)
