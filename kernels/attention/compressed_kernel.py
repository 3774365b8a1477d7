"""The Triton kernel of attention over a window and compressed entries: it runs a plan's work items.

Each token is a sequence of its own, because with 64 heads one token fills a tile. Its work is the blocks of BLOCK_N
keys of its window, then those of its entries. An item is a range of both. All heads read the same rows, and a row is
both key and value, so the loop is that of latents without a rotated part.
"""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import wait_for_inputs
from .latent_kernel import Latents, _attend
from .merge_splits import LOG2E, Output, _clear_padding, _locate_rows, normalise
from .plan_kernel import ITEM_SIZE


@triton.jit
def _rotated_back(
    out,  # [BLOCK_M, HEAD_DIM_PADDED] float32
    cos_sin_ptr,  # [ROTARY_DIM], cosines and sines of the token's position
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """Return the last ROTARY_DIM numbers of each row, rotated by the negative angles; pairs are neighbours."""
    # Take these numbers apart by a sum: a split of all numbers into pairs would spill 310 registers.
    GROUPS: tl.constexpr = out.shape[1] // ROTARY_DIM
    is_last = tl.arange(0, GROUPS) == HEAD_DIM // ROTARY_DIM - 1
    groups = out.reshape(out.shape[0], GROUPS, ROTARY_DIM)
    last = tl.sum(tl.where(is_last[None, :, None], groups, 0.0), 1)  # [BLOCK_M, ROTARY_DIM]
    a, b = tl.split(last.reshape(out.shape[0], ROTARY_DIM // 2, 2))
    pairs = tl.arange(0, ROTARY_DIM // 2)
    cos = tl.load(cos_sin_ptr + pairs)[None, :]
    sin = tl.load(cos_sin_ptr + ROTARY_DIM // 2 + pairs)[None, :]
    return tl.join(a * cos + b * sin, b * cos - a * sin).reshape(out.shape[0], ROTARY_DIM)


@triton.jit
def _store(ptrs, numbers, row_mask, END: tl.constexpr):
    """Store rows from ptrs [BLOCK_M] on; numbers [BLOCK_M, size], of which the first END count."""
    offs = tl.arange(0, numbers.shape[1])
    mask = row_mask[:, None] & (offs < END)[None, :]
    tl.store(ptrs[:, None] + offs[None, :], numbers.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_indices", "sliding_window"),
        *("stride_table_seq", "stride_entry_table_seq", "stride_lse_head"),
    ],
    do_not_specialize_on_alignment=["block_table_ptr", "entry_table_ptr"],
)
def _compressed_attention_kernel(
    q_ptr,  # [num_tokens, GROUP, V_HEAD_DIM]
    latent_ptr,  # [num_blocks, KV_BLOCK_SIZE, V_HEAD_DIM]; codes of records
    rope_ptr,  # bfloat16 [num_blocks, KV_BLOCK_SIZE, 64] of records, or None
    scales_ptr,  # scales [num_blocks, KV_BLOCK_SIZE, groups] of records, or None
    entry_ptr,  # [num_entry_blocks, ENTRY_BLOCK_SIZE, V_HEAD_DIM], or None; then as above
    entry_rope_ptr,
    entry_scales_ptr,
    out_ptr,  # [num_tokens, GROUP, V_HEAD_DIM]
    lse_ptr,  # [GROUP, num_tokens], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    entry_table_ptr,  # [num_seqs, max_entry_blocks_per_seq], or None
    items_ptr,  # [max_items, ITEM_SIZE]
    counts_ptr,  # [2]
    first_padding_ptr,  # [1]
    partial_out_ptr,  # [max_slots, 1, BLOCK_M, V_HEAD_DIM]
    partial_lse_ptr,  # [max_slots, 1, BLOCK_M]
    sinks_ptr,  # [GROUP], or None
    indices_ptr,  # [num_tokens, num_indices], or None
    token_keys_ptr,  # [2, num_tokens]: the token's sequence, and one past its position
    cos_sin_ptr,  # float32 [max_position, ROTARY_DIM], or None
    num_tokens,
    num_indices,
    scale,
    sliding_window,
    stride_q_token,
    stride_q_head,
    stride_latent_block,
    stride_latent_slot,
    stride_rope_block,
    stride_rope_slot,
    stride_scales_block,
    stride_scales_slot,
    stride_entry_block,
    stride_entry_slot,
    stride_entry_rope_block,
    stride_entry_rope_slot,
    stride_entry_scales_block,
    stride_entry_scales_slot,
    stride_out_token,
    stride_out_head,
    stride_lse_head,
    stride_table_seq,
    stride_entry_table_seq,
    stride_indices_token,
    stride_cos_sin_position,
    GROUP: tl.constexpr,  # heads
    V_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    ENTRY_BLOCK_SIZE: tl.constexpr,
    POOL_SIZE: tl.constexpr,  # positions of an entry
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,  # "" for numbers of the dtype of q, or the kind of a `RecordForm`
    NATIVE_FP8: tl.constexpr,
    CLEAR_PADDING: tl.constexpr,  # also write the rows from first_padding on
):
    """Run one item of the work list a program. Row r of a tile is head r of its token."""
    wait_for_inputs()
    item = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_v = tl.arange(0, V_HEAD_DIM_PADDED)
    output = Output(
        out_ptr=out_ptr,
        lse_ptr=lse_ptr,
        stride_token=stride_out_token,
        stride_head=stride_out_head,
        stride_lse_head=stride_lse_head,
    )
    if CLEAR_PADDING:
        first_row = tl.load(first_padding_ptr).to(tl.int64) + item
        _clear_padding(output, first_row, num_tokens, item * 0, GROUP, V_HEAD_DIM, V_HEAD_DIM_PADDED)
    if item >= tl.load(counts_ptr):
        return

    token = tl.load(items_ptr + item * ITEM_SIZE).to(tl.int64)
    tile = tl.load(items_ptr + item * ITEM_SIZE + 1)
    begin = tl.load(items_ptr + item * ITEM_SIZE + 2)
    end = tl.load(items_ptr + item * ITEM_SIZE + 3)
    row, rows_token, head, row_mask = _locate_rows(tile, offs_m, token, 1, 0, GROUP, BLOCK_M)
    seq = tl.load(token_keys_ptr + token).to(tl.int64)
    num_keys = tl.maximum(tl.load(token_keys_ptr + num_tokens + token), 0)
    first_key = tl.maximum(num_keys - sliding_window, 0)
    first_block = first_key // BLOCK_N
    window_blocks = (num_keys + BLOCK_N - 1) // BLOCK_N - first_block

    q_ptrs = q_ptr + (rows_token * stride_q_token + head * stride_q_head)[:, None]
    q = tl.load(q_ptrs + offs_v[None, :], mask=row_mask[:, None] & (offs_v < V_HEAD_DIM)[None, :], other=0.0)
    latent_mask = None if V_HEAD_DIM == V_HEAD_DIM_PADDED else offs_v < V_HEAD_DIM
    no_rope = tl.zeros([BLOCK_M, 16], q.dtype)
    rope_mask = tl.arange(0, 16) < 0
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    window = Latents(
        latent_ptr=latent_ptr,
        rope_ptr=latent_ptr if rope_ptr is None else rope_ptr,
        scales_ptr=scales_ptr,
        stride_block=stride_latent_block,
        stride_slot=stride_latent_slot,
        stride_rope_block=stride_rope_block,
        stride_rope_slot=stride_rope_slot,
        stride_scales_block=stride_scales_block,
        stride_scales_slot=stride_scales_slot,
        latent_mask=latent_mask,
        rope_mask=rope_mask,
        table_ptr=block_table_ptr + seq * stride_table_seq,
        indices_ptr=None,
        num_indices=num_indices,
    )
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, no_rope, window, scale * LOG2E, row * 0 + first_key, row * 0 + num_keys,
        first_block + begin, first_block + tl.minimum(end, window_blocks), False, KV_BLOCK_SIZE, BLOCK_N, KIND,
        NATIVE_FP8, True,
    )  # fmt: skip
    if entry_ptr is not None:
        token_indices_ptr = None
        if indices_ptr is not None:
            token_indices_ptr = indices_ptr + token * stride_indices_token
        entries = Latents(
            latent_ptr=entry_ptr,
            rope_ptr=entry_ptr if entry_rope_ptr is None else entry_rope_ptr,
            scales_ptr=entry_scales_ptr,
            stride_block=stride_entry_block,
            stride_slot=stride_entry_slot,
            stride_rope_block=stride_entry_rope_block,
            stride_rope_slot=stride_entry_rope_slot,
            stride_scales_block=stride_entry_scales_block,
            stride_scales_slot=stride_entry_scales_slot,
            latent_mask=latent_mask,
            rope_mask=rope_mask,
            table_ptr=entry_table_ptr + seq * stride_entry_table_seq,
            indices_ptr=token_indices_ptr,
            num_indices=num_indices,
        )
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, no_rope, entries, scale * LOG2E, None, row * 0 + num_keys // POOL_SIZE,
            tl.maximum(begin - window_blocks, 0), end - window_blocks, False, ENTRY_BLOCK_SIZE, BLOCK_N, KIND,
            NATIVE_FP8, True,
        )  # fmt: skip

    # Read the item again, so that nothing of it stays in registers during the loops: the sums need all of them.
    token = tl.load(items_ptr + item * ITEM_SIZE, volatile=True).to(tl.int64)
    tile = tl.load(items_ptr + item * ITEM_SIZE + 1, volatile=True)
    slot = tl.load(items_ptr + item * ITEM_SIZE + 4, volatile=True).to(tl.int64)
    _, rows_token, head, row_mask = _locate_rows(tile, offs_m, token, 1, 0, GROUP, BLOCK_M)
    # Splits leave the sink to their merge. They may rotate before it, because both are linear.
    out, lse = normalise(acc, row_max, row_sum, sinks_ptr, head, row_mask & (slot < 0))
    UNROTATED: tl.constexpr = V_HEAD_DIM - ROTARY_DIM
    partial = slot * BLOCK_M + offs_m
    partial_ptrs = partial_out_ptr + partial * V_HEAD_DIM
    out_ptrs = out_ptr + rows_token * stride_out_token + head * stride_out_head
    if slot >= 0:
        tl.store(partial_lse_ptr + partial, lse, mask=row_mask)
        _store(partial_ptrs, out, row_mask, UNROTATED)
    else:
        if lse_ptr is not None:
            tl.store(lse_ptr + head * stride_lse_head + rows_token, lse / LOG2E, mask=row_mask)
        _store(out_ptrs, out, row_mask, UNROTATED)
    if cos_sin_ptr is not None:
        position = tl.maximum(tl.load(token_keys_ptr + num_tokens + token, volatile=True) - 1, 0).to(tl.int64)
        last = _rotated_back(out, cos_sin_ptr + position * stride_cos_sin_position, V_HEAD_DIM, ROTARY_DIM)
        if slot >= 0:
            _store(partial_ptrs + UNROTATED, last, row_mask, ROTARY_DIM)
        else:
            _store(out_ptrs + UNROTATED, last, row_mask, ROTARY_DIM)
