"""The inner loop of attention: a tile of queries against blocks of keys, by an online softmax.

Scores exist for BLOCK_N keys at a time. Each row keeps the largest score so far, the sum of its weights relative to
this score, and the weighted sum of values. If a block has a larger score, both sums are scaled down to it before the
block's sums are added (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Scores are in base 2, because
chips have an instruction for exp2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.compat import dot, tl, triton
from ..core.dtypes import decode_e4m3, decode_e5m2, decode_int4, decode_nvfp4
from .keys import WORD_KEYS, key_slots, load_block_ids, row_offsets
from .merge_splits import LOG2E, finite


@triton.jit
def _exact_tanh(x):
    """tanh of float32 to 3 units in the last place, which a softcap of 50 needs.

    NVIDIA's exp2 and / are approximate, too inexact for large caps, see limits.md. Here tanh(x) = (e^2x - 1) / (e^2x +
    1), with 2x = n ln 2 + r. ln 2 has two parts, so that n times the first is exact. e^r - 1 is its series.
    """
    doubled = 2.0 * tl.abs(x)
    doubled = tl.where(doubled > 20.0, 20.0, doubled)  # beyond 18.1 tanh rounds to 1; keeps NaN
    n = tl.floor(doubled * LOG2E + 0.5)
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, doubled))
    series = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    series = tl.fma(r, series, 1.0 / 120)
    series = tl.fma(r, series, 1.0 / 24)
    series = tl.fma(r, series, 1.0 / 6)
    series = tl.fma(r, series, 0.5)
    series = tl.fma(r, series, 1.0)
    two_to_n = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    grown = tl.fma(r * series, two_to_n, two_to_n - 1.0)
    result = tl.div_rn(grown, grown + 2.0)
    return tl.where(x < 0, -result, result)


# Tuples of pointers and numbers that a kernel passes to its functions. Triton turns constexprs in tuples into tensors,
# so sizes and flags stay arguments. Create tuples by field name, because Triton's cache does not see the names of
# fields.
class CachedRows(NamedTuple):
    """K or V of one KV head: a row in every slot of every cache block."""

    cache: Any  # pointer to the head's first element in block 0, or a descriptor of the whole cache; None if V is K
    stride_block: Any
    stride_slot: Any
    dim_mask: Any  # [padded elements], see `element_mask`
    scales: Any  # pointer to the head's first scale in block 0 of a cache with scales, else None
    group_mask: Any  # [groups of a row that share a scale], which exist, or None if all do
    stride_scale_block: Any
    stride_scale_slot: Any


class Keys(NamedTuple):
    """Where to find the keys of one sequence and KV head."""

    block_table_ptr: Any  # the sequence's row of the block table
    kv_head: Any
    context_len: Any  # keys before the first new one
    seq_len: Any


class ScoreRules(NamedTuple):
    """How the BLOCK_M rows of a tile weigh their keys."""

    scale: Any
    softcap: Any  # None without softcap
    position: Any  # [BLOCK_M]
    slopes: Any  # [BLOCK_M], ALiBi's slopes, or None
    first_key: Any  # [BLOCK_M], first key of each row; None without window and chunks
    end_key: Any  # [BLOCK_M], one past the last key of each row
    mask_ptrs: Any  # [BLOCK_M], each row's words of the mask over the new keys, or None


@triton.jit
def element_mask(WIDTH: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr):
    """Which elements of a padded row exist, or None if all do. WIDTH, PADDED: numbers of the row."""
    mask = None
    if WIDTH != PADDED and (KIND == "int4" or KIND == "nvfp4"):
        mask = tl.arange(0, PADDED // 2) < WIDTH // 2
    elif WIDTH != PADDED:
        mask = tl.arange(0, PADDED) < WIDTH
    return mask


@triton.jit
def group_mask(WIDTH: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr):
    """Which groups of numbers of a padded row exist, or None if all do."""
    GROUP: tl.constexpr = 16 if KIND == "nvfp4" else 32
    mask = None
    if WIDTH != PADDED and PADDED > GROUP and (KIND == "int4" or KIND == "nvfp4"):
        mask = tl.arange(0, PADDED // GROUP) * GROUP < WIDTH
    return mask


@triton.jit
def scales_of_rows(scale_ptr, kv_head, stride_head, KIND: tl.constexpr):
    """Pointer to the first scale of a head in block 0; None if the cache holds no scales."""
    pointer = None
    if KIND == "int8" or KIND == "e4m3_rows" or KIND == "int4" or KIND == "nvfp4":
        pointer = scale_ptr + kv_head.to(tl.int64) * stride_head
    return pointer


@triton.jit
def scale_of_head(scale_ptr, table_scale_ptr, kv_head, stride_head, KIND: tl.constexpr):
    """The scale that a call gives for all rows of a head, or None."""
    scale = None
    if KIND == "nvfp4":
        if table_scale_ptr is not None:
            scale = tl.load(table_scale_ptr)
    elif scale_ptr is not None and KIND != "int8" and KIND != "e4m3_rows" and KIND != "int4":
        scale = tl.load(scale_ptr + kv_head * stride_head)
    return scale


@triton.jit
def _load_rows(cached, offsets, key_mask, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load rows [BLOCK_N, DIM] of K or V by pointers; masked elements are 0."""
    ptrs = cached.cache + offsets[:, None] + tl.arange(0, DIM)[None, :]
    if MASKED and cached.dim_mask is not None:
        rows = tl.load(ptrs, mask=key_mask[:, None] & cached.dim_mask[None, :], other=0)
    elif MASKED:
        rows = tl.load(ptrs, mask=key_mask[:, None], other=0)
    elif cached.dim_mask is not None:
        rows = tl.load(ptrs, mask=cached.dim_mask[None, :], other=0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def _load_scales(cached, block, slots, key_mask, MASKED: tl.constexpr):
    """Load the scales [BLOCK_N] of rows."""
    ptrs = cached.scales + row_offsets(block, slots, cached.stride_scale_block, cached.stride_scale_slot)
    return tl.load(ptrs, mask=key_mask, other=0.0) if MASKED else tl.load(ptrs)


@triton.jit
def _load_group_scales(rows, block, slots, key_mask, GROUPS: tl.constexpr, MASKED: tl.constexpr):
    """Load the scales [BLOCK_N, GROUPS] of groups; those of masked keys, and that do not exist, are 0."""
    starts = row_offsets(block, slots, rows.stride_scale_block, rows.stride_scale_slot)
    ptrs = rows.scales + starts[:, None] + tl.arange(0, GROUPS)[None, :]
    if MASKED and rows.group_mask is not None:
        scales = tl.load(ptrs, mask=key_mask[:, None] & rows.group_mask[None, :], other=0)
    elif MASKED:
        scales = tl.load(ptrs, mask=key_mask[:, None], other=0)
    elif rows.group_mask is not None:
        scales = tl.load(ptrs, mask=rows.group_mask[None, :], other=0)
    else:
        scales = tl.load(ptrs)
    return scales


@triton.jit
def load_elements(
    rows,  # CachedRows
    block,  # from `load_block_ids`
    slots,
    key_mask,  # [BLOCK_N]
    DIM: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load rows [BLOCK_N, DIM]: the cache's elements, or float numbers if the cache has two numbers a byte.

    Masked keys are 0. Columns that do not exist are finite.
    """
    offsets = row_offsets(block, slots, rows.stride_block, rows.stride_slot)
    if KIND == "int4":
        packed = _load_rows(rows, offsets, key_mask, DIM // 2, MASKED)
        scales = _load_group_scales(rows, block, slots, key_mask, DIM // 32 if DIM > 32 else 1, MASKED)
        elements = decode_int4(packed, scales)
    elif KIND == "nvfp4":
        packed = _load_rows(rows, offsets, key_mask, DIM // 2, MASKED)
        scales = _load_group_scales(rows, block, slots, key_mask, DIM // 16 if DIM > 16 else 1, MASKED)
        elements = decode_nvfp4(packed, scales, NATIVE_FP8)
    else:
        elements = _load_rows(rows, offsets, key_mask, DIM, MASKED)
    return elements


@triton.jit
def _to_float(elements, dtype: tl.constexpr, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Convert what `load_elements` returns to `dtype`. Codes with a scale for each row are not multiplied by it."""
    if KIND == "e5m2":
        elements = decode_e5m2(elements)
    elif KIND == "e4m3" or KIND == "e4m3_rows":
        elements = decode_e4m3(elements, NATIVE_FP8)
    return elements.to(dtype)


@triton.jit
def scores_and_values(
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    k,  # [BLOCK_N, HEAD_DIM_PADDED], from `load_elements`
    v,  # [BLOCK_N, V_HEAD_DIM_PADDED]
    k_rows,  # CachedRows
    v_rows,
    block,
    slots,
    key_mask,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return q @ K^T [BLOCK_M, BLOCK_N] and V [BLOCK_N, V_HEAD_DIM_PADDED] in the dtype of q."""
    k_scale = None
    if K_KIND == "int8" or K_KIND == "e4m3_rows":
        k_scale = _load_scales(k_rows, block, slots, key_mask, MASKED)
    if V_KIND == "int8" or V_KIND == "e4m3_rows":
        v_scale = _load_scales(v_rows, block, slots, key_mask, MASKED)
        # Scale the values, because a small scale times the weights would leave the range of float16.
        v = (_to_float(v, tl.float32, V_KIND, NATIVE_FP8) * v_scale[:, None]).to(q.dtype)
    else:
        v = _to_float(v, q.dtype, V_KIND, NATIVE_FP8)
    k = _to_float(k, q.dtype, K_KIND, NATIVE_FP8)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if k_scale is not None:
        scores *= k_scale[None, :]
    return scores, v


@triton.jit
def _score_block(
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    keys,  # Keys
    k_rows,  # CachedRows
    v_rows,
    block,  # from `load_block_ids`
    index,  # index of the block of keys
    offs_n,  # [BLOCK_N], the keys
    V_HEAD_DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
    K_KIND: tl.constexpr,
    V_KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return q @ K^T [BLOCK_M, BLOCK_N] for a block of keys, and V [BLOCK_N, V_HEAD_DIM_PADDED] in the dtype of q."""
    HEAD_DIM_PADDED: tl.constexpr = q.shape[1]
    key_mask = offs_n < keys.seq_len
    slots = key_slots(index, KV_BLOCK_SIZE, BLOCK_N)
    if USE_TMA:  # all BLOCK_N keys lie in one cache block
        box = [block, slots.first, keys.kv_head, 0]
        k = k_rows.cache.load(box).reshape(BLOCK_N, HEAD_DIM_PADDED)
        v = k if v_rows.cache is None else v_rows.cache.load(box).reshape(BLOCK_N, V_HEAD_DIM_PADDED)
        if MASKED:
            # Values after the end may be NaN, and 0 * NaN is NaN, so a weight of 0 would not be enough.
            v = tl.where(key_mask[:, None], v, 0)
    else:
        k = load_elements(k_rows, block, slots, key_mask, HEAD_DIM_PADDED, K_KIND, NATIVE_FP8, MASKED)
        v = k
        if v_rows.cache is not None:
            v = load_elements(v_rows, block, slots, key_mask, V_HEAD_DIM_PADDED, V_KIND, NATIVE_FP8, MASKED)
    return scores_and_values(q, k, v, k_rows, v_rows, block, slots, key_mask, K_KIND, V_KIND, NATIVE_FP8, MASKED)


@triton.jit
def _is_visible(rules, start, offs_n, context_len, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N], whether each row sees each key from `start` on."""
    visible = offs_n[None, :] < rules.end_key[:, None]
    if rules.first_key is not None:
        visible = visible & (offs_n[None, :] >= rules.first_key[:, None])
    if rules.mask_ptrs is not None:
        # Load one word of mask bits for each row. A tile of bytes would force its layout on the scores, and spill 430
        # registers.
        word = start // WORD_KEYS - context_len // WORD_KEYS
        bits = tl.load(rules.mask_ptrs + word, mask=word >= 0, other=-1)[:, None]
        if BLOCK_N > WORD_KEYS:
            more = tl.load(rules.mask_ptrs + word + 1, mask=word >= -1, other=-1)[:, None]
            bits = tl.where((offs_n % BLOCK_N < WORD_KEYS)[None, :], bits, more)
        visible = visible & ((bits >> (offs_n % WORD_KEYS).to(tl.int64)[None, :]) & 1 != 0)
    return visible


@triton.jit
def _softcapped(scores, scale, softcap, dtype: tl.constexpr):
    """softcap * tanh(scores * scale / softcap), in base 2."""
    if dtype == tl.float32:
        capped = _exact_tanh(scores * (scale / softcap))
    else:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is 1 or -1 if exp overflows or underflows.
        capped = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * LOG2E / softcap)) + 1.0)
    return softcap * capped * LOG2E


@triton.jit
def attend(
    acc,  # [BLOCK_M, V_HEAD_DIM_PADDED] float32, unnormalised output
    row_max,  # [BLOCK_M] float32, base 2
    row_sum,  # [BLOCK_M] float32
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    keys,  # Keys
    k_rows,  # CachedRows
    v_rows,
    rules,  # ScoreRules
    begin,  # first block of BLOCK_N keys
    end,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,  # caches are descriptors
    K_KIND: tl.constexpr,  # name of a `KvKind`
    V_KIND: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of these blocks
    NUM_STAGES: tl.constexpr,  # stages of the loop's pipeline; None for the launch's number
):
    """Online softmax (Milakov and Gimelshein, 2018) over the keys of blocks [begin, end)."""
    # Scale all scores only if a mask, softcap or ALiBi needs it. Else scale their maximum and the differences to it.
    SCALED: tl.constexpr = MASKED or rules.softcap is not None or rules.slopes is not None
    next_block = load_block_ids(keys.block_table_ptr, begin, end, keys.seq_len, KV_BLOCK_SIZE, BLOCK_N, MASKED)
    for index in tl.range(begin, end, num_stages=NUM_STAGES):
        block = next_block
        next_block = load_block_ids(keys.block_table_ptr, index + 1, end, keys.seq_len, KV_BLOCK_SIZE, BLOCK_N, MASKED)
        start = index * BLOCK_N
        offs_n = start + tl.arange(0, BLOCK_N)
        scores, v = _score_block(
            q, keys, k_rows, v_rows, block, index, offs_n, acc.shape[1], KV_BLOCK_SIZE, BLOCK_N, USE_TMA, K_KIND,
            V_KIND, NATIVE_FP8, MASKED,
        )  # fmt: skip
        if rules.softcap is not None:
            scores = _softcapped(scores, rules.scale, rules.softcap, q.dtype)
        elif SCALED:
            scores = scores * (rules.scale * LOG2E)
        if rules.slopes is not None:
            distance = tl.abs(rules.position[:, None] - offs_n[None, :]).to(tl.float32)
            scores -= distance * (rules.slopes * LOG2E)[:, None]
        if MASKED:
            visible = _is_visible(rules, start, offs_n, keys.context_len, BLOCK_N)
            scores = tl.where(visible, scores, float("-inf"))

        if SCALED:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            subtrahend = finite(new_max) if MASKED else new_max
            weights = tl.exp2(scores - subtrahend[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * (rules.scale * LOG2E))
            subtrahend = new_max
            weights = tl.exp2(scores * (rules.scale * LOG2E) - subtrahend[:, None])
        correction = tl.exp2(row_max - subtrahend)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * correction[:, None])
        row_max = new_max
    return acc, row_max, row_sum
