"""The inner loop of attention: a tile of queries against blocks of keys, by an online softmax.

Scores exist for BLOCK_N keys at a time. Each row keeps the largest score so far, the sum of its weights relative to
this score, and the weighted sum of values. If a block has a larger score, both sums are scaled down to it before the
block's sums are added (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Scores are in base 2, because
chips have an instruction for exp2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.compat import dot, tl, triton
from ..core.dtypes import decode_e4m3, decode_e5m2, decode_int4
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
    scales: Any  # pointer to the head's first scale in block 0 of an int8 or int4 cache, else None
    group_mask: Any  # [groups of an int4 row], which have scales, or None if all do
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
    if WIDTH != PADDED and KIND == "int4":
        mask = tl.arange(0, PADDED // 2) < WIDTH // 2
    elif WIDTH != PADDED:
        mask = tl.arange(0, PADDED) < WIDTH
    return mask


@triton.jit
def group_mask(WIDTH: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr):
    """Which groups of 32 numbers of a padded int4 row exist, or None if all do."""
    mask = None
    if WIDTH != PADDED and PADDED > 32 and KIND == "int4":
        mask = tl.arange(0, PADDED // 32) * 32 < WIDTH
    return mask


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
    """Load the scales [BLOCK_N] of int8 rows."""
    ptrs = cached.scales + row_offsets(block, slots, cached.stride_scale_block, cached.stride_scale_slot)
    return tl.load(ptrs, mask=key_mask, other=0.0) if MASKED else tl.load(ptrs)


@triton.jit
def _load_int4(rows, offsets, block, slots, key_mask, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load int4 rows as float32 [BLOCK_N, DIM]; masked keys are 0, columns that do not exist are finite."""
    GROUPS: tl.constexpr = DIM // 32 if DIM > 32 else 1
    packed = _load_rows(rows, offsets, key_mask, DIM // 2, MASKED)
    starts = row_offsets(block, slots, rows.stride_scale_block, rows.stride_scale_slot)
    ptrs = rows.scales + starts[:, None] + tl.arange(0, GROUPS)[None, :]
    if MASKED and rows.group_mask is not None:
        scales = tl.load(ptrs, mask=key_mask[:, None] & rows.group_mask[None, :], other=0.0)
    elif MASKED:
        scales = tl.load(ptrs, mask=key_mask[:, None], other=0.0)
    elif rows.group_mask is not None:
        scales = tl.load(ptrs, mask=rows.group_mask[None, :], other=0.0)
    else:
        scales = tl.load(ptrs)
    return decode_int4(packed, scales)


@triton.jit
def _decode(codes, dtype: tl.constexpr, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Convert 8-bit floats to `dtype`, exact."""
    numbers = decode_e5m2(codes) if KIND == "e5m2" else decode_e4m3(codes, NATIVE_FP8)
    return numbers.to(dtype)


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
    KIND: tl.constexpr,
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
        k_offsets = row_offsets(block, slots, k_rows.stride_block, k_rows.stride_slot)
        v_offsets = row_offsets(block, slots, v_rows.stride_block, v_rows.stride_slot)
        if KIND == "int4":
            k = _load_int4(k_rows, k_offsets, block, slots, key_mask, HEAD_DIM_PADDED, MASKED).to(q.dtype)
            v = _load_int4(v_rows, v_offsets, block, slots, key_mask, V_HEAD_DIM_PADDED, MASKED).to(q.dtype)
        else:
            k = _load_rows(k_rows, k_offsets, key_mask, HEAD_DIM_PADDED, MASKED)
            v = k if v_rows.cache is None else _load_rows(v_rows, v_offsets, key_mask, V_HEAD_DIM_PADDED, MASKED)
    if KIND == "int8":
        k_scale = _load_scales(k_rows, block, slots, key_mask, MASKED)
        v_scale = _load_scales(v_rows, block, slots, key_mask, MASKED)
        # Scale the values, because a small scale times the weights would leave the range of float16.
        v = v.to(tl.float32) * v_scale[:, None]
        k, v = k.to(q.dtype), v.to(q.dtype)
    elif KIND == "e4m3" or KIND == "e5m2":
        k, v = _decode(k, q.dtype, KIND, NATIVE_FP8), _decode(v, q.dtype, KIND, NATIVE_FP8)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
    if KIND == "int8":
        scores *= k_scale[None, :]
    return scores, v


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
    KIND: tl.constexpr,  # name of a `KvKind`
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
            q, keys, k_rows, v_rows, block, index, offs_n, acc.shape[1], KV_BLOCK_SIZE, BLOCK_N, USE_TMA, KIND,
            NATIVE_FP8, MASKED,
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
