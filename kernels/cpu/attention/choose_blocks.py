"""Numba kernels of `choose_blocks` and `choose_keys`: the scores of all blocks, then each query's best ones.

A chosen key is a block of one key. Keys of 8 bits are widened once for all queries that meet a tile of keys together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...attention.choose_blocks import BlockRules
from ...core.operation import Run
from .. import kernel as nb
from ..launch import SCRATCH, NumbaLaunch
from ..vectors import (
    LANES,
    fill,
    larger,
    largest_of,
    load_part,
    load_vector,
    multiply_add,
    number_of_e4m3,
    store_part,
    store_vector,
)
from .few_formats import _KEYS, _copied_bfloats, _score
from .few_queries import _place_of_key

# Most heads of all queries that meet a tile of keys together: 32 rows of 128 float32 take 16 KB of the L1 cache.
_ROWS = 32
_NO_RANK = np.int64(-(1 << 63))
_LAST_ID = np.int64(2**31 - 1)
# Scores as integers, see `_ordered`.
_FORCED, _NAN, _MINUS_INFINITY = np.int64(0x7FFFFFFF), np.int64(0x7FC00000), np.int64(-0x7F800001)


@nb.device_function
def _end_of(token, seq, cu_seqlens_q, seq_lens):
    """Return one past the last position that a token sees."""
    return max(np.int64(seq_lens[seq]) - np.int64(cu_seqlens_q[seq + 1]) + token + 1, 0)


@nb.device_function
def _widen_keys(codes, scales, ids, keys, scratch, at_scales, sizes, strides, seq, first_key, num_keys):
    """Write the e4m3 numbers of consecutive keys of a sequence to `keys`, exact, and their scales to scratch."""
    size, block_size = sizes[5], sizes[6]
    key_block, key_slot, table_stride = strides[3:]
    for key in range(num_keys):
        start, _ = _place_of_key(ids[0], seq * table_stride, first_key + key, block_size, key_block, key_slot)
        scratch[at_scales + key] = scales[start // 4]
        for i in range(size):
            nb.store(keys, key * size + i, number_of_e4m3(codes[start + i]))


@nb.device_function
def _score_blocks(q, key_cache, ids, memory, sizes, strides, at):
    """Score the blocks of all queries of a span; threads get equal shares of groups of queries and their blocks."""
    _, cu_seqlens_q, seq_lens = ids
    num_seqs, first_token, end_token, num_heads, _, head_dim, _, block_keys, pool_size, _, _ = sizes
    at_once = max(_ROWS // num_heads, 1)
    # The first pass counts blocks, the second one scores this thread's share of them.
    total = first = end = np.int64(0)
    for is_scoring in range(2):
        if is_scoring:
            first, end = nb.share(total)
        before = np.int64(0)
        for seq in range(num_seqs):
            token = max(np.int64(cu_seqlens_q[seq]), first_token)
            end_of_seq = min(np.int64(cu_seqlens_q[seq + 1]), end_token)
            while token < end_of_seq:
                num_tokens = min(at_once, end_of_seq - token)
                num_keys = _end_of(token + num_tokens - 1, seq, cu_seqlens_q, seq_lens) // pool_size
                num_blocks = (num_keys + block_keys - 1) // block_keys
                begin, stop = max(first - before, 0), min(end - before, num_blocks)
                if is_scoring and begin < stop:
                    first_key, end_key = begin * block_keys, min(num_keys, stop * block_keys)
                    _copy_queries(q, memory[0], token, num_tokens * num_heads, num_heads, head_dim, strides)
                    _score_keys(
                        key_cache, ids, memory, sizes, strides, at, seq, token, num_tokens, first_key, end_key
                    )  # fmt: skip
                before += num_blocks
                token += num_tokens
        total = before


@nb.device_function
def _score_candidates(q, key_cache, ids, memory, sizes, strides, at, candidates):
    """Score the keys of each query's candidates; threads get equal shares of all candidates."""
    _, cu_seqlens_q, seq_lens = ids
    blocks, num_candidates, candidate_size, stride = candidates
    num_seqs, first_token, end_token, num_heads, _, head_dim, _, _, pool_size, _, _ = sizes
    first, end = nb.share((end_token - first_token) * num_candidates)
    seq, copied = np.int64(0), np.int64(-1)
    for item in range(first, end):
        token = first_token + item // num_candidates
        while seq < num_seqs and token >= cu_seqlens_q[seq + 1]:
            seq += 1
        if seq == num_seqs:  # rows of no sequence
            break
        candidate = np.int64(blocks[token * stride + item % num_candidates])
        first_key = candidate * candidate_size
        end_key = min(first_key + candidate_size, _end_of(token, seq, cu_seqlens_q, seq_lens) // pool_size)
        if candidate < 0 or first_key >= end_key:
            continue
        if token != copied:
            _copy_queries(q, memory[0], token, num_heads, num_heads, head_dim, strides)
            copied = token
        _score_keys(key_cache, ids, memory, sizes, strides, at, seq, token, 1, first_key, end_key)


@nb.device_function
def _copy_queries(q, queries, token, rows, num_heads, size, strides):
    """Copy rows, the heads of consecutive queries, to `queries`."""
    for row in range(rows):
        start = (token + row // num_heads) * strides[0] + row % num_heads * strides[1]
        for i in range(0, size, LANES):
            store_part(queries, row * size + i, load_part(q, start + i, size - i), size - i)


@nb.device_function
def _score_keys(key_cache, ids, memory, sizes, strides, at, seq, token, num_tokens, first_key, end_key):
    """Score keys of whole blocks for consecutive queries of a sequence, which are copied."""
    block_table, cu_seqlens_q, seq_lens = ids
    queries, scratch, weights, has_weights, block_scores, is_packed, codes, scales = memory
    _, first_token, _, num_heads, num_lists, size, block_size, block_keys, pool_size, is_mean, most_blocks = sizes
    _, _, weights_token, key_block, key_slot, table_stride = strides
    scores = at + max(_ROWS, num_heads) * size  # scores begin after the queries
    key_scales = scores + num_heads * _KEYS
    for tile in range(first_key, end_key, _KEYS):
        num_keys = min(_KEYS, end_key - tile)
        if is_packed:
            _widen_keys(codes, scales, ids, key_cache, scratch, key_scales, sizes, strides, seq, tile, num_keys)
        for query in range(num_tokens):
            visible = min(_end_of(token + query, seq, cu_seqlens_q, seq_lens) // pool_size - tile, num_keys)
            j = 0
            while j < visible:
                start, room, step = j * size, num_keys - j, size
                if not is_packed:
                    start, room = _place_of_key(
                        block_table, seq * table_stride, tile + j, block_size, key_block, key_slot
                    )
                    step = key_slot
                run = min(visible - j, room)
                # Score keys behind the last visible one: a full vector of keys is faster than single keys.
                num_scores = min(nb.rounded_up(run, LANES), room, _KEYS - j)
                for head in range(num_heads):
                    place = (query * num_heads + head) * size
                    to = scores + head * _KEYS + j
                    _score(queries, place, key_cache, start, step, num_scores, size, scratch, to)
                j += run
            if is_packed:
                for head in range(num_heads):
                    for j in range(visible):
                        scratch[scores + head * _KEYS + j] *= scratch[key_scales + j]
            if has_weights:
                first_weight = (token + query) * weights_token
                for j in range(0, visible, LANES):
                    total = fill(np.float32(0))
                    for head in range(num_heads):
                        positive = larger(load_vector(scratch, scores + head * _KEYS + j), fill(np.float32(0)))
                        total = multiply_add(fill(weights[first_weight + head]), positive, total)
                    store_vector(scratch, scores + j, total)
            for index in range(num_lists):
                to = ((token + query - first_token) * num_lists + index) * most_blocks
                _reduce(scratch, scores + index * _KEYS, tile, visible, block_keys, is_mean, block_scores, to)


@nb.device_function
def _reduce(scratch, scores, tile, visible, block_keys, is_mean, block_scores, to):
    """Add the scores of a tile's visible keys to the largest scores, or sums, of their blocks."""
    if block_keys == 1:
        for i in range(visible):
            block_scores[to + tile + i] = scratch[scores + i]
        return
    j = 0
    while j < visible:
        block = (tile + j) // block_keys
        stop = min((block + 1) * block_keys - tile, visible)
        end_of_vectors = j + (stop - j) // LANES * LANES
        best, total = np.float32(-np.inf), np.float32(0)
        if end_of_vectors > j:
            maxima = fill(best)
            for i in range(j, end_of_vectors, LANES):
                maxima = larger(maxima, load_vector(scratch, scores + i))
            best = largest_of(maxima)
        for i in range(end_of_vectors, stop):
            best = max(best, scratch[scores + i])
        result = best
        if is_mean:
            for i in range(j, stop):
                total += scratch[scores + i]
            result = total
        if tile + j > block * block_keys:  # the block began in an earlier tile
            earlier = block_scores[to + block]
            result = max(best, earlier)
            if is_mean:
                result = total + earlier
        block_scores[to + block] = result
        j = stop


@nb.device_function
def _ordered(score):
    """Return an integer that rises with a score; NaN is above all numbers, and there is one 0."""
    bits = np.int64(np.float32(score).view(np.int32))
    if score != score:
        return _NAN
    if score == np.float32(0):
        return np.int64(0)
    if bits < 0:
        return bits ^ np.int64(0x7FFFFFFF)
    return bits


@nb.device_function
def _rank(block_scores, start, block, num_keys, own_block, is_open, block_keys, is_mean, local_blocks):
    """Return a block's rank, as `_ranks` of the Triton kernel, or _NO_RANK if a query does not see the block."""
    if block > own_block - local_blocks or (is_open and block == own_block):
        return (_FORCED << 32) + (_LAST_ID - block)
    count = min(max(num_keys - block * block_keys, 0), block_keys)
    if count == 0:
        return _NO_RANK
    score = block_scores[start + block]
    if is_mean:
        # In float64: fast math may multiply by the rounded inverse of the count, and break ties.
        bits = _ordered(np.float32(np.float64(score) / np.float64(count)))
    else:
        bits = _ordered(score)
    if bits == _MINUS_INFINITY:
        return _NO_RANK
    return (bits << 32) + (_LAST_ID - block)


@nb.device_function
def _keep_best(heap, count, capacity, rank):
    """Add a rank to a heap of the best ones so far, whose root is the worst; return their number."""
    if count < capacity:
        child = count
        while child > 0 and heap[(child - 1) // 2] > rank:
            heap[child] = heap[(child - 1) // 2]
            child = (child - 1) // 2
        heap[child] = rank
        return count + 1
    if rank > heap[0]:
        parent, child = 0, 1
        while child < count:
            if child + 1 < count and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= rank:
                break
            heap[parent] = heap[child]
            parent, child = child, 2 * child + 1
        heap[parent] = rank
    return count


@nb.device_function
def _block_of(index, token, candidates):
    """Return the block that is `index` of those that a token chooses from; without candidates, it is the index."""
    blocks, num_candidates, candidate_size, stride = candidates
    if num_candidates == 0:
        return index
    candidate = np.int64(blocks[token * stride + index // candidate_size])
    return candidate * candidate_size + index % candidate_size


@nb.device_function
def _choose(block_scores, chosen, cu_seqlens_q, seq_lens, heap, sizes, candidates):
    """Write the ids of the best blocks of this thread's share of tokens and lists, ascending."""
    (
        num_seqs,
        first_token,
        end_token,
        num_lists,
        block_keys,
        pool_size,
        is_mean,
        most_blocks,
        top_k,
        num_columns,
        local_blocks,
    ) = sizes
    first, end = nb.share((end_token - first_token) * num_lists)
    seq = 0
    for item in range(first, end):
        token = first_token + item // num_lists
        to = token * num_lists * num_columns + item % num_lists * num_columns
        while seq < num_seqs and token >= cu_seqlens_q[seq + 1]:
            seq += 1
        position_end = np.int64(0)  # a row of no sequence sees no block
        if seq < num_seqs:
            position_end = _end_of(token, seq, cu_seqlens_q, seq_lens)
        num_keys, own_block = position_end // pool_size, (position_end - 1) // (pool_size * block_keys)
        is_open = local_blocks == 0 and position_end % pool_size > 0
        capacity = min(top_k + is_open, num_columns)
        start, count = item * most_blocks, 0
        num_blocks = own_block + 1
        if candidates[1] > 0:
            num_blocks = candidates[1] * candidates[2]
        for index in range(num_blocks):
            block = _block_of(index, token, candidates)
            if block < 0 or block > own_block:
                continue
            rank = _rank(block_scores, start, block, num_keys, own_block, is_open, block_keys, is_mean, local_blocks)
            if rank != _NO_RANK:
                count = _keep_best(heap, count, capacity, rank)
        column = num_columns - count
        for index in range(column):
            chosen[to + index] = -1
        for index in range(num_blocks):
            block = _block_of(index, token, candidates)
            if block < 0 or block > own_block:
                continue
            rank = _rank(block_scores, start, block, num_keys, own_block, is_open, block_keys, is_mean, local_blocks)
            if rank != _NO_RANK and rank >= heap[0] and column < num_columns:
                chosen[to + column] = block
                column += 1


@nb.Kernel
def _block_scores(arguments):
    values = nb.unpack(arguments, 34)
    is_bf16, q, key_cache, weights, block_table, cu_seqlens_q, seq_lens, block_scores, scratch = values[1:10]
    at, at_keys, is_packed = nb.thread_index() * values[10], values[11], values[12]
    sizes, strides, num_candidates = values[13:24], values[24:30], values[31]
    candidates = nb.int32s(values[30]), *values[31:]
    ids = nb.int32s(block_table), nb.int32s(cu_seqlens_q), nb.int32s(seq_lens)
    codes = nb.uint8s(key_cache), nb.floats(key_cache + sizes[5])
    copied, results = scratch + at * 4, (nb.floats(weights), weights != 0, nb.floats(block_scores), is_packed, *codes)
    floats = nb.floats(scratch)
    if is_packed:
        key_cache = copied + at_keys * 4
    if is_bf16:
        memory = (_copied_bfloats(copied), floats, *results)
        if num_candidates > 0:
            _score_candidates(nb.bfloats(q), nb.bfloats(key_cache), ids, memory, sizes, strides, at, candidates)
        else:
            _score_blocks(nb.bfloats(q), nb.bfloats(key_cache), ids, memory, sizes, strides, at)
    else:
        wide = (nb.floats(copied), floats, *results)
        if num_candidates > 0:
            _score_candidates(nb.floats(q), nb.floats(key_cache), ids, wide, sizes, strides, at, candidates)
        else:
            _score_blocks(nb.floats(q), nb.floats(key_cache), ids, wide, sizes, strides, at)


@nb.Kernel
def _best_blocks(arguments):
    values = nb.unpack(arguments, 22)
    block_scores, chosen, cu_seqlens_q, seq_lens, scratch, scratch_size = values[1:7]
    heap = nb.int64s(scratch + nb.thread_index() * scratch_size * 4)
    lengths = nb.int32s(cu_seqlens_q), nb.int32s(seq_lens)
    candidates = nb.int32s(values[18]), *values[19:]
    _choose(nb.floats(block_scores), nb.int32s(chosen), *lengths, heap, values[7:18], candidates)


def _launch_for(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    weights: torch.Tensor | None,
    block_table: torch.Tensor,
    rules: BlockRules,
    span: tuple[int, int],
    most_blocks: int,
    candidates: torch.Tensor | None,
    candidate_size: int,
) -> NumbaLaunch:
    (_, num_heads, size), block_size = q.shape, key_cache.shape[1]
    num_lists, weights_token = num_heads, 0
    if weights is not None:
        num_lists, weights_token = 1, weights.stride(0)
    first_token, end_token = span
    num_candidates, num_scores, candidates_token = 0, most_blocks * rules.block_keys, 0
    if candidates is not None:
        num_candidates, candidates_token = candidates.shape[1], candidates.stride(0)
        num_scores = num_candidates * candidate_size
    choice = "candidates", num_candidates, candidate_size, candidates_token
    # Queries, the scores of a tile, then its scales and widened keys; in whole cache lines of 64 bytes, so that threads
    # share none.
    is_packed = key_cache.dtype == torch.uint8
    at_keys = max(_ROWS, num_heads) * size + (num_heads + 1) * _KEYS
    scratch_size = -(-(at_keys + is_packed * _KEYS * size) // 16) * 16
    score = NumbaLaunch(
        _block_scores.address,
        (end_token - first_token) * num_scores * num_heads * size,
        (
            q.dtype == torch.bfloat16,
            *("q", "key_cache", "weights", "block_table", "cu_seqlens_q", "seq_lens", "block_scores", SCRATCH),
            scratch_size,
            at_keys,
            is_packed,
            len(block_table),
            first_token,
            end_token,
            num_heads,
            num_lists,
            size,
            block_size,
            rules.block_keys,
            rules.pool_size,
            rules.is_mean,
            most_blocks,
            *q.stride()[:2],
            weights_token,
            *key_cache.stride()[:2],
            block_table.stride(0),
            *choice,
        ),
        scratch_size=scratch_size,
    )
    heap_size = -(-2 * rules.num_columns // 16) * 16  # in float32; a rank has 8 bytes
    return NumbaLaunch(
        _best_blocks.address,
        (end_token - first_token) * num_lists * num_scores // rules.block_keys,
        (
            *("block_scores", "chosen", "cu_seqlens_q", "seq_lens", SCRATCH),
            heap_size,
            len(block_table),
            first_token,
            end_token,
            num_lists,
            rules.block_keys,
            rules.pool_size,
            rules.is_mean,
            most_blocks,
            rules.top_k,
            rules.num_columns,
            rules.local_blocks,
            *choice,
        ),
        scratch_size=heap_size,
        before=score,
    )


def bind(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    weights: torch.Tensor | None,
    block_table: torch.Tensor,
    rules: BlockRules,
    spans: list[tuple[int, int]],
    most_blocks: int,
    candidates: torch.Tensor | None = None,
    candidate_size: int = 1,
) -> Run[torch.Tensor]:
    """Return a function that chooses blocks for calls like this one, whose lengths and block ids are checked.

    Keys are read once for up to `_ROWS` heads of queries, and the keys of candidates once for each query. spans: tokens
    whose scores are in memory at once. candidates: as in `choose_keys`, for blocks of one key.
    """
    num_tokens, num_lists, _ = q.shape
    if weights is not None:
        num_lists = 1
    launches = [
        _launch_for(q, key_cache, weights, block_table, rules, span, most_blocks, candidates, candidate_size)
        for span in spans
    ]
    most_tokens = max(end - first for first, end in spans)

    def run(
        q: torch.Tensor,
        key_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        weights: torch.Tensor | None = None,
        candidates: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        chosen = torch.empty(num_tokens, num_lists, rules.num_columns, dtype=torch.int32)
        tensors = {
            "q": q,
            "key_cache": key_cache,
            "weights": weights,
            "block_table": block_table,
            "cu_seqlens_q": cu_seqlens_q.contiguous(),
            "seq_lens": seq_lens.contiguous(),
            "candidates": candidates,
            "block_scores": torch.empty(most_tokens, num_lists, most_blocks),
            "chosen": chosen,
        }
        for launch in launches:
            launch(tensors)
        return chosen

    return run


def bind_keys(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor,
    pool_size: int,
    num_columns: int,
    spans: list[tuple[int, int]],
    candidates: torch.Tensor | None,
    candidate_size: int,
) -> Run[torch.Tensor]:
    """Return a function that chooses the `num_columns` best keys for calls like this one, as `bind` does for blocks."""
    # With -1 local blocks, no key is forced, not even that of an open pool.
    rules = BlockRules(num_columns, num_columns, 1, pool_size, False, -1)
    num_keys = block_table.shape[1] * key_cache.shape[1]
    choose = bind(q, key_cache, weights, block_table, rules, spans, num_keys, candidates, candidate_size)

    def run(q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, **lengths: Any) -> torch.Tensor:
        return choose(q, key_cache, weights=weights, **lengths)[:, 0]

    return run
