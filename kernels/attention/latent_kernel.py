"""The Triton kernel of latent attention: it runs a plan's work items.

A program takes one item: a range of key blocks for BLOCK_M rows (queries times heads) of one sequence. All heads read
the same latents, so a block of latents is loaded once for all rows of the tile. The latent is both key and value; the
rotated part belongs to the key alone. With chosen keys (`indices`) each token is its own sequence, and its keys are the
chosen positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.compat import dot, tl, triton
from ..core.dtypes import decode_e4m3, decode_nvfp4
from ..core.launch import wait_for_inputs
from .keys import Slots, Window, key_slots, load_block_ids, row_offsets, visible_range
from .merge_splits import LOG2E, Output, _clear_padding, _locate_rows, _store_rows, finite, normalise
from .plan_kernel import ITEM_SIZE

_GROUP = tl.constexpr(128)  # latents that share a scale in the published fp8 form
_RECORD_GROUP = tl.constexpr(64)  # codes that share a power of two in a record, and bfloat16 numbers behind them
_MXFP8_GROUP = tl.constexpr(32)  # codes that share a power of two in a record of codes alone
_NVFP4_GROUP = tl.constexpr(16)  # codes that share an e4m3 scale, two codes a byte


class Latents(NamedTuple):
    """Where to find a sequence's latents. A kernel creates it."""

    latent_ptr: Any
    rope_ptr: Any
    scales_ptr: Any  # scales of records, else None
    stride_block: Any  # strides of the latents; rotated parts and scales have their own
    stride_slot: Any
    stride_rope_block: Any
    stride_rope_slot: Any
    stride_scales_block: Any
    stride_scales_slot: Any
    latent_mask: Any  # [V_HEAD_DIM_PADDED], which elements exist; None if all do
    rope_mask: Any
    table_ptr: Any  # the sequence's row of the block table
    indices_ptr: Any  # the token's row of the indices, or None
    num_indices: Any


