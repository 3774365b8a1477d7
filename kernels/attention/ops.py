"""Attention as custom ops."""

from __future__ import annotations

from typing import Any

import torch

from paged.kernels.common.custom_ops import CACHE_SCALES, define, like_the_first, ops

__all__ = ["ops"]

_SEQUENCES = "Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, SymInt max_seqlen_q, float? softmax_scale=None"
_ATTENTION = (
    f"Tensor q, Tensor k_cache, Tensor v_cache, {{}}{_SEQUENCES}, bool causal=True, Tensor? is_causal=None, "
    "SymInt[] window_size=[-1, -1], float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    f"{CACHE_SCALES}, Tensor? mask=None, bool deterministic=False, SymInt attention_chunk_size=0"
)


def _with_lse(arguments: dict[str, Any]) -> None:
    arguments["return_lse"] = True
    if (flags := arguments.pop("is_causal", None)) is not None:
        arguments["causal"] = flags


def _lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)


@define("paged_attention", "paged.kernels.attention.paged_attention", _ATTENTION.format(""), "(Tensor out, Tensor lse)",
        prepare=_with_lse)  # fmt: skip
@define("cascade_attention", "paged.kernels.attention.cascade_attention",
        f"Tensor q, Tensor k_cache, Tensor v_cache, SymInt shared_prefix_len, {_SEQUENCES}, float softcap=0.0, "
        f"Tensor? sinks=None, {CACHE_SCALES}, Tensor? mask=None, bool deterministic=False",
        "(Tensor out, Tensor lse)", prepare=_with_lse)  # fmt: skip
def _attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype, device=q.device), _lse(q)


@define(
    "paged_attention_out",
    "paged.kernels.attention.paged_attention",
    _ATTENTION.format("Tensor(a!) out, "),
    "Tensor lse",
    mutates=("out",),
    prepare=_with_lse,
    results=lambda both: both[1],
)
def _attention_out(q: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return _lse(q)


@define("merge_attn_states", "paged.kernels.attention.merge_attn_states",
        "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b", "(Tensor out, Tensor lse)")  # fmt: skip
def _merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return like_the_first(out_a), like_the_first(lse_a)
