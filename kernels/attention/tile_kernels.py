"""The Triton kernel of paged attention: it runs a plan's work items.

A program takes one item and one KV head. An item is a range of key blocks for BLOCK_M query rows of one sequence;
`plan_kernel.py` writes the items. The query heads that share the KV head are packed into the rows, so that K and V are
read once for all of them.

The item's key blocks fall into three runs: blocks that the left edge of a window crosses, blocks that every row sees
whole, and blocks that the diagonal, the end of the sequence or a mask crosses. The loop over keys, `attend` in
`online_softmax.py`, is compiled once for each run, without any mask for the middle one.

A tile of one item is divided by its sum of weights and stored. The splits of a tile store partial results and their
log-sum-exps, which `merge_splits.py` merges. `launches.py` launches both kernels.
"""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import wait_for_inputs
from .keys import Window, visible_range
from .merge_splits import Output, _clear_padding, _locate_rows, _store_rows, normalise
from .online_softmax import (
    CachedRows,
    Keys,
    ScoreRules,
    attend,
    element_mask,
    group_mask,
    scale_of_head,
    scales_of_rows,
)
from .plan_kernel import ITEM_SIZE


@triton.jit
def _fill_float16(q, scale):
    """Return bfloat16 queries as float16, times a power of two, and the scale divided by this power.

    float16 holds every 8-bit float, and a conversion takes fewer instructions than to bfloat16. The tile's largest
    magnitude becomes 2^15 to 2^16, so a query loses bits only if it is 2^32 times smaller. A power of two for each row
    would take too many registers on an A100, see limits.md.
    """
    wide = q.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    # Infinity stays infinite under any factor. Count it as 2^10: a factor for infinity would turn other rows into 0.
    largest = tl.where(largest < float("inf"), largest, 1024.0)
    exponent = tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23  # plus float32's bias of 127
    exponent = tl.maximum(exponent, 16)  # factor and inverse must be normal numbers
    factor = ((2 * 127 + 15 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 15) << 23).to(tl.float32, bitcast=True)
    return (wide * factor).to(tl.float16), scale * inverse


