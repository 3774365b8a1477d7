"""Choose the blocks of positions that each query attends to: an indexer's scores, and the best blocks by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.checks import check_tensor
from ..core.compat import cdiv, dot, tl, triton
from ..core.device import takes_numba, use_triton
from ..core.dtypes import decode_e4m3
from ..core.errors import InvalidInputError, as_int, shown
from ..core.launch import wait_for_inputs
from ..core.operation import Run, operation
from . import latent_definition
from .choose_keys import locate_token
from .index_spans import KEYS_PER_PROGRAM, SpanLaunches, check_index, index_tile, token_spans
from .latent_definition import block_columns, listed_blocks
from .plan import AttentionPlan

# Most ranks of 8 bytes in memory at once, 512 MB. Longer steps take several launches.
_MAX_RANKS = 1 << 26
# Rank of a block that a query does not see. A rank is a score and an id in one number, so that no two are equal.
_NO_RANK = -(1 << 63)
_LAST_ID = 2**31 - 1
REDUCTIONS = ("max", "mean")


class BlockRules(NamedTuple):
    """How blocks are chosen.

    Attributes:
        num_columns: most blocks of a query, see `block_columns`.
        block_keys: keys of a chosen block.
        pool_size: positions of a key.
        is_mean: whether the score of a block is the mean of its keys' scores, not the largest.
    """

    top_k: int
    num_columns: int
    block_keys: int
    pool_size: int
    is_mean: bool
    local_blocks: int


@triton.jit
def _ranks(scores, is_forced, blocks):
    """Return int64 ranks, whose order is that of scores, then of falling ids; forced blocks are above all scores."""
    # The bits of negative floats fall as these numbers rise. A score of 0 is never -0 beside one of 0.
    bits = scores.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(is_forced, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - blocks)


@triton.jit(do_not_specialize=["first_token", "num_seqs", "local_blocks", "stride_table_seq"])
def _block_ranks_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    weights_ptr,  # float32 [num_tokens, NUM_HEADS], or None
    key_ptr,  # [num_blocks, KV_BLOCK_SIZE, HEAD_DIM]
    scales_ptr,  # [num_blocks, KV_BLOCK_SIZE, 1], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    out_ptr,  # int64 [tokens of this launch, lists, most_blocks], which the caller fills with _NO_RANK
    first_token,
    num_seqs,
    local_blocks,
    stride_q_token,
    stride_q_head,
    stride_weights_token,
    stride_key_block,
    stride_key_slot,
    stride_scales_block,
    stride_scales_slot,
    stride_table_seq,
    stride_out_token,
    stride_out_list,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,  # keys of a cache block
    POOL_SIZE: tl.constexpr,  # positions of a key
    KEYS: tl.constexpr,  # keys of a chosen block
    PART: tl.constexpr,  # keys of a chosen block that are scored at once, a power of two
    TOGETHER: tl.constexpr,  # chosen blocks that are scored at once
    TILES: tl.constexpr,  # times TOGETHER: chosen blocks of a program
    IS_MEAN: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Score one token's query against TILES * TOGETHER chosen blocks in a program."""
    wait_for_inputs()
    BLOCK_N: tl.constexpr = TOGETHER * PART
    AXIS: tl.constexpr = 2 if weights_ptr is None else 1  # of the keys of a block
    row = tl.program_id(0).to(tl.int64)
    token = row + first_token
    seq, end_key = locate_token(token, num_seqs, cu_seqlens_q_ptr, seq_lens_ptr)
    num_keys = tl.maximum(end_key, 0) // POOL_SIZE
    own = (end_key - 1) // (POOL_SIZE * KEYS)
    is_open = (end_key % POOL_SIZE > 0) & (local_blocks == 0)

    offs_h = tl.arange(0, HEADS_PADDED)
    offs_d = tl.arange(0, DIM_PADDED)
    offs_n = tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, TOGETHER)
    in_dim = offs_d < HEAD_DIM
    q_ptrs = q_ptr + token * stride_q_token + offs_h[:, None] * stride_q_head + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_h < NUM_HEADS)[:, None] & in_dim[None, :], other=0.0)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + token * stride_weights_token + offs_h, mask=offs_h < NUM_HEADS, other=0.0)
    first = tl.program_id(1) * TILES
    last = tl.minimum(first + TILES, tl.where(end_key > 0, own // TOGETHER + 1, 0))
    for tile in range(first, last):
        blocks = tile * TOGETHER + offs_b
        if weights_ptr is None:
            total = tl.full([HEADS_PADDED, TOGETHER], 0.0 if IS_MEAN else float("-inf"), tl.float32)
        else:
            total = tl.full([TOGETHER], 0.0 if IS_MEAN else float("-inf"), tl.float32)
        for part in range(0, KEYS, PART):
            of_block = part + offs_n % PART
            keys = (tile * TOGETHER + offs_n // PART) * KEYS + of_block
            mask = (of_block < KEYS) & (keys < num_keys)
            cache_block = tl.load(
                block_table_ptr + seq * stride_table_seq + keys // KV_BLOCK_SIZE, mask=mask, other=0
            ).to(tl.int64)
            slot = keys % KV_BLOCK_SIZE
            rows = cache_block * stride_key_block + slot * stride_key_slot
            key = tl.load(key_ptr + rows[:, None] + offs_d[None, :], mask=mask[:, None] & in_dim[None, :], other=0)
            if scales_ptr is not None:
                key = decode_e4m3(key, NATIVE_FP8).to(q.dtype)
            scores = dot(q, tl.trans(key), tl.zeros([HEADS_PADDED, BLOCK_N], tl.float32))
            if weights_ptr is not None:
                scores = tl.where(scores < 0, 0.0, scores)  # keeps NaN
                scores = tl.sum(scores * weights[:, None], 0)
            if scales_ptr is not None:
                places = cache_block * stride_scales_block + slot * stride_scales_slot
                scores *= tl.load(scales_ptr + places, mask=mask, other=0.0)
            scores = tl.where(mask, scores, 0.0 if IS_MEAN else float("-inf"))
            if weights_ptr is None:
                scores = scores.reshape(HEADS_PADDED, TOGETHER, PART)
            else:
                scores = scores.reshape(TOGETHER, PART)
            if IS_MEAN:
                total += tl.sum(scores, AXIS)
            else:
                total = tl.maximum(total, tl.max(scores, AXIS))
        counts = tl.minimum(tl.maximum(num_keys - blocks * KEYS, 0), KEYS)
        if IS_MEAN:
            total = tl.div_rn(total, tl.maximum(counts, 1).to(tl.float32) + tl.zeros_like(total))
        is_forced = (blocks <= own) & ((blocks > own - local_blocks) | (is_open & (blocks == own)))
        out_ptrs = out_ptr + row * stride_out_token + blocks
        if weights_ptr is None:
            is_block = is_forced[None, :] | ((counts > 0)[None, :] & (total != float("-inf")))
            ranks = _ranks(total, is_forced[None, :], blocks[None, :])
            list_ptrs = out_ptrs[None, :] + offs_h[:, None] * stride_out_list
            tl.store(list_ptrs, ranks, mask=is_block & (offs_h < NUM_HEADS)[:, None])
        else:
            is_block = is_forced | ((counts > 0) & (total != float("-inf")))
            tl.store(out_ptrs, _ranks(total, is_forced, blocks), mask=is_block)


def _shape(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    weights: torch.Tensor | None,
    block_table: torch.Tensor,
    top_k: int,
    chosen_block_size: int,
    pool_size: int,
    local_blocks: int,
) -> tuple[int, int, int]:
    num_lists = q.shape[1]
    if weights is not None:
        num_lists = 1
    most_blocks = cdiv(block_table.shape[1] * key_cache.shape[1] * pool_size, chosen_block_size)
    return len(q), num_lists, min(block_columns(top_k, pool_size, local_blocks), most_blocks)


def _new_blocks(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    chosen_block_size: int,
    weights: torch.Tensor | None = None,
    pool_size: int = 1,
    local_blocks: int = 1,
    **_: object,
) -> Any:
    shape = _shape(q, key_cache, weights, block_table, top_k, chosen_block_size, pool_size, local_blocks)
    return torch.empty(shape, dtype=torch.int32, device=q.device)


def _run_definition(q: torch.Tensor, key_cache: torch.Tensor, plan: object = None, **options: Any) -> torch.Tensor:
    return latent_definition.choose_blocks(q, key_cache, compute=torch.float32, **options)


@operation(_new_blocks, arguments={"plan": ""})
def choose_blocks(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    chosen_block_size: int,
    weights: torch.Tensor | None = None,
    pool_size: int = 1,
    reduction: str = "max",
    local_blocks: int = 1,
    plan: AttentionPlan | None = None,
) -> Run[torch.Tensor]:
    """Return the blocks of positions with the highest scores of an indexer, for `chosen_blocks` of `paged_attention`.

    A key stands for pool_size positions. A query at position p sees the keys whose positions are all at most p. Without
    weights each head of q has a list of its own by the scores q key (MiniMax-M3). With weights all heads have one list
    by sum_h weights[h] * max(q[h] . key, 0) (DeepSeek-V3.2, Qwen4-Exp). The score of a block is the largest or the mean
    of those of its visible keys, in float32. Of blocks with equal scores, the lowest id is chosen. The host does not
    wait for the device.

    Args:
        q: [num_tokens, num_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous; 1 to 128 heads of
            16 to 256 dimensions.
        key_cache: [num_blocks, block_size, head_dim], or its form of 8 bits, as in `choose_keys`; key i of a sequence
            is of positions i * pool_size to (i + 1) * pool_size - 1.
        block_table: int32 [num_seqs, max_blocks_per_seq], the blocks of keys.
        cu_seqlens_q, seq_lens: as in `paged_attention`, in positions.
        top_k: blocks of a query, at least 1.
        chosen_block_size: positions of a block, 1 to 256, a multiple of pool_size.
        weights: float32 [num_tokens, num_heads], last dimension contiguous; None gives each head a list.
        reduction: "max" or "mean", over the keys of a block.
        local_blocks: the last blocks of a query, its own and those before, are among its top_k whatever their scores.
            If 0, and positions up to the query's own follow its last key, its own block is chosen besides the top_k.
        plan: the step's `AttentionPlan`; layers that share it are bound once a step.

    Returns:
        int32 [num_tokens, num_heads, columns], ascending; with weights [num_tokens, 1, columns]. There are top_k
        columns, one more if pool_size > 1 and local_blocks is 0, and never more than the table has blocks. If a query
        has fewer blocks, the row begins with -1.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    pool_size = as_int("pool_size", pool_size, 1, 256)
    check_tensor("key_cache", key_cache, ("num_blocks", "block_size", "size"))
    check_index(q, weights, key_cache, block_table, cu_seqlens_q, seq_lens, plan, pool_size)
    top_k = as_int("top_k", top_k, 1)
    size = as_int("chosen_block_size", chosen_block_size, 1, 256)
    if size % pool_size:
        raise InvalidInputError(f"chosen_block_size: {size}, expected a multiple of pool_size {pool_size}")
    local_blocks = as_int("local_blocks", local_blocks, 0, top_k)
    if reduction not in REDUCTIONS:
        raise InvalidInputError(f"reduction: {shown(reduction)}, expected 'max' or 'mean'")
    shape = _shape(q, key_cache, weights, block_table, top_k, size, pool_size, local_blocks)
    by_triton = use_triton(q)
    if not by_triton and not takes_numba(q, weights=(weights,)):
        return _run_definition
    _, num_lists, num_columns = shape
    if len(seq_lens) == 0 or 0 in shape:
        return lambda q, *_, **__: torch.full(shape, -1, dtype=torch.int32, device=q.device)
    most_blocks = cdiv(block_table.shape[1] * key_cache.shape[1] * pool_size, size)
    spans = token_spans(len(q), num_lists * most_blocks, _MAX_RANKS)
    if not by_triton:
        from ..cpu.attention.choose_blocks import bind

        rules = BlockRules(top_k, num_columns, size // pool_size, pool_size, reduction == "mean", local_blocks)
        return bind(q, key_cache, weights, block_table, rules, spans, most_blocks)
    block_n, _ = index_tile(q.element_size())
    keys = size // pool_size
    part = min(triton.next_power_of_2(keys), block_n)
    together = block_n // part
    tiles = max(KEYS_PER_PROGRAM // (together * keys), 1)
    launches = SpanLaunches(
        _block_ranks_kernel,
        spans,
        cdiv(most_blocks, tiles * together),
        q,
        weights,
        key_cache,
        block_table,
        local_blocks=local_blocks,
        stride_out_token=num_lists * most_blocks,
        stride_out_list=most_blocks,
        POOL_SIZE=pool_size,
        KEYS=keys,
        PART=part,
        TOGETHER=together,
        TILES=tiles,
        IS_MEAN=reduction == "mean",
    )
    may_be_open = pool_size > 1 and local_blocks == 0

    def run(
        q: torch.Tensor,
        key_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        weights: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        chosen = torch.empty(shape, dtype=torch.int32, device=q.device)
        tensors = {
            "q": q,
            "weights": weights,
            "block_table": block_table,
            "cu_seqlens_q": cu_seqlens_q,
            "seq_lens": seq_lens,
        }
        for span, ranks in launches.results(tensors, key_cache, (num_lists, most_blocks), _NO_RANK):
            best = ranks.topk(num_columns).values  # falling
            ids = _LAST_ID - (best & (2**32 - 1))
            is_open = torch.zeros(len(ranks), 1, dtype=torch.bool, device=q.device)
            if may_be_open:
                # An open block is the first: no score has its rank.
                is_open = (best[:, 0, :1] >> 32) == _LAST_ID
            chosen[span] = listed_blocks(ids, best != _NO_RANK, is_open, top_k).sort().values
        return chosen

    return run
