"""Attention over a paged cache of latents (MLA): prompts, chunks, decode steps and verify rows in one call."""

from __future__ import annotations

import torch

from ..cache.latent_cache import check_latent_cache, check_latent_scale
from ..core.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_last_dim_contiguous,
    check_sequences_fit,
    check_strided_out,
    check_tensor,
)
from ..core.device import use_triton
from ..core.errors import InvalidInputError, as_bool, as_float, as_int
from ..core.operation import Run, operation
from . import launches, without_triton
from .call import MlaCall, bind_steps, checked_window, returned_results
from .keys import NO_LIMIT
from .plan import AttentionPlan


def _new_output(q: torch.Tensor, v_head_dim: int, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for out and lse."""
    out = torch.empty(*q.shape[:2], v_head_dim, dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)


@operation(
    _new_output,
    results="Tensor out, Tensor lse",
    arguments={"plan": "", "return_lse": ""},
    decode=lambda arguments: arguments.update(return_lse=True),
    finish=returned_results,
    step="plan",
)
def paged_mla_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    v_head_dim: int,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Run[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Compute multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) over a paged cache of latents.

    A cached row is one token's latent and its rotated dimensions, shared by all heads. It is the key, and its first
    v_head_dim numbers are the value. Queries have the up-projection of keys absorbed; multiply the result by that of
    values. The other rules are those of `paged_attention`: scores, softmax and sums are float32, query i of n has
    position seq_len - n + i, and a row that sees no key gives 0 and a log-sum-exp of -inf, or with sinks that of the
    sink.

    Args:
        q: [num_tokens, num_heads, latent + rope], float32, float16 or bfloat16, last dimension contiguous. Rows beyond
            cu_seqlens_q[-1] are padding and give 0 and -inf.
        kv_cache: [num_blocks, block_size, latent + rope] of the dtype of q or float8_e4m3fn; or uint8 [num_blocks,
            block_size, bytes], a form of FlashMLA and vLLM. 656 bytes: 512 e4m3 latents, 4 float32 scales of 128
            latents each, 64 bfloat16 rotated dimensions. 352 bytes: 512 e2m1 latents, two a byte, 64 e4m3 rotated
            dimensions, 32 e4m3 scales of 16 latents each, that of group g in byte 8 (g % 4) + g // 4. Last dimension
            contiguous.
        v_head_dim: size of the latent, a multiple of 16 up to 1024. The rest of a row is one up to 512, or 0.
        block_table: int32 [num_seqs, max_blocks_per_seq]. Entries beyond a sequence's last block are never read.
        cu_seqlens_q: int32 [num_seqs + 1], query offsets, rising from 0.
        seq_lens: int32 [num_seqs], lengths in the cache, new tokens included.
        max_seqlen_q: upper bound of the longest query. On a GPU lengths are not checked: without indices, a sequence
            with more queries, and all after it, give 0 and -inf.
        softmax_scale: 0 to 1e30; the head size before absorption decides it, so there is no default.
        causal: whether position i sees only positions <= i.
        window_size: (left, right), positions seen on each side besides the own one; -1 for no limit. Blocks before the
            windows of all queries are not read. Not together with indices.
        sinks: [num_heads], any float dtype: the score of one more key with value 0, not scaled.
        k_scale: float32, one value that a float8_e4m3fn cache is multiplied by.
        indices: int32 [num_tokens, k], positions in the sequence; -1 for none. A query sees these positions alone
            (DeepSeek-V3.2, 2025), and of them those that `causal` and the length allow. Each entry counts, so
            positions should be distinct.
        plan: the step's `AttentionPlan`, to share between layers; None makes one for this call.
        out: [num_tokens, num_heads, v_head_dim], dtype of q, last dimension contiguous; None makes one.
        return_lse: whether to also return the log-sum-exp.
        deterministic: whether a sequence's results have the same bits in every batch.

    Returns:
        out; with return_lse (out, lse), lse float32 [num_heads, num_tokens], the natural log-sum-exp of the scores.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient, or latents above 512 are float32 on a GPU that lacks the
            shared memory.
    """
    v_head_dim = as_int("v_head_dim", v_head_dim, 1)
    check_tensor("q", q, ("num_tokens", "num_heads", "latent + rope"))
    check_strided_out(out, (*q.shape[:2], v_head_dim), q)
    window_left, window_right = checked_window(window_size)
    if indices is not None and (window_left, window_right) != (NO_LIMIT, NO_LIMIT):
        raise InvalidInputError(f"window_size: {window_size} with indices, expected (-1, -1)")
    causal = as_bool("causal", causal)
    if causal:
        window_right = 0
    call = MlaCall(
        q=q,
        kv_cache=kv_cache,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        max_seqlen_q=as_int("max_seqlen_q", max_seqlen_q),
        sinks=sinks,
        k_scale=k_scale,
        indices=indices,
        v_head_dim=v_head_dim,
        softmax_scale=as_float("softmax_scale", softmax_scale, 0.0, 1e30),
        causal=causal,
        window=(window_left, window_right),
        deterministic=as_bool("deterministic", deterministic),
        return_lse=as_bool("return_lse", return_lse),
        out=out,
    )
    _check_tensors(call)
    return bind_steps(call, launches.bind_latent if use_triton(q) else without_triton.bind_latent)


def _check_tensors(call: MlaCall) -> None:
    """Raise InvalidInputError unless the tensors fit together."""
    q, kv_cache = call.q, call.kv_cache
    check_tensor("q", q, ("num_tokens", "num_heads", "latent + rope"), FLOAT_DTYPES)
    check_last_dim_contiguous("q", q)
    size = check_latent_cache(kv_cache, call.v_head_dim, q.dtype)
    check_tensor("q", q, ("num_tokens", "num_heads", size), (q.dtype,), kv_cache.device)
    if q.shape[1] == 0:
        raise InvalidInputError("q: 0 heads, expected at least 1")
    check_sequences_fit(call.block_table, call.cu_seqlens_q, call.seq_lens, q.device)
    if call.sinks is not None:
        check_tensor("sinks", call.sinks, (q.shape[1],), FLOAT_DTYPES, q.device)
    check_latent_scale("k_scale", call.k_scale, kv_cache)
    if call.indices is not None:
        check_choice("indices", call.indices, (len(q), "k"), q, "key")
