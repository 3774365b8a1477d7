"""Choose the keys that each query attends to in sparse attention: an indexer's scores, and the best of them."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.latent_cache import index_cache_parts
from ..core.checks import check_is_tensor, check_last_dim_contiguous, check_tensor
from ..core.compat import dot, tl, triton
from ..core.device import takes_numba, use_triton
from ..core.dtypes import decode_e4m3
from ..core.errors import as_int
from ..core.launch import strides, wait_for_inputs
from ..core.operation import Run, operation
from . import latent_definition
from .index_spans import KEYS_PER_PROGRAM, SpanLaunches, check_index, index_tile, token_spans
from .keys import NO_LIMIT
from .latent_definition import best_keys
from .plan import AttentionPlan

# Most float32 scores in memory at once: a step of 1,024 tokens over 128k keys.
_MAX_SCORES = 1 << 27


@triton.jit
def locate_token(token, num_seqs, cu_seqlens_q_ptr, seq_lens_ptr):
    """Return a token's sequence (int64), and one past the last position that it sees (int32), 0 for padding."""
    low = num_seqs * 0
    high = low + num_seqs
    while low < high:  # finds the last sequence that begins at or before the token
        middle = (low + high) // 2
        begins = tl.load(cu_seqlens_q_ptr + middle + 1) <= token
        low = tl.where(begins, middle + 1, low)
        high = tl.where(begins, high, middle)
    seq = tl.minimum(low, num_seqs - 1).to(tl.int64)
    # A row of padding comes after every sequence and sees no key.
    end_key = (tl.load(seq_lens_ptr + seq) - tl.load(cu_seqlens_q_ptr + seq + 1) + token + 1).to(tl.int32)
    return seq, tl.where(low < num_seqs, end_key, 0)


