"""The Triton kernel of attention over chosen blocks: it runs the work items of a plan whose sequences are bundles.

A bundle is a token, or a few consecutive tokens of a sequence. It and a KV head have a list of blocks of positions: the
token's own, or the union of `union_kernel.py`. Key n of the list lies in entry n // CHOSEN_SIZE, and entries may be
empty. So a program reads the chosen keys alone. The rows of one token, the heads of a group, all see the same keys;
rows of several see the entries whose members they are. Partial results are merged as those of `tile_kernels.py`.

A block of keys takes two loads before its addresses are known: the chosen ids, and the cache's block ids. Both run one
block ahead, see `keys.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.compat import dot, tl, triton
from ..core.launch import wait_for_inputs
from .keys import WORD_KEYS, Slots, Window, visible_range
from .merge_splits import LOG2E, Output, _clear_padding, _locate_rows, _store_rows, finite, normalise
from .online_softmax import (
    CachedRows,
    _softcapped,
    element_mask,
    group_mask,
    load_elements,
    scale_of_head,
    scales_of_rows,
    scores_and_values,
)
from .plan_kernel import ITEM_SIZE
from .tile_kernels import _fill_float16


class Choice(NamedTuple):
    """The blocks that a bundle and a KV head see, and where their keys lie. A kernel creates it."""

    chosen_ptr: Any  # ids of the blocks
    num_chosen: Any
    members_ptr: Any  # bits of the tokens that choose each block; None for one token
    table_ptr: Any  # the sequence's row of the block table
    first_key: Any  # first and one past the last key that window, chunk and length allow any of the tokens
    end_key: Any
    mask_ptr: Any  # the token's words of the mask over the new keys, or None; none with members
    context_len: Any  # keys before the first new one


class RowRules(NamedTuple):
    """How the rows of a tile weigh their keys. A kernel creates it."""

    scale: Any
    softcap: Any  # None without softcap
    query: Any  # [BLOCK_M], token of the bundle
    position: Any  # [BLOCK_M]
    slopes: Any  # [BLOCK_M], ALiBi's slopes, or None
    first_key: Any  # [BLOCK_M], first key of each row; None without window and chunks
    end_key: Any  # [BLOCK_M], one past the last key of each row


@triton.jit
def _positions(choice, chosen, index, CHOSEN_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first position of a block of keys, all positions [BLOCK_N], and which of them a token may see.

    The mask over new keys is not applied. chosen: ids of the chosen blocks, a scalar if one holds all keys, else
    [BLOCK_N]; the first position is then a scalar or [BLOCK_N], too.
    """
    offs_n = tl.arange(0, BLOCK_N)
    # Compare ids, because a large id times CHOSEN_SIZE does not fit 32 bits.
    is_block = (chosen >= 0) & (chosen < (choice.end_key + CHOSEN_SIZE - 1) // CHOSEN_SIZE)
    first = tl.where(is_block, chosen * CHOSEN_SIZE, 0)
    if CHOSEN_SIZE % BLOCK_N == 0:
        first += index * BLOCK_N % CHOSEN_SIZE
        positions = first + offs_n
    else:
        first += (index * BLOCK_N + offs_n) % CHOSEN_SIZE
        positions = first
    is_seen = is_block & (positions >= choice.first_key) & (positions < choice.end_key)
    return first, positions, is_seen


@triton.jit
def _entry(index, CHOSEN_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the entry of a block of keys: a scalar if one holds all keys, else [BLOCK_N]."""
    if CHOSEN_SIZE % BLOCK_N == 0:
        entry = index * BLOCK_N // CHOSEN_SIZE
    else:
        entry = (index * BLOCK_N + tl.arange(0, BLOCK_N)) // CHOSEN_SIZE
    return entry


@triton.jit
def _load_ids(
    choice, index, end, CHOSEN_SIZE: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the chosen blocks and the cache blocks of a block of keys: scalars if one holds all keys, else [BLOCK_N].

    Only the cache blocks of keys that a token sees are read.
    """
    entry = _entry(index, CHOSEN_SIZE, BLOCK_N)
    chosen = tl.load(choice.chosen_ptr + entry, mask=(index < end) & (entry < choice.num_chosen), other=-1)
    first, positions, is_seen = _positions(choice, chosen, index, CHOSEN_SIZE, BLOCK_N)
    if CHOSEN_SIZE % BLOCK_N == 0 and KV_BLOCK_SIZE % BLOCK_N == 0:
        is_read = (chosen >= 0) & (first < choice.end_key) & (first + BLOCK_N > choice.first_key)
        block = tl.load(choice.table_ptr + first // KV_BLOCK_SIZE, mask=is_read, other=0)
    else:
        block = tl.load(choice.table_ptr + positions // KV_BLOCK_SIZE, mask=is_seen, other=0)
    return chosen, block


@triton.jit
def _visible_to_rows(
    choice, rules, index, positions, is_seen, CHOSEN_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """[BLOCK_M, BLOCK_N], or [1, BLOCK_N] if all rows are of one token: whether each row sees each key."""
    visible = is_seen[None, :]
    if choice.members_ptr is not None:
        entry = _entry(index, CHOSEN_SIZE, BLOCK_N)
        members = tl.load(choice.members_ptr + entry, mask=entry < choice.num_chosen, other=0)
        if CHOSEN_SIZE % BLOCK_N == 0:
            is_member = ((members >> rules.query) & 1)[:, None] != 0
        else:
            is_member = (members[None, :] >> rules.query[:, None]) & 1 != 0
        visible = visible & is_member & (positions[None, :] < rules.end_key[:, None])
        if rules.first_key is not None:
            visible = visible & (positions[None, :] >= rules.first_key[:, None])
    return visible


@triton.jit
def _attend(
    acc,  # [BLOCK_M, V_HEAD_DIM_PADDED] float32, unnormalised output
    row_max,  # [BLOCK_M] float32, base 2
    row_sum,  # [BLOCK_M] float32
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    choice,  # Choice
    k_rows,  # CachedRows
    v_rows,
    rules,  # RowRules
    begin,  # first block of BLOCK_N keys
    end,
    CHOSEN_SIZE: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Online softmax (Milakov and Gimelshein, 2018) over the keys of blocks [begin, end)."""
    next_chosen, next_block = _load_ids(choice, begin, end, CHOSEN_SIZE, KV_BLOCK_SIZE, BLOCK_N)
    for index in range(begin, end):
        chosen, block = next_chosen, next_block
        next_chosen, next_block = _load_ids(choice, index + 1, end, CHOSEN_SIZE, KV_BLOCK_SIZE, BLOCK_N)
        first, positions, is_seen = _positions(choice, chosen, index, CHOSEN_SIZE, BLOCK_N)
        if CHOSEN_SIZE % BLOCK_N == 0 and KV_BLOCK_SIZE % BLOCK_N == 0:
            slots = Slots(first=first % KV_BLOCK_SIZE, offsets=tl.arange(0, BLOCK_N))
        else:
            slots = Slots(first=index * 0, offsets=positions % KV_BLOCK_SIZE)
        k = load_elements(k_rows, block, slots, is_seen, q.shape[1], K_KIND, NATIVE_FP8, True)
        v = load_elements(v_rows, block, slots, is_seen, acc.shape[1], V_KIND, NATIVE_FP8, True)
        scores, v = scores_and_values(q, k, v, k_rows, v_rows, block, slots, is_seen, K_KIND, V_KIND, NATIVE_FP8, True)
        if rules.softcap is not None:
            scores = _softcapped(scores, rules.scale, rules.softcap, q.dtype)
        else:
            scores = scores * (rules.scale * LOG2E)
        if rules.slopes is not None:
            distance = tl.abs(rules.position[:, None] - positions[None, :]).to(tl.float32)
            scores -= distance * (rules.slopes * LOG2E)[:, None]
        if choice.mask_ptr is not None:
            word = positions // WORD_KEYS - choice.context_len // WORD_KEYS
            bits = tl.load(choice.mask_ptr + word, mask=is_seen & (word >= 0), other=-1)
            is_seen = is_seen & ((bits >> (positions % WORD_KEYS).to(tl.int64)) & 1 != 0)
        visible = _visible_to_rows(choice, rules, index, positions, is_seen, CHOSEN_SIZE, BLOCK_N)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - finite(new_max)[:, None])
        correction = tl.exp2(row_max - finite(new_max))
        row_sum = row_sum * correction + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * correction[:, None])
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_chosen", "max_entries", "window_left", "window_right", "stride_table_seq", "stride_lse_head",
    ],
    do_not_specialize_on_alignment=["block_table_ptr"],
)  # fmt: skip
def _chosen_attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    k_cache,  # [num_blocks, KV_BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    v_cache,  # [num_blocks, KV_BLOCK_SIZE, num_kv_heads, V_HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, V_HEAD_DIM]
    lse_ptr,  # [num_q_heads, num_tokens], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    chosen_ptr,  # [num_tokens, num_kv_heads, num_chosen]
    union_ids_ptr,  # [num_bundles, num_kv_heads, max_entries], or None: bundles of one token read their own lists
    union_members_ptr,  # likewise
    union_sizes_ptr,  # [num_bundles, num_kv_heads], or None
    step_offsets_ptr,  # [num_seqs + 1], query offsets
    step_lengths_ptr,  # [num_seqs], KV lengths
    bundle_offsets_ptr,  # [num_bundles + 1], first token of each bundle
    bundle_seqs_ptr,  # [num_bundles], each bundle's sequence
    items_ptr,  # [max_items, ITEM_SIZE], whose sequences are bundles
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
    num_chosen,
    max_entries,
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
    stride_chosen_token,
    stride_chosen_head,
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
    CHOSEN_SIZE: tl.constexpr,  # positions of a chosen block
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # whether window_left or CHUNK_SIZE limits the keys
    CHUNK_SIZE: tl.constexpr,  # keys of a chunk of local attention, 0 without
    HAS_SOFTCAP: tl.constexpr,
    K_KIND: tl.constexpr,  # name of a `KvKind`
    V_KIND: tl.constexpr,
    FITS_FLOAT16: tl.constexpr,  # float16 holds all numbers of the caches
    NATIVE_FP8: tl.constexpr,
    CLEAR_PADDING: tl.constexpr,  # also write the rows from first_padding on
):
    """Run one item of the work list for one KV head. Row r of a bundle is token r // GROUP, head r % GROUP."""
    wait_for_inputs()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)
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
        _clear_padding(output, first_row, num_tokens, kv_head, GROUP, V_HEAD_DIM, V_HEAD_DIM_PADDED)
    if item >= tl.load(counts_ptr):
        return

    bundle = tl.load(items_ptr + item * ITEM_SIZE)
    tile = tl.load(items_ptr + item * ITEM_SIZE + 1)
    begin = tl.load(items_ptr + item * ITEM_SIZE + 2)
    end = tl.load(items_ptr + item * ITEM_SIZE + 3)
    slot = tl.load(items_ptr + item * ITEM_SIZE + 4).to(tl.int64)
    seq = tl.load(bundle_seqs_ptr + bundle).to(tl.int64)
    first_token = tl.load(bundle_offsets_ptr + bundle)
    last_query = 0
    if union_ids_ptr is not None:
        last_query = tl.load(bundle_offsets_ptr + bundle + 1) - first_token - 1
    step_token = tl.load(step_offsets_ptr + seq)
    seq_len = tl.load(step_lengths_ptr + seq)
    context_len = seq_len - tl.load(step_offsets_ptr + seq + 1) + step_token
    first_position = context_len + first_token - step_token
    if is_causal_ptr is not None:
        window_right = tl.where(tl.load(is_causal_ptr + seq) != 0, 0, window_right)
    window = Window(left=window_left, right=window_right, chunk_size=CHUNK_SIZE if CHUNK_SIZE > 0 else None)
    first_key, _ = visible_range(first_position, seq_len, window)
    _, end_key = visible_range(first_position + last_query, seq_len, window)

    query, token, head, row_mask = _locate_rows(tile, offs_m, first_token, last_query + 1, kv_head, GROUP, BLOCK_M)
    first_keys, end_keys = visible_range(first_position + query, seq_len, window)
    q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=row_mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    kv_head_64 = kv_head.to(tl.int64)
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + head, mask=row_mask, other=0.0).to(tl.float32)
    token_mask_ptr = None
    if mask_ptr is not None:
        token_mask_ptr = mask_ptr + first_token.to(tl.int64) * stride_mask_token
    k_scale = scale_of_head(k_scale_ptr, k_table_scale_ptr, kv_head, stride_k_scale_head, K_KIND)
    if k_scale is not None:
        scale *= k_scale
    if FITS_FLOAT16 and q.dtype == tl.bfloat16:
        q, scale = _fill_float16(q, scale)
    k_rows = CachedRows(
        cache=k_cache + kv_head_64 * stride_k_head,
        stride_block=stride_k_block,
        stride_slot=stride_k_slot,
        dim_mask=element_mask(HEAD_DIM, HEAD_DIM_PADDED, K_KIND),
        scales=scales_of_rows(k_scale_ptr, kv_head, stride_k_scale_head, K_KIND),
        group_mask=group_mask(HEAD_DIM, HEAD_DIM_PADDED, K_KIND),
        stride_scale_block=stride_k_scale_block,
        stride_scale_slot=stride_k_scale_slot,
    )
    v_rows = CachedRows(
        cache=v_cache + kv_head_64 * stride_v_head,
        stride_block=stride_v_block,
        stride_slot=stride_v_slot,
        dim_mask=element_mask(V_HEAD_DIM, V_HEAD_DIM_PADDED, V_KIND),
        scales=scales_of_rows(v_scale_ptr, kv_head, stride_v_scale_head, V_KIND),
        group_mask=group_mask(V_HEAD_DIM, V_HEAD_DIM_PADDED, V_KIND),
        stride_scale_block=stride_v_scale_block,
        stride_scale_slot=stride_v_scale_slot,
    )
    members_ptr = None
    if union_ids_ptr is not None:
        index = bundle.to(tl.int64) * tl.num_programs(0) + kv_head
        # The plan counts the keys of one list. Cut those of the union in the same proportions.
        planned = (num_chosen * CHOSEN_SIZE + BLOCK_N - 1) // BLOCK_N
        num_chosen = tl.load(union_sizes_ptr + index)
        blocks = ((num_chosen * CHOSEN_SIZE + BLOCK_N - 1) // BLOCK_N).to(tl.int64)
        begin = (begin * blocks // planned).to(tl.int32)
        end = (end * blocks // planned).to(tl.int32)
        chosen_ptr = union_ids_ptr + index * max_entries
        members_ptr = union_members_ptr + index * max_entries
    else:
        chosen_ptr += first_token.to(tl.int64) * stride_chosen_token + kv_head_64 * stride_chosen_head
    choice = Choice(
        chosen_ptr=chosen_ptr,
        num_chosen=num_chosen,
        members_ptr=members_ptr,
        table_ptr=block_table_ptr + seq * stride_table_seq,
        first_key=tl.maximum(first_key, 0),
        end_key=end_key,
        mask_ptr=token_mask_ptr,
        context_len=context_len,
    )
    rules = RowRules(
        scale=scale,
        softcap=softcap if HAS_SOFTCAP else None,
        query=query,
        position=first_position + query,
        slopes=slopes,
        first_key=first_keys if HAS_WINDOW else None,
        end_key=end_keys,
    )
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, choice, k_rows, v_rows, rules, begin, end, CHOSEN_SIZE, KV_BLOCK_SIZE, BLOCK_N,
        K_KIND, V_KIND, NATIVE_FP8,
    )  # fmt: skip

    store_mask = row_mask[:, None] & (offs_v < V_HEAD_DIM)[None, :]
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
