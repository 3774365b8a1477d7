"""FlashAttention 4's functions (`flash_attn.cute`) with its order of arguments, the same as in `flash_attention`.

Both return (out, lse), lse None unless return_lse.
"""

from __future__ import annotations

from typing import Any

import torch

from paged.interop.attention import attend
from paged.interop.flash_attention import Window, given_arguments

Result = tuple[torch.Tensor, torch.Tensor | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: None = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    block_sparse_tensors: None = None,
    block_sparse_tensors_bwd: None = None,
    return_lse: bool = False,
    **others: Any,
) -> Result:
    """Attention of sequences of one length."""
    attention = attend("flash_attn_func", given_arguments(locals()))
    return attention.out, attention.lse


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    block_sparse_tensors: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    return_lse: bool = False,
    **others: Any,
) -> Result:
    """Attention of sequences of different lengths.

    q and k may also be [batch, seqlen, num_heads, head_dim], without their cu_seqlens. The longest lengths are all rows
    where not given.
    """
    attention = attend("flash_attn_varlen_func", given_arguments(locals()))
    return attention.out, attention.lse
