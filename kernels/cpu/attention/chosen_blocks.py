"""Numba kernel of attention over chosen blocks: each query and KV head reads the blocks that it chooses, in place."""

from __future__ import annotations

import numpy as np
import torch

from ...attention.call import AttentionCall
from .. import kernel as nb
from ..launch import NumbaLaunch
from ..vectors import LANES, LOG2_E, load_part, store_part
from .few_formats import _KEYS, _copied_bfloats, _copy_scaled, _rows_together, _score, _weigh
from .few_kernels import LEAST_SCALE, TENSORS, sizes_of
from .few_queries import _change, _place_of_key, _weights
from .many_queries import clear_rows, first_sum, log_sum_exp, number_of_head, options_of, visible


@nb.device_function
def _attend(q, k_cache, v_cache, out, ids, memory, options, sizes, strides, scale, at):
    """Attend with all queries; threads get equal shares of queries and KV heads, in order."""
    _, cu_seqlens_q, _, _ = ids
    num_seqs, num_kv_heads, group, _, _, _, _, num_tokens, _, v_size, _, _, _, _ = sizes
    no_sinks, num_queries = (np.int64(0), np.int64(0)), np.int64(cu_seqlens_q[num_seqs])
    if nb.thread_index() == 0:
        num_heads = num_kv_heads * group
        clear_rows(
            out, options[3], no_sinks, num_queries, num_tokens, num_tokens, num_heads, v_size, strides[8], strides[9]
        )
    first, end = nb.share(num_queries * num_kv_heads)
    seq = 0
    for item in range(first, end):
        token = item // num_kv_heads
        while token >= cu_seqlens_q[seq + 1]:
            seq += 1
        head = item - token * num_kv_heads
        _attend_head(q, k_cache, v_cache, out, ids, memory, options, sizes, strides, scale, at, seq, token, head)


@nb.device_function
def _attend_head(
    q, k_cache, v_cache, out, ids, memory, options, sizes, strides, scale, at, seq, token, head
):  # fmt: skip
    """Attend with a group of heads over the blocks of a query, by online softmax (Milakov and Gimelshein, 2018)."""
    block_table, cu_seqlens_q, seq_lens, chosen = ids
    scratch, queries = memory
    sinks, slopes, cap, lse = options
    (
        _,
        _,
        group,
        num_chosen,
        chosen_size,
        chosen_token,
        chosen_head,
        num_tokens,
        size,
        v_size,
        block_size,
        window_left,
        window_right,
        chunk_size,
    ) = sizes
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, out_token, out_head, table_stride = strides
    scores = at + group * size  # scores begin after the queries
    sums = scores + group * _KEYS
    largest, totals = sums + group * v_size, sums + group * (v_size + 1)
    for r in range(group):
        member = head * group + r
        start = token * q_token + member * q_head
        for i in range(0, size, LANES):
            store_part(queries, r * size + i, load_part(q, start + i, size - i), size - i)
        for i in range(v_size):
            scratch[sums + r * v_size + i] = np.float32(0)
        scratch[largest + r], scratch[totals + r] = first_sum(sinks, member)
    length, table = np.int64(seq_lens[seq]), seq * table_stride
    position = length - np.int64(cu_seqlens_q[seq + 1]) + token
    first_key, end_key = visible(position, length, window_left, window_right, chunk_size)
    for entry in range(num_chosen):
        block = np.int64(chosen[token * chosen_token + head * chosen_head + entry])
        if block < 0:
            continue
        begin, stop = max(first_key, block * chosen_size), min(end_key, (block + 1) * chosen_size)
        for tile in range(begin, stop, _KEYS):
            num_keys = min(_KEYS, stop - tile)
            padded = nb.rounded_up(num_keys, LANES)
            j = 0
            while j < num_keys:
                start, room = _place_of_key(block_table, table, tile + j, block_size, k_block, k_slot)
                run = min(num_keys - j, room)
                # Mask keys behind the block: a full vector of keys is faster than single keys.
                num_scores = min(nb.rounded_up(run, LANES), room, _KEYS - j)
                for r in range(group):
                    to = scores + r * _KEYS + j
                    _score(queries, r * size, k_cache, start + head * k_head, k_slot, num_scores, size, scratch, to)
                j += run
            for r in range(group):
                member, factor, at_scores = head * group + r, scale, scores + r * _KEYS
                if cap > np.float32(0) or slopes[0] != 0:
                    slope = -number_of_head(slopes, member)
                    _change(scratch, at_scores, padded, scale, cap, slope, np.float32(position - tile))
                    factor = np.float32(1)
                for j in range(num_keys, padded):
                    scratch[at_scores + j] = np.float32(-np.inf)
                new_largest, rescale, total = _weights(scratch, at_scores, padded, factor, scratch[largest + r])
                scratch[largest + r] = new_largest
                scratch[totals + r] = scratch[totals + r] * rescale + total
                if rescale != np.float32(1):
                    _copy_scaled(scratch, sums + r * v_size, rescale, scratch, sums + r * v_size, v_size)
            j = 0
            while j < num_keys:
                start, room = _place_of_key(block_table, table, tile + j, block_size, v_block, v_slot)
                run, value = min(num_keys - j, room), start + head * v_head
                r = 0
                while r < group:
                    num_rows = _rows_together(group - r)
                    for column in range(0, v_size, 2 * LANES):
                        to, width, weights = sums + r * v_size + column, v_size - column, scores + r * _KEYS + j
                        _weigh(scratch, to, v_size, v_cache, value + column, v_slot, run, width, weights, num_rows)
                    r += num_rows
                j += run
    for r in range(group):
        member = head * group + r
        total = scratch[totals + r]
        if lse != 0:
            nb.store(nb.floats(lse), member * num_tokens + token, log_sum_exp(scratch[largest + r], total))
        inverse = np.float32(0)
        if total != 0:
            inverse = np.float32(1) / total
        _copy_scaled(scratch, sums + r * v_size, inverse, out, token * out_token + member * out_head, v_size)


