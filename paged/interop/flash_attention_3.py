"""FlashAttention 3's functions, with its order of arguments; `flash_attention` describes them.

With the log-sum-exp the result is (out, lse).
"""

from __future__ import annotations

from typing import Any

import torch

from paged.interop.arguments import takes
from paged.interop.attention import attend

Result = torch.Tensor | tuple[torch.Tensor | None, ...]


@takes("q k v", lambda
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False: None
)  # fmt: skip
def flash_attn_func(given: dict[str, Any]) -> Result:
    """Attention of sequences of one length."""
    return _attend("flash_attn_func", given)


@takes("qkv", lambda
    softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False: None
)  # fmt: skip
def flash_attn_qkvpacked_func(given: dict[str, Any]) -> Result:
    """`flash_attn_func` with qkv [batch, seqlen, 3, num_heads, head_dim]; num_heads_q is None."""
    return _attend("flash_attn_qkvpacked_func", given)


@takes("q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k", lambda
    seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, sm_margin=0, return_attn_probs=False: None
)  # fmt: skip
def flash_attn_varlen_func(given: dict[str, Any]) -> Result:
    """Attention of sequences of different lengths."""
    return _attend("flash_attn_varlen_func", given)


@takes("q k_cache v_cache", lambda
    k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
    rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
    num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False: None
)  # fmt: skip
def flash_attn_with_kvcache(given: dict[str, Any]) -> Result:
    """Attention to a KV cache, after new keys and values are written to it.

    Returns:
        out; with return_softmax_lse (out, lse, None, None). FlashAttention 3 has partial results in the last two
        places.
    """
    return _attend("flash_attn_with_kvcache", given, None, None)


def _attend(function: str, given: dict[str, Any], *partial: None) -> Result:
    out, lse = attend(function, given)
    return out if lse is None else (out, lse, *partial)
