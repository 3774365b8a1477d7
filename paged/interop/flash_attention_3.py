"""FlashAttention 3's functions with its order of arguments; what they take and compute is said in `flash_attention`."""

from __future__ import annotations

from typing import Any

import torch

from paged.interop.arguments import ordered
from paged.interop.attention import Attention, attend, attend_with_cache
from paged.interop.flash_attention import PACKED

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None, None]
_SCALE = {"softmax_scale": None, "causal": False}
_DESCALE: dict[str, Any] = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
_LIMITS = {"window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
_LAST = {"sm_margin": 0, "return_attn_probs": False}
_OPTIONS = (
    _SCALE | {"qv": None} | _DESCALE | _LIMITS | {"num_splits": 1, "pack_gqa": None, "deterministic": False} | _LAST
)


@ordered("q k v", _OPTIONS)
def flash_attn_func(given: dict[str, Any]) -> Result:
    """Attention of sequences of one length; with return_attn_probs (out, lse)."""
    return _result(attend("flash_attn_func", given))


@ordered("qkv", _SCALE | _DESCALE | _LIMITS | {"deterministic": False, "num_heads_q": None} | _LAST)
def flash_attn_qkvpacked_func(given: dict[str, Any]) -> Result:
    """The same with qkv [batch, seqlen, 3, num_heads, head_dim].

    With num_heads_q [batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim], the queries' heads first.
    """
    return _result(attend("flash_attn_qkvpacked_func", given, "qkv"))


@ordered(f"q k v {' '.join(PACKED)}", {"seqused_q": None, "seqused_k": None} | _OPTIONS)
def flash_attn_varlen_func(given: dict[str, Any]) -> Result:
    """Attention of sequences of different lengths; with return_attn_probs (out, lse)."""
    return _result(attend("flash_attn_varlen_func", given, *PACKED))


@ordered(
    "q k_cache v_cache",
    dict.fromkeys(("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"))
    | dict.fromkeys(("page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens"))
    | _DESCALE
    | _SCALE
    | _LIMITS
    | {"rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0}
    | {"return_softmax_lse": False},
)
def flash_attn_with_kvcache(given: dict[str, Any]) -> Result:
    """Attention to a cache, after new keys are added to it.

    Returns:
        out; with return_softmax_lse (out, lse, None, None), as there, where the last two are partial results.
    """
    attention = attend_with_cache("flash_attn_with_kvcache", given)
    return attention.out if attention.lse is None else (attention.out, attention.lse, None, None)


def _result(attention: Attention) -> Result:
    return attention.out if attention.lse is None else (attention.out, attention.lse)
