"""FlashAttention 4's functions (`flash_attn.cute`) with its order of arguments; see `flash_attention` for them.

Both functions return (out, lse); lse is None unless return_lse. None in window_size means no limit. Negative numbers
are edges: with (None, -2), a query sees keys up to two positions before its own. If the sum of both is negative, there
is no limit. With causal, the right edge is 0.
"""

from __future__ import annotations

from typing import Any

import torch

from paged.interop.arguments import takes
from paged.interop.attention import attend
from paged.interop.flash_attention_3 import flash_attn_combine as flash_attn_combine

Result = tuple[torch.Tensor, torch.Tensor | None]


@takes("q k v", lambda
    qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
    learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
    block_sparse_tensors_bwd=None, return_lse=False: None
)  # fmt: skip
def flash_attn_func(arguments: dict[str, Any]) -> Result:
    """Compute attention of sequences of equal length."""
    return attend("flash_attn_func", arguments, has_negative_edges=True)


@takes("q k v", lambda
    qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False: None
)  # fmt: skip
def flash_attn_varlen_func(arguments: dict[str, Any]) -> Result:
    """Compute attention of sequences of different lengths.

    q and k may also be [batch, seqlen, num_heads, head_dim] without cu_seqlens. A maximum length of None means all
    rows.
    """
    return attend("flash_attn_varlen_func", arguments, has_negative_edges=True)


def get_scheduler_metadata(*args: Any, **named: Any) -> None:
    """Return None for scheduler_metadata, because nothing is scheduled in advance here."""
