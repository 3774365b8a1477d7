"""Attention over a window of positions and compressed entries of all earlier ones, in one softmax."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.latent_cache import check_rows
from ..core.checks import (
    FLOAT_DTYPES,
    MAX_HEAD_DIM,
    check_choice,
    check_dtype,
    check_last_dim_contiguous,
    check_sequences_fit,
    check_strided_out,
    check_tensor,
)
from ..core.device import use_triton
from ..core.errors import InvalidInputError, as_bool, as_float, as_int
from ..core.operation import Run, operation
from . import compressed_launches, without_triton
from .call import CompressedCall, bind_steps, returned_results
from .keys import NO_LIMIT
from .plan import AttentionPlan, outputs


def _new_output(q: torch.Tensor, **_: object) -> Any:
    """Return empty tensors for out and lse."""
    return outputs(q, q.shape[2], None, return_lse=True)


@operation(
    _new_output,
    results="Tensor out, Tensor lse",
    arguments={"plan": "", "return_lse": ""},
    decode=lambda arguments: arguments.update(return_lse=True),
    finish=returned_results,
    step="plan",
)
def paged_compressed_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    entry_cache: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    sliding_window: int,
    entry_table: torch.Tensor | None = None,
    pool_size: int = 1,
    indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Run[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Compute causal attention over a window and over compressed entries (DeepSeek-AI, "DeepSeek-V4", 2026).

    A query at position p sees the rows of positions p - sliding_window + 1 to p, and entries s < (p + 1) // pool_size:
    all of them (heavily compressed attention), or those of `indices` (compressed sparse attention). Both stand in one
    softmax. A row is key and value of all heads. The other rules are those of `paged_mla_attention`.

    Args:
        q: [num_tokens, num_heads, head_dim], float32, float16 or bfloat16, last dimension contiguous; head_dim is a
            multiple of 16 up to 512. Rows beyond cu_seqlens_q[-1] are padding and give 0 and -inf.
        kv_cache: [num_blocks, block_size, head_dim], dtype of q; or uint8 [num_blocks, block_size, 584, 528 or 384],
            records of a head_dim of 512: see `kernels.cache.latent_cache.RecordForm`. Last dimension contiguous.
        entry_cache: [num_entry_blocks, entries of a block, size], of the same dtype and size; entry s pools the
            positions from s * pool_size on. None for a layer with a window alone.
        block_table: int32 [num_seqs, max_blocks_per_seq]. Blocks before the windows of all queries are not read.
        cu_seqlens_q: int32 [num_seqs + 1], query offsets, rising from 0.
        seq_lens: int32 [num_seqs], positions in the cache, new tokens included.
        max_seqlen_q: upper bound of the longest query.
        softmax_scale: 0 to 1e30.
        sliding_window: positions that a query sees, its own included; at least 1.
        entry_table: int32 [num_seqs, max_entry_blocks_per_seq], blocks of entry_cache; given with entry_cache.
        pool_size: positions of an entry, at least 1.
        indices: int32 [num_tokens, k], entries of the sequence; -1 for none. Each counts, so they should be distinct.
        sinks: [num_heads], any float dtype: the score of one more key with value 0, not scaled.
        cos_sin_cache: float32 [max_position, rotary_dim], last dimension contiguous: rotary_dim / 2 cosines, then as
            many sines; rotary_dim is a power of two that divides head_dim. The last rotary_dim numbers of the output
            are rotated back, by the negative angles of the query's position: pairs of neighbours, in float32, before
            the output is rounded. None for no rotation.
        plan: the step's `AttentionPlan`, to share between layers; None makes one for this call.
        out: [num_tokens, num_heads, head_dim], dtype of q, last dimension contiguous; None makes one.
        return_lse: whether to also return the log-sum-exp.
        deterministic: whether a sequence's results have the same bits in every batch.

    Returns:
        out; with return_lse (out, lse), lse float32 [num_heads, num_tokens], the natural log-sum-exp of the scores.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit. On a GPU, positions beyond cos_sin_cache are
            checked only with PAGED_CHECK=1.
        UnsupportedError: an argument requires a gradient.
    """
    check_tensor("q", q, ("num_tokens", "num_heads", "head_dim"), FLOAT_DTYPES)
    check_last_dim_contiguous("q", q)
    if q.shape[1] == 0:
        raise InvalidInputError("q: 0 heads, expected at least 1")
    check_strided_out(out, q.shape, q)
    call = CompressedCall(
        q=q,
        kv_cache=kv_cache,
        entry_cache=entry_cache,
        block_table=block_table,
        entry_table=entry_table,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        indices=indices,
        sinks=sinks,
        cos_sin_cache=cos_sin_cache,
        softmax_scale=as_float("softmax_scale", softmax_scale, 0.0, 1e30),
        sliding_window=as_int("sliding_window", sliding_window, 1, NO_LIMIT),
        pool_size=as_int("pool_size", pool_size, 1, NO_LIMIT),
        deterministic=as_bool("deterministic", deterministic),
        return_lse=as_bool("return_lse", return_lse),
        out=out,
    )
    check_rows("kv_cache", kv_cache, q)
    head_dim = q.shape[2]
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise InvalidInputError(f"q: head_dim {head_dim}, expected a multiple of 16 from 16 to {MAX_HEAD_DIM}")
    check_sequences_fit(block_table, cu_seqlens_q, seq_lens, q.device)
    _check_entries(call)
    if sinks is not None:
        check_tensor("sinks", sinks, (q.shape[1],), FLOAT_DTYPES, q.device)
    if cos_sin_cache is not None:
        _check_rotary(cos_sin_cache, q)
    return bind_steps(call, compressed_launches.bind if use_triton(q) else without_triton.bind_compressed)


def _check_entries(call: CompressedCall) -> None:
    """Raise InvalidInputError unless the entries, their table and the choice fit together."""
    q, kv_cache, entry_cache, entry_table = call.q, call.kv_cache, call.entry_cache, call.entry_table
    if entry_cache is None:
        for name, tensor in (("entry_table", entry_table), ("indices", call.indices)):
            if tensor is not None:
                raise InvalidInputError(f"{name}: given without entry_cache, expected None")
        return
    if entry_table is None:
        raise InvalidInputError("entry_table: None with entry_cache, expected int32 [num_seqs, blocks of entries]")
    check_rows("entry_cache", entry_cache, q)
    check_dtype("entry_cache", entry_cache, kv_cache.dtype)
    check_tensor("entry_cache", entry_cache, (*entry_cache.shape[:2], kv_cache.shape[2]))
    table_shape = len(call.seq_lens), "max_entry_blocks_per_seq"
    check_tensor("entry_table", entry_table, table_shape, (torch.int32,), q.device)
    check_last_dim_contiguous("entry_table", entry_table)
    if call.indices is not None:
        check_choice("indices", call.indices, (len(q), "k"), q, "entry")


def _check_rotary(cos_sin_cache: torch.Tensor, q: torch.Tensor) -> None:
    check_tensor("cos_sin_cache", cos_sin_cache, ("max_position", "rotary_dim"), (torch.float32,), q.device)
    check_last_dim_contiguous("cos_sin_cache", cos_sin_cache)
    rotary_dim, head_dim = cos_sin_cache.shape[1], q.shape[2]
    is_power_of_two = rotary_dim & (rotary_dim - 1) == 0
    if rotary_dim < 2 or not is_power_of_two or head_dim % rotary_dim:
        raise InvalidInputError(
            f"cos_sin_cache: rotary_dim {rotary_dim}, expected a power of two from 2 that divides {head_dim}"
        )
