"""Query and key norm and rotary embedding in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.common.torch_ops.rms_norm import rms_norm
from paged.kernels.common.torch_ops.rotary_embedding import rotary_embedding


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    *,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k of `kernels.cache.qk_norm_rope_and_cache`, float32 and new."""
    wide = torch.cat((q, k), 1).float()
    wide_q, wide_k = wide.split((q.shape[1], k.shape[1]), 1)
    if q_weight is not None and k_weight is not None:
        rms_norm(wide_q, None, q_weight, wide_q, eps=eps)
        rms_norm(wide_k, None, k_weight, wide_k, eps=eps)
    rotary_embedding(positions, wide, None, cos_sin_cache, interleaved=interleaved)
    return wide_q, wide_k
