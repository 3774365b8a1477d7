"""The Triton side of paged attention: a kernel over a plan's work list, and the merge of the tiles that were split."""

from __future__ import annotations

from paged.kernels.attention.mask import WORD_KEYS
from paged.kernels.attention.plan_kernel import ITEM_SIZE, SPLIT_TILE_SIZE
from paged.kernels.common.compat import tl, triton
from paged.kernels.common.dot import dot
from paged.kernels.common.fp8 import decode_e4m3

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _finite(maximum):
    """A maximum to subtract: 0 in place of -inf, the maximum of nothing, for -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _load_rows(
    cache,  # the KV head's first element in block 0
    offsets,  # [BLOCK_N], of each row
    key_mask,  # [BLOCK_N]
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[BLOCK_N, HEAD_DIM_PADDED] of K or V; what is masked is 0."""
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    ptrs = cache + offsets[:, None] + offs_d[None, :]
    if MASKED and HEAD_DIM != HEAD_DIM_PADDED:
        rows = tl.load(ptrs, mask=key_mask[:, None] & (offs_d[None, :] < HEAD_DIM), other=0)
    elif MASKED:
        rows = tl.load(ptrs, mask=key_mask[:, None], other=0)
    elif HEAD_DIM != HEAD_DIM_PADDED:
        rows = tl.load(ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def _attend(
    acc,  # [BLOCK_M, HEAD_DIM_PADDED] float32, unnormalised output
    row_max,  # [BLOCK_M] float32, base 2
    row_sum,  # [BLOCK_M] float32
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    k_cache,  # pointer to the KV head's first element in block 0, or where USE_TMA a descriptor of the whole cache
    v_cache,
    block_table_ptr,  # this sequence's row
    mask_ptrs,  # [BLOCK_M], each row's words of the mask over the new keys, or None
    slopes,  # [BLOCK_M], or None
    begin,  # blocks of BLOCK_N keys
    end,
    position,  # [BLOCK_M] of each row
    first_key,  # [BLOCK_M], first and last key that each row sees
    last_key,
    context_len,  # keys before the first new one
    seq_len,
    kv_head,
    scale,
    softcap,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of these blocks
):
    """Online softmax (Milakov and Gimelshein, 2018) over the keys of blocks [begin, end)."""
    for index in range(begin, end):
        offs_n = index * BLOCK_N + tl.arange(0, BLOCK_N)
        key_mask = offs_n < seq_len
        if USE_TMA:  # all BLOCK_N keys stand in one cache block
            block = tl.load(block_table_ptr + index * BLOCK_N // KV_BLOCK_SIZE)
            box = [block, index * BLOCK_N % KV_BLOCK_SIZE, kv_head, 0]
            k = k_cache.load(box).reshape(BLOCK_N, HEAD_DIM_PADDED)
            v = v_cache.load(box).reshape(BLOCK_N, HEAD_DIM_PADDED)
            if MASKED:
                # What stands behind the end, NaN included, is never multiplied by a weight of 0; scores are replaced.
                v = tl.where(key_mask[:, None], v, 0)
        else:
            if MASKED:
                block = tl.load(block_table_ptr + offs_n // KV_BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
            else:
                block = tl.load(block_table_ptr + offs_n // KV_BLOCK_SIZE).to(tl.int64)
            slot = offs_n % KV_BLOCK_SIZE
            k_offsets = block * stride_k_block + slot * stride_k_slot
            v_offsets = k_offsets
            if not SAME_STRIDES:
                v_offsets = block * stride_v_block + slot * stride_v_slot
            k = _load_rows(k_cache, k_offsets, key_mask, HEAD_DIM, HEAD_DIM_PADDED, MASKED)
            v = _load_rows(v_cache, v_offsets, key_mask, HEAD_DIM, HEAD_DIM_PADDED, MASKED)
        if FP8:
            k = decode_e4m3(k, NATIVE_FP8).to(q.dtype)
            v = decode_e4m3(v, NATIVE_FP8).to(q.dtype)

        scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is 1 and -1 where exp overflows or vanishes
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * _LOG2E / softcap)) + 1.0)) * _LOG2E
        elif MASKED or slopes is not None:
            scores = scores * (scale * _LOG2E)
        if slopes is not None:
            distance = tl.abs(position[:, None] - offs_n[None, :]).to(tl.float32)
            scores -= distance * (slopes * _LOG2E)[:, None]
        if MASKED:
            visible = offs_n[None, :] <= last_key[:, None]
            if HAS_WINDOW:
                visible = visible & (offs_n[None, :] >= first_key[:, None])
            if mask_ptrs is not None:
                # A word a row: a tile of bytes would drag the scores into the layout of its loads, 430 spills.
                word = index * BLOCK_N // WORD_KEYS - context_len // WORD_KEYS
                bits = tl.load(mask_ptrs + word, mask=word >= 0, other=-1)[:, None]
                if BLOCK_N > WORD_KEYS:
                    more = tl.load(mask_ptrs + word + 1, mask=word >= -1, other=-1)[:, None]
                    bits = tl.where((offs_n % BLOCK_N < WORD_KEYS)[None, :], bits, more)
                visible = visible & ((bits >> (offs_n % WORD_KEYS).to(tl.int64)[None, :]) & 1 != 0)
            scores = tl.where(visible, scores, float("-inf"))

        if MASKED:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            subtrahend = _finite(new_max)
            weights = tl.exp2(scores - subtrahend[:, None])
        elif HAS_SOFTCAP or slopes is not None:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            subtrahend = new_max
            weights = tl.exp2(scores - subtrahend[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * (scale * _LOG2E))
            subtrahend = new_max
            weights = tl.exp2(scores * (scale * _LOG2E) - subtrahend[:, None])
        correction = tl.exp2(row_max - subtrahend)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * correction[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask):
    """Output rows and their log-sum-exp in base 2. A sink is the score of one more key, whose value is 0."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=float("-inf")).to(tl.float32) * _LOG2E
        new_max = tl.maximum(row_max, sink)
        correction = tl.exp2(row_max - _finite(new_max))
        row_sum = row_sum * correction + tl.exp2(sink - _finite(new_max))
        acc = acc * correction[:, None]
        row_max = new_max
    has_keys = row_sum > 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    return acc / row_sum[:, None], tl.where(has_keys, row_max + tl.log2(row_sum), float("-inf"))


@triton.jit(do_not_specialize=["num_tokens", "window_left", "window_right", "stride_lse_head"])
def _attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    k_cache,  # [num_blocks, KV_BLOCK_SIZE, num_kv_heads, HEAD_DIM], a pointer, or a tensor descriptor where USE_TMA
    v_cache,
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    lse_ptr,  # [num_q_heads, num_tokens], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    items_ptr,  # [max_items, ITEM_SIZE]
    counts_ptr,  # [2]
    first_padding_ptr,  # [1]
    partial_out_ptr,  # [max_slots, num_kv_heads, BLOCK_M, HEAD_DIM]
    partial_lse_ptr,  # [max_slots, num_kv_heads, BLOCK_M]
    is_causal_ptr,  # [num_seqs], or None
    sinks_ptr,  # [num_q_heads], or None
    alibi_slopes_ptr,  # [num_q_heads], or None
    k_scale_ptr,  # [1] or [num_kv_heads], or None
    v_scale_ptr,
    mask_ptr,  # [num_tokens, words], see pack_mask, or None
    num_tokens,
    scale,
    softcap,
    window_left,
    window_right,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_lse_head,
    stride_table_seq,
    stride_k_scale_head,
    stride_v_scale_head,
    stride_mask_token,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # whether window_left is a limit
    HAS_SOFTCAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    SAME_STRIDES: tl.constexpr,  # V's strides are K's
    FP8: tl.constexpr,  # the caches hold e4m3
    NATIVE_FP8: tl.constexpr,
    CLEAR_PADDING: tl.constexpr,  # also write the rows from first_padding on
):
    """One item of the work list and one KV head a program; row r of a tile is token r // GROUP, head r % GROUP."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    dim_mask = offs_d < HEAD_DIM
    if CLEAR_PADDING:
        first_padding = tl.load(first_padding_ptr).to(tl.int64)
        for row in range(first_padding + item, num_tokens, tl.num_programs(1)):
            first_head = kv_head.to(tl.int64) * GROUP
            for head in range(first_head, first_head + GROUP):
                out_row_ptr = out_ptr + row * stride_out_token + head * stride_out_head
                tl.store(out_row_ptr + offs_d, tl.zeros([HEAD_DIM_PADDED], out_ptr.dtype.element_ty), mask=dim_mask)
                if lse_ptr is not None:
                    tl.store(lse_ptr + head * stride_lse_head + row, float("-inf"))
    if item >= tl.load(counts_ptr):
        return

    seq = tl.load(items_ptr + item * ITEM_SIZE).to(tl.int64)
    tile = tl.load(items_ptr + item * ITEM_SIZE + 1)
    begin = tl.load(items_ptr + item * ITEM_SIZE + 2)
    end = tl.load(items_ptr + item * ITEM_SIZE + 3)
    slot = tl.load(items_ptr + item * ITEM_SIZE + 4).to(tl.int64)
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - q_len
    if is_causal_ptr is not None:
        window_right = tl.where(tl.load(is_causal_ptr + seq) != 0, 0, window_right)

    row = tile * BLOCK_M + offs_m
    row_mask = row < q_len * GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    position = context_len + row // GROUP
    first_key = position - window_left
    last_key = tl.minimum(position + window_right, seq_len - 1)
    store_mask = row_mask[:, None] & dim_mask[None, :]
    q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=store_mask, other=0.0)
    table_ptr = block_table_ptr + seq * stride_table_seq
    if not USE_TMA:
        k_cache += kv_head.to(tl.int64) * stride_k_head
        v_cache += kv_head.to(tl.int64) * stride_v_head
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + head, mask=row_mask, other=0.0).to(tl.float32)
    mask_ptrs = None
    if mask_ptr is not None:
        mask_ptrs = mask_ptr + tl.where(row_mask, token, first_token) * stride_mask_token
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head * stride_k_scale_head)
    if FP8 and q.dtype == tl.bfloat16:
        # float16 holds every e4m3 value; converting two to it takes one instruction, to bfloat16 four more. Queries
        # that fill its range keep all their bits unless they are 2^29 times smaller than the tile's largest.
        largest = tl.maximum(tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0), 1e-30)
        q = (q.to(tl.float32) * (32768.0 / largest)).to(tl.float16)
        scale *= largest / 32768.0

    # Blocks that every row of the tile sees whole need no mask: neither the diagonal, nor the end of the sequence, nor
    # an edge of the window, nor the mask over the new keys runs through them.
    first_position = context_len + tile * BLOCK_M // GROUP
    last_position = context_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    full_keys = tl.minimum(seq_len, first_position + window_right + 1)
    if mask_ptr is not None:
        full_keys = tl.minimum(full_keys, context_len)
    full_end = tl.minimum(tl.maximum(full_keys, 0) // BLOCK_N, end)
    full_begin = begin
    if HAS_WINDOW:
        full_begin = tl.maximum(begin, (tl.maximum(last_position - window_left, 0) + BLOCK_N - 1) // BLOCK_N)
        full_begin = tl.minimum(full_begin, end)
    full_end = tl.maximum(full_end, full_begin)

    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_cache, v_cache, table_ptr, mask_ptrs, slopes, begin, full_begin, position,
            first_key, last_key, context_len, seq_len, kv_head, scale, softcap, stride_k_block, stride_k_slot,
            stride_v_block, stride_v_slot, HEAD_DIM, HEAD_DIM_PADDED, KV_BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
            USE_TMA, SAME_STRIDES, FP8, NATIVE_FP8, True,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_cache, v_cache, table_ptr, mask_ptrs, slopes, full_begin, full_end, position,
        first_key, last_key, context_len, seq_len, kv_head, scale, softcap, stride_k_block, stride_k_slot,
        stride_v_block, stride_v_slot, HEAD_DIM, HEAD_DIM_PADDED, KV_BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
        USE_TMA, SAME_STRIDES, FP8, NATIVE_FP8, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_cache, v_cache, table_ptr, mask_ptrs, slopes, full_end, end, position,
        first_key, last_key, context_len, seq_len, kv_head, scale, softcap, stride_k_block, stride_k_slot,
        stride_v_block, stride_v_slot, HEAD_DIM, HEAD_DIM_PADDED, KV_BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
        USE_TMA, SAME_STRIDES, FP8, NATIVE_FP8, True,
    )  # fmt: skip

    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head * stride_v_scale_head)
    if slot >= 0:
        out, lse = _normalise(acc, row_max, row_sum, None, head, row_mask)
        partial = (slot * tl.num_programs(0) + kv_head) * BLOCK_M + offs_m
        tl.store(partial_out_ptr + partial[:, None] * HEAD_DIM + offs_d[None, :], out, mask=store_mask)
        tl.store(partial_lse_ptr + partial, lse, mask=row_mask)
    else:
        out, lse = _normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask)
        out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + offs_d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=store_mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + head * stride_lse_head + token, lse * _LN2, mask=row_mask)