@nb.Kernel
def _chosen_attention(arguments):
    values = nb.unpack(arguments, 44)
    is_bf16, q, k_cache, v_cache, out, block_table, cu_seqlens_q, seq_lens = values[1:9]
    ids = nb.int32s(block_table), nb.int32s(cu_seqlens_q), nb.int32s(seq_lens), nb.int32s(values[13])
    options, scratch, scratch_size = options_of(values[9:12], values[41:]), values[12], values[14]
    at, scale = nb.thread_index() * scratch_size, nb.as_float(values[15])
    floats, queries = nb.floats(scratch), scratch + at * 4  # in bytes
    sizes, strides = values[16:30], values[30:41]
    if is_bf16:
        tensors = nb.bfloats(q), nb.bfloats(k_cache), nb.bfloats(v_cache), nb.bfloats(out)
        _attend(*tensors, ids, (floats, _copied_bfloats(queries)), options, sizes, strides, scale, at)
    else:
        wide = nb.floats(q), nb.floats(k_cache), nb.floats(v_cache), nb.floats(out)
        _attend(*wide, ids, (floats, nb.floats(queries)), options, sizes, strides, scale, at)


def launch_for(call: AttentionCall) -> NumbaLaunch:
    """Return a launch that fills the rows of calls with chosen blocks like this one.

    cu_seqlens_q and seq_lens must be contiguous, and ids of the block table checked.
    """
    assert call.chosen_blocks is not None
    (num_tokens, num_q_heads, size), (_, _, num_kv_heads, v_size) = call.q.shape, call.v_cache.shape
    group, num_chosen = num_q_heads // num_kv_heads, call.chosen_blocks.shape[2]
    # As in `few_queries`: queries, scores, sums and two numbers of the softmax, in whole cache lines.
    scratch_size = -(-group * (size + _KEYS + v_size + 2) // 16) * 16
    num_products = num_tokens * num_chosen * call.chosen_block_size * num_q_heads * (size + v_size)
    arguments: tuple[int | str, ...] = (
        call.q.dtype == torch.bfloat16,
        *TENSORS,
        "chosen_blocks",
        scratch_size,
        nb.bits(max(call.softmax_scale * LOG2_E, LEAST_SCALE)),
        len(call.seq_lens),
        num_kv_heads,
        group,
        num_chosen,
        call.chosen_block_size,
        *call.chosen_blocks.stride()[:2],
        *sizes_of(call),
    )
    return NumbaLaunch(_chosen_attention.address, num_products, arguments, scratch_size=scratch_size)
