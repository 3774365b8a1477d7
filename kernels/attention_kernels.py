"""The Triton side of paged attention: a kernel over a plan's work list, and the merge of the tiles that were split."""

from __future__ import annotations

from paged.kernels.attention_call import AttentionCall
from paged.kernels.attention_config import padded_head_dim
from paged.kernels.attention_plan import ITEM_SIZE, SPLIT_TILE_SIZE, AttentionPlan, AttentionSchedule, AttentionShape
from paged.kernels.compat import tl, triton
from paged.kernels.dot import dot

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _finite(maximum):
    """A maximum to subtract: 0 in place of -inf, the maximum of nothing, for -inf - -inf would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _attend_block(
    acc,  # [BLOCK_M, HEAD_DIM_PADDED] float32, unnormalised output
    row_max,  # [BLOCK_M] float32, base 2
    row_sum,  # [BLOCK_M] float32
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    k_ptr,  # first element of the KV head in block 0
    v_ptr,
    block_table_ptr,  # this sequence's row
    first_key,
    position,  # [BLOCK_M] of each row
    seq_len,
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
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of this block
):
    """One online-softmax step (Milakov and Gimelshein, 2018) over BLOCK_N keys."""
    offs_n = first_key + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    key_mask = offs_n < seq_len
    if MASKED:
        block = tl.load(block_table_ptr + offs_n // KV_BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
    else:
        block = tl.load(block_table_ptr + offs_n // KV_BLOCK_SIZE).to(tl.int64)
    slot = offs_n % KV_BLOCK_SIZE
    k_ptrs = k_ptr + (block * stride_k_block + slot * stride_k_slot)[:, None] + offs_d[None, :]
    v_ptrs = v_ptr + (block * stride_v_block + slot * stride_v_slot)[:, None] + offs_d[None, :]
    # Masked lanes load 0, so that what stands behind the sequence's end, NaN included, is never multiplied.
    if MASKED and HEAD_DIM != HEAD_DIM_PADDED:
        k = tl.load(k_ptrs, mask=key_mask[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)
        v = tl.load(v_ptrs, mask=key_mask[:, None] & (offs_d[None, :] < HEAD_DIM), other=0.0)
    elif MASKED:
        k = tl.load(k_ptrs, mask=key_mask[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=key_mask[:, None], other=0.0)
    elif HEAD_DIM != HEAD_DIM_PADDED:
        k = tl.load(k_ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
        v = tl.load(v_ptrs, mask=offs_d[None, :] < HEAD_DIM, other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)

    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is 1 and -1 where exp overflows or vanishes
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * _LOG2E / softcap)) + 1.0)) * _LOG2E
    else:
        scores = scores * (scale * _LOG2E)
    if MASKED:
        visible = key_mask[None, :]
        if CAUSAL:
            visible = visible & (offs_n[None, :] <= position[:, None])
        if WINDOW_LEFT >= 0:
            visible = visible & (offs_n[None, :] >= position[:, None] - WINDOW_LEFT)
        if WINDOW_RIGHT >= 0:
            visible = visible & (offs_n[None, :] <= position[:, None] + WINDOW_RIGHT)
        scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1))
    subtrahend = _finite(new_max) if MASKED else new_max  # without a mask every row has seen a key
    weights = tl.exp2(scores - subtrahend[:, None])
    correction = tl.exp2(row_max - subtrahend)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    acc = dot(weights.to(v.dtype), v, acc * correction[:, None])
    return acc, new_max, row_sum


@triton.jit
def _attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    k_cache_ptr,  # [num_blocks, KV_BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    v_cache_ptr,
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    lse_ptr,  # [num_q_heads, num_tokens], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    items_ptr,  # [max_items, ITEM_SIZE]
    counts_ptr,  # [2]
    partial_out_ptr,  # [max_slots, num_kv_heads, BLOCK_M, HEAD_DIM]
    partial_lse_ptr,  # [max_slots, num_kv_heads, BLOCK_M]
    num_tokens,
    num_seqs,
    scale,
    softcap,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    CLEAR_PADDING: tl.constexpr,  # also write the rows beyond the last sequence
):
    """One item of the work list and one KV head a program; row r of a tile is token r // GROUP, head r % GROUP."""
    kv_head = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
    dim_mask = offs_d < HEAD_DIM
    if CLEAR_PADDING:
        first_padding = tl.load(cu_seqlens_q_ptr + num_seqs).to(tl.int64)
        for row in range(first_padding + item, num_tokens, tl.num_programs(1)):
            for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
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

    row = tile * BLOCK_M + offs_m
    row_mask = row < q_len * GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    position = seq_len - q_len + row // GROUP
    store_mask = row_mask[:, None] & dim_mask[None, :]
    q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=store_mask, other=0.0)
    k_ptr = k_cache_ptr + kv_head * stride_k_head
    v_ptr = v_cache_ptr + kv_head * stride_v_head
    table_ptr = block_table_ptr + seq * stride_table_seq

    # Blocks that every row of the tile sees whole need no mask: neither the diagonal, nor the end of the sequence, nor
    # an edge of the window runs through them.
    first_position = seq_len - q_len + tile * BLOCK_M // GROUP
    last_position = seq_len - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    full_keys = seq_len
    if CAUSAL:
        full_keys = tl.minimum(full_keys, first_position + 1)
    if WINDOW_RIGHT >= 0:
        full_keys = tl.minimum(full_keys, first_position + WINDOW_RIGHT + 1)
    full_end = tl.minimum(tl.maximum(full_keys, 0) // BLOCK_N, end)
    full_begin = begin
    if WINDOW_LEFT >= 0:
        full_begin = tl.maximum(begin, (tl.maximum(last_position - WINDOW_LEFT, 0) + BLOCK_N - 1) // BLOCK_N)
        full_begin = tl.minimum(full_begin, end)
    full_end = tl.maximum(full_end, full_begin)

    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if WINDOW_LEFT >= 0:
        for block in range(begin, full_begin):
            acc, row_max, row_sum = _attend_block(
                acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, block * BLOCK_N, position, seq_len, scale, softcap,
                stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, HEAD_DIM, HEAD_DIM_PADDED, KV_BLOCK_SIZE,
                BLOCK_N, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, HAS_SOFTCAP, True,
            )  # fmt: skip
    for block in range(full_begin, full_end):
        acc, row_max, row_sum = _attend_block(
            acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, block * BLOCK_N, position, seq_len, scale, softcap,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, HEAD_DIM, HEAD_DIM_PADDED, KV_BLOCK_SIZE,
            BLOCK_N, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, HAS_SOFTCAP, False,
        )  # fmt: skip
    for block in range(full_end, end):
        acc, row_max, row_sum = _attend_block(
            acc, row_max, row_sum, q, k_ptr, v_ptr, table_ptr, block * BLOCK_N, position, seq_len, scale, softcap,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, HEAD_DIM, HEAD_DIM_PADDED, KV_BLOCK_SIZE,
            BLOCK_N, CAUSAL, WINDOW_LEFT, WINDOW_RIGHT, HAS_SOFTCAP, True,
        )  # fmt: skip

    has_keys = row_sum > 0
    out = acc / tl.where(has_keys, row_sum, 1.0)[:, None]
    lse = tl.where(has_keys, row_max + tl.log2(tl.where(has_keys, row_sum, 1.0)), float("-inf"))
    if slot >= 0:
        partial = (slot * tl.num_programs(0) + kv_head) * BLOCK_M + offs_m
        tl.store(partial_out_ptr + partial[:, None] * HEAD_DIM + offs_d[None, :], out, mask=store_mask)
        tl.store(partial_lse_ptr + partial, lse, mask=row_mask)
    else:
        out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + offs_d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=store_mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + head * stride_lse_head + token, lse * _LN2, mask=row_mask)


@triton.jit
def _merge_splits_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    lse_ptr,  # [num_q_heads, num_tokens], or None
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    split_tiles_ptr,  # [max_split_tiles, SPLIT_TILE_SIZE]
    counts_ptr,  # [2]
    partial_out_ptr,  # [max_slots, num_kv_heads, BLOCK_M, HEAD_DIM]
    partial_lse_ptr,  # [max_slots, num_kv_heads, BLOCK_M]
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
    kv_head = tl.program_id(0).to(tl.int64)
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

    has_keys = row_sum > 0
    token = (first_token + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    out_ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + offs_d[None, :]
    out = acc / tl.where(has_keys, row_sum, 1.0)[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        lse = tl.where(has_keys, row_max + tl.log2(tl.where(has_keys, row_sum, 1.0)), float("-inf")) * _LN2
        tl.store(lse_ptr + head * stride_lse_head + token, lse, mask=row_mask)


def run_attention(call: AttentionCall, plan: AttentionPlan) -> None:
    """Launch the plan's schedules: fills `call.out` and, where given, `call.lse`."""
    num_tokens, num_q_heads, head_dim = call.q.shape
    num_kv_heads = call.k_cache.shape[2]
    shape = AttentionShape(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        element_size=call.q.element_size(),
        causal=call.causal,
        window_size=call.window_size,
    )
    schedules = plan.schedules(shape)
    if not any(schedule.items.shape[0] for schedule in schedules):  # no sequence, or none with a query: all is padding
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    for index, schedule in enumerate(schedules):
        _launch_tiles(call, shape, plan, schedule, clear_padding=index == 0)
        if schedule.split_tiles.shape[0]:
            _launch_merge(call, shape, plan, schedule)


def _launch_tiles(
    call: AttentionCall, shape: AttentionShape, plan: AttentionPlan, schedule: AttentionSchedule, *, clear_padding: bool
) -> None:
    tile, q, k_cache, v_cache, out = schedule.tile, call.q, call.k_cache, call.v_cache, call.out
    _attention_kernel[(shape.num_kv_heads, schedule.items.shape[0])](
        q_ptr=q,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        out_ptr=out,
        lse_ptr=call.lse,
        block_table_ptr=call.block_table,
        cu_seqlens_q_ptr=plan.cu_seqlens_q,
        seq_lens_ptr=plan.seq_lens,
        items_ptr=schedule.items,
        counts_ptr=schedule.counts,
        partial_out_ptr=schedule.partial_out,
        partial_lse_ptr=schedule.partial_lse,
        num_tokens=shape.num_tokens,
        num_seqs=plan.seq_lens.shape[0],
        scale=call.softmax_scale,
        softcap=call.softcap,
        stride_q_token=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0),
        stride_v_slot=v_cache.stride(1),
        stride_v_head=v_cache.stride(2),
        stride_out_token=out.stride(0),
        stride_out_head=out.stride(1),
        stride_lse_head=shape.num_tokens,
        stride_table_seq=call.block_table.stride(0),
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=padded_head_dim(shape.head_dim),
        KV_BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        CAUSAL=shape.causal,
        WINDOW_LEFT=shape.window_size[0],
        WINDOW_RIGHT=shape.window_size[1],
        HAS_SOFTCAP=call.softcap > 0,
        CLEAR_PADDING=clear_padding,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_merge(call: AttentionCall, shape: AttentionShape, plan: AttentionPlan, schedule: AttentionSchedule) -> None:
    block_m = schedule.tile.block_m
    merge_m = min(block_m, 16)  # one merge program's accumulator stays in registers at any head_dim
    _merge_splits_kernel[(shape.num_kv_heads, schedule.split_tiles.shape[0], block_m // merge_m)](
        out_ptr=call.out,
        lse_ptr=call.lse,
        cu_seqlens_q_ptr=plan.cu_seqlens_q,
        split_tiles_ptr=schedule.split_tiles,
        counts_ptr=schedule.counts,
        partial_out_ptr=schedule.partial_out,
        partial_lse_ptr=schedule.partial_lse,
        stride_out_token=call.out.stride(0),
        stride_out_head=call.out.stride(1),
        stride_lse_head=shape.num_tokens,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        HEAD_DIM_PADDED=padded_head_dim(shape.head_dim),
        BLOCK_M=block_m,
        MERGE_M=merge_m,
        num_warps=4,
    )