@triton.jit(do_not_specialize=["stride_lse_head"])
def _merge_splits_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    lse_ptr,  # [num_q_heads, num_tokens], or None
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    split_tiles_ptr,  # [max_split_tiles, SPLIT_TILE_SIZE]
    counts_ptr,  # [2]
    partial_out_ptr,  # [max_slots, num_kv_heads, BLOCK_M, HEAD_DIM]
    partial_lse_ptr,  # [max_slots, num_kv_heads, BLOCK_M]
    sinks_ptr,  # [num_q_heads], or None
    stride_out_token,
    stride_out_head,
    stride_lse_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE_M: tl.constexpr,
):
    """MERGE_M rows of one split tile and one KV head a program, pieces in their order: the same bits every time."""
    kv_head = tl.program_id(0)
    split_tile = tl.program_id(1)
    if split_tile >= tl.load(counts_ptr + 1):
        return
    seq = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE)
    tile = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE + 1)
    first_slot = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE + 2).to(tl.int64)
    num_slots = tl.load(split_tiles_ptr + split_tile * SPLIT_TILE_SIZE + 3)
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token

    offs_m = tl.program_id(2) * MERGE_M + tl.arange(0, MERGE_M)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    row = tile * BLOCK_M + offs_m
    row_mask = row < q_len * GROUP
    mask = row_mask[:, None] & (offs_d[None, :] < HEAD_DIM)
    acc = tl.zeros([MERGE_M, HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([MERGE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([MERGE_M], tl.float32)
    for piece in range(num_slots):
        partial = ((first_slot + piece) * tl.num_programs(0) + kv_head) * BLOCK_M + offs_m
        part_lse = tl.load(partial_lse_ptr + partial, mask=row_mask, other=float("-inf"))
        part_out = tl.load(partial_out_ptr + partial[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(row_max, part_lse)
        correction = tl.exp2(row_max - _finite(new_max))
        weight = tl.exp2(part_lse - _finite(new_max))
        row_sum = row_sum * correction + weight
        acc = acc * correction[:, None] + part_out * weight[:, None]
        row_max = new_max

    token = (first_token + row // GROUP).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    out, lse = _normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask)
    out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + head * stride_lse_head + token, lse * _LN2, mask=row_mask)
