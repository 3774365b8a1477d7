"""The checked arguments of one paged attention call, as both implementations take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of `kernels.paged_attention.paged_attention`, checked and with their defaults filled in."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    out: torch.Tensor
    lse: torch.Tensor | None