@triton.jit(do_not_specialize=["first_token", "num_seqs", "num_candidates", "stride_table_seq"])
def _index_scores_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    weights_ptr,  # float32 [num_tokens, NUM_HEADS]
    key_ptr,  # [num_blocks, KV_BLOCK_SIZE, HEAD_DIM]
    scales_ptr,  # [num_blocks, KV_BLOCK_SIZE, 1], or None
    block_table_ptr,  # [num_seqs, max_blocks_per_seq]
    cu_seqlens_q_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs]
    candidates_ptr,  # [num_tokens, num_candidates], or None for all keys
    out_ptr,  # float32 [tokens of this launch, max_keys, or keys of candidates], which the caller fills with -inf
    first_token,
    num_seqs,
    num_candidates,
    stride_q_token,
    stride_q_head,
    stride_weights_token,
    stride_key_block,
    stride_key_slot,
    stride_scales_block,
    stride_scales_slot,
    stride_table_seq,
    stride_candidates_token,
    stride_out_token,
    NUM_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of BLOCK_N keys in a program
    POOL_SIZE: tl.constexpr,  # positions of a key
    CANDIDATE_SIZE: tl.constexpr,  # keys of a candidate
    NATIVE_FP8: tl.constexpr,
):
    """Score one token's query against BLOCKS blocks of keys in a program."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    token = row + first_token
    seq, end_key = locate_token(token, num_seqs, cu_seqlens_q_ptr, seq_lens_ptr)
    end_key = end_key // POOL_SIZE

    offs_h = tl.arange(0, HEADS_PADDED)
    offs_d = tl.arange(0, DIM_PADDED)
    in_dim = offs_d < HEAD_DIM
    q_ptrs = q_ptr + token * stride_q_token + offs_h[:, None] * stride_q_head + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_h < NUM_HEADS)[:, None] & in_dim[None, :], other=0.0)
    weights = tl.load(weights_ptr + token * stride_weights_token + offs_h, mask=offs_h < NUM_HEADS, other=0.0)
    first = tl.program_id(1) * BLOCKS
    num_columns = end_key
    if candidates_ptr is not None:
        num_columns = num_candidates * CANDIDATE_SIZE
    last = tl.minimum(first + BLOCKS, (num_columns + BLOCK_N - 1) // BLOCK_N)
    for index in range(first, last):
        columns = index * BLOCK_N + tl.arange(0, BLOCK_N)
        keys = columns
        if candidates_ptr is not None:
            candidate_ptrs = candidates_ptr + token * stride_candidates_token + columns // CANDIDATE_SIZE
            candidates = tl.load(candidate_ptrs, mask=columns < num_columns, other=-1)
            keys = tl.where(candidates < 0, end_key, candidates * CANDIDATE_SIZE + columns % CANDIDATE_SIZE)
        mask = keys < end_key
        block = tl.load(block_table_ptr + seq * stride_table_seq + keys // KV_BLOCK_SIZE, mask=mask, other=0)
        block = block.to(tl.int64)
        slot = keys % KV_BLOCK_SIZE
        rows = block * stride_key_block + slot * stride_key_slot
        key = tl.load(key_ptr + rows[:, None] + offs_d[None, :], mask=mask[:, None] & in_dim[None, :], other=0)
        if scales_ptr is not None:
            key = decode_e4m3(key, NATIVE_FP8).to(q.dtype)
        products = dot(q, tl.trans(key), tl.zeros([HEADS_PADDED, BLOCK_N], tl.float32))
        products = tl.where(products < 0, 0.0, products)  # keeps NaN
        scores = tl.sum(products * weights[:, None], 0)
        if scales_ptr is not None:
            scores *= tl.load(
                scales_ptr + block * stride_scales_block + slot * stride_scales_slot, mask=mask, other=0.0
            )
        tl.store(out_ptr + row * stride_out_token + columns, scores, mask=mask)


def _new_indices(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    top_k: int,
    candidates: torch.Tensor | None = None,
    candidate_size: int = 1,
    **_: object,
) -> Any:
    columns = min(top_k, _num_columns(q, key_cache, block_table, candidates, candidate_size))
    return torch.empty((len(q), columns), dtype=torch.int32, device=q.device)


def _num_columns(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    candidates: torch.Tensor | None,
    candidate_size: int,
) -> int:
    """Return the number of scores of a query: those of all keys that the table has, or of its candidates."""
    if candidates is not None:
        return candidates.shape[1] * candidate_size
    keys, _ = index_cache_parts(key_cache, q.shape[2])
    return block_table.shape[1] * keys.shape[1]


def _run_definition(
    q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, plan: object = None, **options: Any
) -> torch.Tensor:
    return latent_definition.choose_keys(q, weights, key_cache, compute=torch.float32, **options)


@operation(_new_indices, arguments={"plan": ""})
def choose_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: int,
    pool_size: int = 1,
    candidates: torch.Tensor | None = None,
    candidate_size: int = 1,
    plan: AttentionPlan | None = None,
) -> Run[torch.Tensor]:
    """Return the keys with the highest scores of an indexer, for `indices` of attention.

    The score of a query and a key is sum_h weights[h] * max(q[h] . key, 0) (DeepSeek-AI, "DeepSeek-V3.2", 2025, eq. 1),
    in float32. A query at position p sees the keys s < (p + 1) // pool_size. The host does not wait for the device.

    Args:
        q: [num_tokens, num_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous; 1 to 128 heads of
            16 to 256 dimensions.
        weights: float32 [num_tokens, num_heads], last dimension contiguous.
        key_cache: [num_blocks, block_size, head_dim] in the dtype of q; or uint8 [num_blocks, block_size, head_dim +
            4]: e4m3 numbers, then a float32 that multiplies them; or uint8 [num_blocks, block_size * (head_dim + 4)],
            the form of DeepGEMM, vLLM and SGLang: the numbers of all keys of a block, then their float32 scales. See
            `write_index_keys`.
        block_table, cu_seqlens_q, seq_lens: as in `paged_mla_attention`.
        top_k: keys of a query, at least 1.
        pool_size: positions of a key, at least 1: 1 for `paged_mla_attention`, more for entries of
            `paged_compressed_attention`, of which those of closed pools count.
        candidates: int32 [num_tokens, columns], last dimension contiguous: blocks of candidate_size keys that each
            query chooses from (DeepSeek-V4.1, 2026), distinct and ascending, and -1 for none: as `choose_blocks`
            returns them. Only their keys are read. None for all keys.
        candidate_size: keys of a candidate, 1 to 256.
        plan: the step's `AttentionPlan`; layers that share it are bound once a step.

    Returns:
        int32 [num_tokens, min(top_k, max_blocks_per_seq * block_size)], or with candidates [num_tokens, min(top_k,
        columns * candidate_size)], ascending. If a query has fewer keys, the row begins with -1.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    check_is_tensor("weights", weights)
    top_k, pool_size = as_int("top_k", top_k, 1), as_int("pool_size", pool_size, 1, NO_LIMIT)
    check_index(q, weights, key_cache, block_table, cu_seqlens_q, seq_lens, plan, pool_size)
    candidate_size = as_int("candidate_size", candidate_size, 1, 256)
    if candidates is not None:
        check_tensor("candidates", candidates, (len(q), "columns"), (torch.int32,), q.device)
        check_last_dim_contiguous("candidates", candidates)
    num_columns = _num_columns(q, key_cache, block_table, candidates, candidate_size)
    shape = len(q), min(top_k, num_columns)
    by_triton = use_triton(q)
    if not by_triton and (key_cache.dim() == 2 or not takes_numba(q, weights=(weights,))):
        return _run_definition
    if len(seq_lens) == 0 or 0 in shape:
        return lambda q, *_, **__: torch.full(shape, -1, dtype=torch.int32, device=q.device)
    if not by_triton:
        from ..cpu.attention.choose_blocks import bind_keys

        # Scores of candidates lie at the places of their keys.
        spans = token_spans(len(q), _num_columns(q, key_cache, block_table, None, 1), _MAX_SCORES)
        return bind_keys(q, key_cache, weights, block_table, pool_size, shape[1], spans, candidates, candidate_size)
    spans = token_spans(len(q), num_columns, _MAX_SCORES)
    block_n, _ = index_tile(q.element_size())
    launches = SpanLaunches(
        _index_scores_kernel,
        spans,
        triton.cdiv(num_columns, KEYS_PER_PROGRAM),
        q,
        weights,
        key_cache,
        block_table,
        **strides("token", candidates=candidates),
        num_candidates=num_columns // candidate_size,
        stride_out_token=num_columns,
        BLOCK_N=block_n,
        POOL_SIZE=pool_size,
        CANDIDATE_SIZE=candidate_size,
        BLOCKS=KEYS_PER_PROGRAM // block_n,
    )

    def run(
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        *,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        candidates: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        indices = torch.empty(shape, dtype=torch.int32, device=q.device)
        tensors = {
            "q": q,
            "weights": weights,
            "block_table": block_table,
            "cu_seqlens_q": cu_seqlens_q,
            "seq_lens": seq_lens,
            "candidates": candidates,
        }
        for span, scores in launches.results(tensors, key_cache, (num_columns,), float("-inf")):
            columns = best_keys(scores, shape[1])
            if candidates is not None:
                columns = _keys_of_candidates(columns, candidates[span], candidate_size)
            indices[span] = columns
        return indices

    return run


def _keys_of_candidates(columns: torch.Tensor, candidates: torch.Tensor, size: int) -> torch.Tensor:
    """Return the keys at columns of all candidates' keys, int32 [n, k]; -1 for -1."""
    blocks = candidates.gather(1, columns.clamp(min=0) // size)
    return torch.where(columns < 0, -1, blocks * size + columns % size)