@triton.jit
def _unmasked_blocks(
    begin, end, tile, q_len, seq_len, window, HAS_WINDOW: tl.constexpr, HAS_MASK: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First and one past the last of the item's blocks that every row of the tile sees whole.

    The diagonal, the end of the sequence, the edges of the window and the mask over new keys do not cross these blocks.
    """
    context_len = seq_len - q_len
    first_position = context_len + tile * BLOCK_M // GROUP
    last_position = context_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    _, full_keys = visible_range(first_position, seq_len, window)
    if HAS_MASK:
        full_keys = tl.minimum(full_keys, context_len)
    full_end = tl.minimum(tl.maximum(full_keys, 0) // BLOCK_N, end)
    full_begin = begin
    if HAS_WINDOW:
        full_key, _ = visible_range(last_position, seq_len, window)
        full_begin = tl.maximum(begin, (tl.maximum(full_key, 0) + BLOCK_N - 1) // BLOCK_N)
        full_begin = tl.minimum(full_begin, end)
    return full_begin, tl.maximum(full_end, full_begin)


# Several block tables may share a tensor. So a table, and each of its rows, may begin at any address.
@triton.jit(
    do_not_specialize=["num_tokens", "window_left", "window_right", "stride_table_seq", "stride_lse_head"],
    do_not_specialize_on_alignment=["block_table_ptr"],
)
def _attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    k_cache,  # [num_blocks, KV_BLOCK_SIZE, num_kv_heads, HEAD_DIM], pointer, or descriptor if USE_TMA
    v_cache,  # [num_blocks, KV_BLOCK_SIZE, num_kv_heads, V_HEAD_DIM], as k_cache
    out_ptr,  # [num_tokens, num_q_heads, V_HEAD_DIM]
    lse_ptr,  # [num_q_heads, num_tokens], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    items_ptr,  # [max_items, ITEM_SIZE]
    counts_ptr,  # [2]
    first_padding_ptr,  # [1]
    partial_out_ptr,  # [max_slots, num_kv_heads, BLOCK_M, V_HEAD_DIM]
    partial_lse_ptr,  # [max_slots, num_kv_heads, BLOCK_M]
    is_causal_ptr,  # [num_seqs], or None
    sinks_ptr,  # [num_q_heads], or None
    alibi_slopes_ptr,  # [num_q_heads], or None
    k_scale_ptr,  # [1] or [num_kv_heads], or None; caches with scales: see `KvKind.scales_shape`
    v_scale_ptr,
    k_table_scale_ptr,  # [1], or None
    v_table_scale_ptr,
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
    stride_k_scale_block,  # 0 unless rows have scales
    stride_k_scale_slot,
    stride_k_scale_head,
    stride_v_scale_block,
    stride_v_scale_slot,
    stride_v_scale_head,
    stride_mask_token,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # whether window_left or CHUNK_SIZE limits the keys
    CHUNK_SIZE: tl.constexpr,  # keys of a chunk of local attention, 0 without
    HAS_SOFTCAP: tl.constexpr,
    USE_TMA: tl.constexpr,
    SAME_STRIDES: tl.constexpr,  # V's strides are K's
    SHARED_KV: tl.constexpr,  # a key's first V_HEAD_DIM elements are its value
    K_KIND: tl.constexpr,  # name of a `KvKind`
    V_KIND: tl.constexpr,
    FITS_FLOAT16: tl.constexpr,  # float16 holds all numbers of the caches
    NATIVE_FP8: tl.constexpr,
    CLEAR_PADDING: tl.constexpr,  # also write the rows from first_padding on
    EDGE_STAGES: tl.constexpr,  # pipeline stages of the loops with masks, which have one or two blocks
):
    """Run one item of the work list for one KV head. Row r of a tile is token r // GROUP, head r % GROUP."""
    wait_for_inputs()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    offs_v = tl.arange(0, V_HEAD_DIM_PADDED)
    v_dim_mask = offs_v < V_HEAD_DIM
    output = Output(
        out_ptr=out_ptr,
        lse_ptr=lse_ptr,
        stride_token=stride_out_token,
        stride_head=stride_out_head,
        stride_lse_head=stride_lse_head,
    )
    if CLEAR_PADDING:
        first_row = tl.load(first_padding_ptr).to(tl.int64) + item
        _clear_padding(output, first_row, num_tokens, kv_head, GROUP, V_HEAD_DIM, V_HEAD_DIM_PADDED)
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

    query, token, head, row_mask = _locate_rows(tile, offs_m, first_token, q_len, kv_head, GROUP, BLOCK_M)
    position = context_len + query
    window = Window(left=window_left, right=window_right, chunk_size=CHUNK_SIZE if CHUNK_SIZE > 0 else None)
    first_key, end_key = visible_range(position, seq_len, window)
    q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=row_mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
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
    k_scale = scale_of_head(k_scale_ptr, k_table_scale_ptr, kv_head, stride_k_scale_head, K_KIND)
    if k_scale is not None:
        scale *= k_scale
    if FITS_FLOAT16 and q.dtype == tl.bfloat16:
        q, scale = _fill_float16(q, scale)
    full_begin, full_end = _unmasked_blocks(
        begin, end, tile, q_len, seq_len, window, HAS_WINDOW, mask_ptr is not None, GROUP, BLOCK_M, BLOCK_N
    )

    if SAME_STRIDES:  # the compiler then sees one offset for both
        stride_v_block, stride_v_slot = stride_k_block, stride_k_slot
    k_rows = CachedRows(
        cache=k_cache,
        stride_block=stride_k_block,
        stride_slot=stride_k_slot,
        dim_mask=element_mask(HEAD_DIM, HEAD_DIM_PADDED, K_KIND),
        scales=scales_of_rows(k_scale_ptr, kv_head, stride_k_scale_head, K_KIND),
        group_mask=group_mask(HEAD_DIM, HEAD_DIM_PADDED, K_KIND),
        stride_scale_block=stride_k_scale_block,
        stride_scale_slot=stride_k_scale_slot,
    )
    v_rows = CachedRows(
        cache=None if SHARED_KV else v_cache,
        stride_block=stride_v_block,
        stride_slot=stride_v_slot,
        dim_mask=element_mask(V_HEAD_DIM, V_HEAD_DIM_PADDED, V_KIND),
        scales=scales_of_rows(v_scale_ptr, kv_head, stride_v_scale_head, V_KIND),
        group_mask=group_mask(V_HEAD_DIM, V_HEAD_DIM_PADDED, V_KIND),
        stride_scale_block=stride_v_scale_block,
        stride_scale_slot=stride_v_scale_slot,
    )
    keys = Keys(block_table_ptr=table_ptr, kv_head=kv_head, context_len=context_len, seq_len=seq_len)
    rules = ScoreRules(
        scale=scale,
        softcap=softcap if HAS_SOFTCAP else None,
        position=position,
        slopes=slopes,
        first_key=first_key if HAS_WINDOW else None,
        end_key=end_key,
        mask_ptrs=mask_ptrs,
    )
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, keys, k_rows, v_rows, rules, begin, full_begin,
            KV_BLOCK_SIZE, BLOCK_N, USE_TMA, K_KIND, V_KIND, NATIVE_FP8, True, EDGE_STAGES,
        )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, keys, k_rows, v_rows, rules, full_begin, full_end,
        KV_BLOCK_SIZE, BLOCK_N, USE_TMA, K_KIND, V_KIND, NATIVE_FP8, False, None,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, keys, k_rows, v_rows, rules, full_end, end,
        KV_BLOCK_SIZE, BLOCK_N, USE_TMA, K_KIND, V_KIND, NATIVE_FP8, True, EDGE_STAGES,
    )  # fmt: skip

    if V_HEAD_DIM_PADDED > 256:
        # Read the tile's number again, so that tokens and heads of rows do not stay in registers during the loops. The
        # 128 sums of a thread need the registers.
        tile = tl.load(items_ptr + item * ITEM_SIZE + 1, volatile=True)
        _, token, head, row_mask = _locate_rows(tile, offs_m, first_token, q_len, kv_head, GROUP, BLOCK_M)
    store_mask = row_mask[:, None] & v_dim_mask[None, :]
    v_scale = scale_of_head(v_scale_ptr, v_table_scale_ptr, kv_head, stride_v_scale_head, V_KIND)
    if v_scale is not None:
        acc *= v_scale
    if slot >= 0:
        out, lse = normalise(acc, row_max, row_sum, None, head, row_mask)
        partial = (slot * tl.num_programs(0) + kv_head) * BLOCK_M + offs_m
        tl.store(partial_out_ptr + partial[:, None] * V_HEAD_DIM + offs_v[None, :], out, mask=store_mask)
        tl.store(partial_lse_ptr + partial, lse, mask=row_mask)
    else:
        _store_rows(acc, row_max, row_sum, output, sinks_ptr, token, head, offs_v, row_mask, store_mask)