@triton.jit
def _load_rows(ptrs, key_mask, dim_mask, MASKED: tl.constexpr):
    """Load rows [BLOCK_N, size]; masked elements are 0."""
    if MASKED and dim_mask is not None:
        rows = tl.load(ptrs, mask=key_mask[:, None] & dim_mask[None, :], other=0)
    elif MASKED:
        rows = tl.load(ptrs, mask=key_mask[:, None], other=0)
    elif dim_mask is not None:
        rows = tl.load(ptrs, mask=dim_mask[None, :], other=0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def _load_records(
    latents,
    block,  # [BLOCK_N], blocks of the cache; a scalar if one holds all keys
    slots,  # Slots
    key_mask,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Load records of DeepSeek-V4 as numbers [BLOCK_N, DIM]: codes with a power of two for each 64, then bfloat16."""
    offs = tl.arange(0, DIM)
    offs_g = tl.arange(0, DIM // _RECORD_GROUP)
    is_code = offs < DIM - _RECORD_GROUP
    # Strides are multiples of 8 bytes. Round them, so that the compiler knows it: else it would load single bytes, 64
    # times for a block of 16 keys and 8 warps.
    rows = row_offsets(block, slots, latents.stride_block // 8 * 8, latents.stride_slot // 8 * 8)
    codes = _load_rows(latents.latent_ptr + rows[:, None] + offs[None, :], key_mask, is_code, True)
    rope_rows = row_offsets(block, slots, latents.stride_rope_block // 4 * 4, latents.stride_rope_slot // 4 * 4)
    rope_ptrs = latents.rope_ptr + rope_rows[:, None] + (offs - (DIM - _RECORD_GROUP))[None, :]
    rope = tl.load(rope_ptrs, mask=key_mask[:, None] & (offs >= DIM - _RECORD_GROUP)[None, :], other=0.0)
    scale_rows = row_offsets(block, slots, latents.stride_scales_block // 8 * 8, latents.stride_scales_slot // 8 * 8)
    scale_ptrs = latents.scales_ptr + scale_rows[:, None] + offs_g[None, :]
    exponents = _load_rows(scale_ptrs, key_mask, None, True).to(tl.int32)  # with the byte behind the last one
    scales = tl.where(exponents == 255, float("nan"), (exponents << 23).to(tl.float32, bitcast=True))
    numbers = decode_e4m3(codes, NATIVE_FP8).to(tl.float32)
    numbers = numbers.reshape(BLOCK_N, DIM // _RECORD_GROUP, _RECORD_GROUP) * scales[:, :, None]
    return tl.where(is_code[None, :], numbers.reshape(BLOCK_N, DIM), rope.to(tl.float32)).to(dtype)


@triton.jit
def _load_mxfp8(
    latents,
    block,  # [BLOCK_N], blocks of the cache; a scalar if one holds all keys
    slots,  # Slots
    key_mask,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Load records of DeepSeek-V4.1 as numbers [BLOCK_N, DIM]: codes with a power of two for each 32."""
    offs = tl.arange(0, DIM)
    offs_g = tl.arange(0, DIM // _MXFP8_GROUP)
    rows = row_offsets(block, slots, latents.stride_block, latents.stride_slot)
    codes = _load_rows(latents.latent_ptr + rows[:, None] + offs[None, :], key_mask, None, True)
    scale_rows = row_offsets(block, slots, latents.stride_scales_block, latents.stride_scales_slot)
    exponents = _load_rows(latents.scales_ptr + scale_rows[:, None] + offs_g[None, :], key_mask, None, True)
    exponents = exponents.to(tl.int32)
    scales = tl.where(exponents == 255, float("nan"), (exponents << 23).to(tl.float32, bitcast=True))
    numbers = decode_e4m3(codes, NATIVE_FP8).to(tl.float32)
    numbers = numbers.reshape(BLOCK_N, DIM // _MXFP8_GROUP, _MXFP8_GROUP) * scales[:, :, None]
    return numbers.reshape(BLOCK_N, DIM).to(dtype)


@triton.jit
def _load_nvfp4_records(
    latents,
    block,  # [BLOCK_N], blocks of the cache; a scalar if one holds all keys
    slots,  # Slots
    key_mask,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Load records in NVFP4 as numbers [BLOCK_N, DIM]: two codes a byte, an e4m3 scale for each 16, then bfloat16."""
    CODES: tl.constexpr = DIM - _RECORD_GROUP
    offs, offs_b, offs_g = tl.arange(0, DIM), tl.arange(0, DIM // 2), tl.arange(0, DIM // _NVFP4_GROUP)
    rows = row_offsets(block, slots, latents.stride_block, latents.stride_slot)
    packed = _load_rows(latents.latent_ptr + rows[:, None] + offs_b[None, :], key_mask, offs_b < CODES // 2, True)
    rope_rows = row_offsets(block, slots, latents.stride_rope_block, latents.stride_rope_slot)
    rope_ptrs = latents.rope_ptr + rope_rows[:, None] + (offs - CODES)[None, :]
    rope = tl.load(rope_ptrs, mask=key_mask[:, None] & (offs >= CODES)[None, :], other=0.0)
    scale_rows = row_offsets(block, slots, latents.stride_scales_block, latents.stride_scales_slot)
    scale_ptrs = latents.scales_ptr + scale_rows[:, None] + offs_g[None, :]
    scales = _load_rows(scale_ptrs, key_mask, None, True)  # with the padding behind the last one
    numbers = decode_nvfp4(packed, scales, NATIVE_FP8)  # of 6 bits, so exact in 16 bits
    return tl.where((offs < CODES)[None, :], numbers.to(dtype), rope.to(dtype))


@triton.jit
def _load_block(
    latents,
    block,  # [BLOCK_N], blocks of the cache; a scalar if one holds all keys
    slots,  # Slots
    key_mask,
    dtype: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load latents [BLOCK_N, LATENT_PADDED] and rotated parts [BLOCK_N, ROPE_PADDED] of keys, in the dtype of q."""
    CODES_PER_BYTE: tl.constexpr = 2 if KIND == "nvfp4_latent" else 1
    offs_v = tl.arange(0, LATENT_PADDED // CODES_PER_BYTE)
    offs_r = tl.arange(0, ROPE_PADDED)
    rows = row_offsets(block, slots, latents.stride_block, latents.stride_slot)
    ptrs = latents.latent_ptr + rows[:, None] + offs_v[None, :]
    latent = _load_rows(ptrs, key_mask, latents.latent_mask, MASKED)
    rope_rows = row_offsets(block, slots, latents.stride_rope_block, latents.stride_rope_slot)
    rope = _load_rows(latents.rope_ptr + rope_rows[:, None] + offs_r[None, :], key_mask, latents.rope_mask, MASKED)
    if KIND == "e4m3":
        latent = decode_e4m3(latent, NATIVE_FP8).to(dtype)
        rope = decode_e4m3(rope, NATIVE_FP8).to(dtype)
    elif KIND == "packed":
        offs_g = tl.arange(0, LATENT_PADDED // _GROUP)
        scale_rows = row_offsets(block, slots, latents.stride_scales_block, latents.stride_scales_slot)
        scales = _load_rows(latents.scales_ptr + scale_rows[:, None] + offs_g[None, :], key_mask, None, MASKED)
        numbers = decode_e4m3(latent, NATIVE_FP8).to(tl.float32)
        numbers = numbers.reshape(BLOCK_N, LATENT_PADDED // _GROUP, _GROUP) * scales[:, :, None]
        latent = numbers.reshape(BLOCK_N, LATENT_PADDED).to(dtype)
        rope = rope.to(dtype)
    elif KIND == "nvfp4_latent":
        NUM_GROUPS: tl.constexpr = LATENT_PADDED // _NVFP4_GROUP
        offs_g = tl.arange(0, NUM_GROUPS)
        place = offs_g % 4 * (NUM_GROUPS // 4) + offs_g // 4  # see `_Nvfp4LatentForm`
        scale_rows = row_offsets(block, slots, latents.stride_scales_block, latents.stride_scales_slot)
        scales = _load_rows(latents.scales_ptr + scale_rows[:, None] + place[None, :], key_mask, None, MASKED)
        latent = decode_nvfp4(latent, scales, NATIVE_FP8).to(dtype)  # of 6 bits, so exact in 16 bits
        rope = decode_e4m3(rope, NATIVE_FP8).to(dtype)
    return latent, rope


@triton.jit
def _attend(
    acc,  # [BLOCK_M, LATENT_PADDED] float32, unnormalised output
    row_max,  # [BLOCK_M] float32, base 2
    row_sum,  # [BLOCK_M] float32
    q_latent,  # [BLOCK_M, LATENT_PADDED]
    q_rope,  # [BLOCK_M, ROPE_PADDED]
    latents,  # Latents
    scale,  # softmax_scale * LOG2E
    first_key,  # [BLOCK_M], first key of each row; None without a window
    end_key,  # [BLOCK_M], one past the last key of each row
    begin,  # first block of BLOCK_N keys
    end,
    HAS_ROPE: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of these blocks
):
    """Online softmax (Milakov and Gimelshein, 2018) over the keys of blocks [begin, end)."""
    num_keys = tl.max(end_key, 0)
    if latents.indices_ptr is None:
        next_block = load_block_ids(latents.table_ptr, begin, end, num_keys, KV_BLOCK_SIZE, BLOCK_N, MASKED)
    for index in range(begin, end):
        keys = index * BLOCK_N + tl.arange(0, BLOCK_N)
        if latents.indices_ptr is None:
            key_mask = keys < num_keys
            if first_key is not None:  # blocks before the window may be free
                key_mask = key_mask & (keys >= tl.min(first_key, 0))
            block = next_block
            slots = key_slots(index, KV_BLOCK_SIZE, BLOCK_N)
            next_block = load_block_ids(latents.table_ptr, index + 1, end, num_keys, KV_BLOCK_SIZE, BLOCK_N, MASKED)
        else:
            keys = tl.load(latents.indices_ptr + keys, mask=keys < latents.num_indices, other=-1)
            key_mask = (keys >= 0) & (keys < num_keys)
            block = tl.load(latents.table_ptr + keys // KV_BLOCK_SIZE, mask=key_mask, other=0)
            slots = Slots(first=index * 0, offsets=keys % KV_BLOCK_SIZE)
        if KIND == "record":
            latent = _load_records(
                latents, block, slots, key_mask, q_latent.dtype, q_latent.shape[1], BLOCK_N, NATIVE_FP8
            )
        elif KIND == "mxfp8":
            latent = _load_mxfp8(
                latents, block, slots, key_mask, q_latent.dtype, q_latent.shape[1], BLOCK_N, NATIVE_FP8
            )
        elif KIND == "nvfp4_record":
            latent = _load_nvfp4_records(
                latents, block, slots, key_mask, q_latent.dtype, q_latent.shape[1], BLOCK_N, NATIVE_FP8
            )
        else:
            latent, rope = _load_block(
                latents, block, slots, key_mask, q_latent.dtype, q_latent.shape[1], q_rope.shape[1], BLOCK_N, KIND,
                NATIVE_FP8, MASKED,
            )  # fmt: skip
        scores = dot(q_latent, tl.trans(latent), tl.zeros([q_latent.shape[0], BLOCK_N], tl.float32))
        if HAS_ROPE:
            scores = dot(q_rope, tl.trans(rope), scores)
        if MASKED:
            visible = key_mask[None, :] & (keys[None, :] < end_key[:, None])
            if first_key is not None:
                visible = visible & (keys[None, :] >= first_key[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        subtrahend = finite(new_max) if MASKED else new_max
        weights = tl.exp2(scores * scale - subtrahend[:, None])
        correction = tl.exp2(row_max - subtrahend)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        acc = dot(weights.to(latent.dtype), latent, acc * correction[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_indices", "window_left", "window_right", "stride_table_seq", "stride_lse_head"),
    ],
    do_not_specialize_on_alignment=["block_table_ptr"],
)
def _mla_attention_kernel(
    q_ptr,  # [num_tokens, GROUP, V_HEAD_DIM + ROPE_DIM]
    latent_ptr,  # [num_blocks, KV_BLOCK_SIZE, V_HEAD_DIM]
    rope_ptr,  # [num_blocks, KV_BLOCK_SIZE, ROPE_DIM]
    scales_ptr,  # [num_blocks, KV_BLOCK_SIZE, groups of V_HEAD_DIM], or None
    out_ptr,  # [num_tokens, GROUP, V_HEAD_DIM]
    lse_ptr,  # [GROUP, num_tokens], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]; with indices [num_tokens + 1]
    seq_lens_ptr,  # [num_seqs]; with indices [num_tokens]
    items_ptr,  # [max_items, ITEM_SIZE]
    counts_ptr,  # [2]
    first_padding_ptr,  # [1]
    partial_out_ptr,  # [max_slots, 1, BLOCK_M, V_HEAD_DIM]
    partial_lse_ptr,  # [max_slots, 1, BLOCK_M]
    sinks_ptr,  # [GROUP], or None
    k_scale_ptr,  # [1], or None
    indices_ptr,  # [num_tokens, num_indices], or None
    token_keys_ptr,  # with indices [2, num_tokens]: the token's sequence, and one past the last key it sees
    num_tokens,
    num_indices,
    scale,
    window_left,
    window_right,
    stride_q_token,
    stride_q_head,
    stride_latent_block,
    stride_latent_slot,
    stride_rope_block,
    stride_rope_slot,
    stride_scales_block,
    stride_scales_slot,
    stride_out_token,
    stride_out_head,
    stride_lse_head,
    stride_table_seq,
    stride_indices_token,
    GROUP: tl.constexpr,  # heads
    V_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM_PADDED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # whether window_left limits the keys
    ONE_LOOP: tl.constexpr,  # mask all blocks: for windows, chosen keys, and tiles whose two loops would spill
    KIND: tl.constexpr,  # see `latent_kind`
    NATIVE_FP8: tl.constexpr,
    CLEAR_PADDING: tl.constexpr,  # also write the rows from first_padding on
):
    """Run one item of the work list a program. Row r of a tile is token r // GROUP, head r % GROUP."""
    wait_for_inputs()
    item = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_v = tl.arange(0, V_HEAD_DIM_PADDED)
    offs_r = tl.arange(0, ROPE_DIM_PADDED)
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

    seq = tl.load(items_ptr + item * ITEM_SIZE).to(tl.int64)
    tile = tl.load(items_ptr + item * ITEM_SIZE + 1)
    begin = tl.load(items_ptr + item * ITEM_SIZE + 2)
    end = tl.load(items_ptr + item * ITEM_SIZE + 3)
    slot = tl.load(items_ptr + item * ITEM_SIZE + 4).to(tl.int64)
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - first_token
    query, token, head, row_mask = _locate_rows(tile, offs_m, first_token, q_len, 0, GROUP, BLOCK_M)
    if indices_ptr is None:
        seq_len = tl.load(seq_lens_ptr + seq)
        window = Window(left=window_left, right=window_right, chunk_size=None)
        first_key, end_key = visible_range(seq_len - q_len + query, seq_len, window)
        _, first_end = visible_range(seq_len - q_len + tile * BLOCK_M // GROUP, seq_len, window)
        full_end = begin if ONE_LOOP else tl.maximum(tl.minimum(tl.maximum(first_end, 0) // BLOCK_N, end), begin)
    else:
        indices_ptr += seq * stride_indices_token
        first_key = query * 0
        end_key = query * 0 + tl.load(token_keys_ptr + num_tokens + seq)
        seq = tl.load(token_keys_ptr + seq).to(tl.int64)
        full_end = begin
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)

    q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None]
    q_latent = tl.load(q_ptrs + offs_v[None, :], mask=row_mask[:, None] & (offs_v < V_HEAD_DIM)[None, :], other=0.0)
    q_rope = tl.load(
        q_ptrs + V_HEAD_DIM + offs_r[None, :], mask=row_mask[:, None] & (offs_r < ROPE_DIM)[None, :], other=0.0
    )
    latents = Latents(
        latent_ptr=latent_ptr,
        rope_ptr=rope_ptr,
        scales_ptr=scales_ptr,
        stride_block=stride_latent_block,
        stride_slot=stride_latent_slot,
        stride_rope_block=stride_rope_block,
        stride_rope_slot=stride_rope_slot,
        stride_scales_block=stride_scales_block,
        stride_scales_slot=stride_scales_slot,
        latent_mask=None if V_HEAD_DIM == V_HEAD_DIM_PADDED else offs_v < V_HEAD_DIM,
        rope_mask=None if ROPE_DIM == ROPE_DIM_PADDED else offs_r < ROPE_DIM,
        table_ptr=block_table_ptr + seq * stride_table_seq,
        indices_ptr=indices_ptr,
        num_indices=num_indices,
    )
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if not ONE_LOOP:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_latent, q_rope, latents, scale * LOG2E, None, end_key, begin, full_end,
            ROPE_DIM > 0, KV_BLOCK_SIZE, BLOCK_N, KIND, NATIVE_FP8, False,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q_latent, q_rope, latents, scale * LOG2E, first_key if HAS_WINDOW else None, end_key,
        full_end, end, ROPE_DIM > 0, KV_BLOCK_SIZE, BLOCK_N, KIND, NATIVE_FP8, True,
    )  # fmt: skip

    # Read the tile's number again, so that no row index stays in registers during the loops: the sums need all of them.
    tile = tl.load(items_ptr + item * ITEM_SIZE + 1, volatile=True)
    _, token, head, row_mask = _locate_rows(tile, offs_m, first_token, q_len, 0, GROUP, BLOCK_M)
    store_mask = row_mask[:, None] & (offs_v < V_HEAD_DIM)[None, :]
    if k_scale_ptr is not None:
        acc *= tl.load(k_scale_ptr)
    if slot >= 0:
        out, lse = normalise(acc, row_max, row_sum, None, head, row_mask)
        partial = slot * BLOCK_M + offs_m
        tl.store(partial_out_ptr + partial[:, None] * V_HEAD_DIM + offs_v[None, :], out, mask=store_mask)
        tl.store(partial_lse_ptr + partial, lse, mask=row_mask)
    else:
        _store_rows(acc, row_max, row_sum, output, sinks_ptr, token, head, offs_v, row_mask, store_mask)
