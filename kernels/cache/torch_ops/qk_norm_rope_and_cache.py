"""Query and key norm, rotary embedding and cache write in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.cache.torch_ops.reshape_and_cache import reshape_and_cache
from paged.kernels.common.torch_ops.rms_norm import rms_norm
from paged.kernels.common.torch_ops.rotary_embedding import rotary_embedding


def qk_norm_rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Twin of `kernels.cache.qk_norm_rope_and_cache`: float32 inside, each result rounded once."""
    wide = torch.cat((q, k), 1).float()
    wide_q, wide_k = wide.split((q.shape[1], k.shape[1]), 1)
    if q_weight is not None and k_weight is not None:
        rms_norm(wide_q, q_weight, eps, out=wide_q)
        rms_norm(wide_k, k_weight, eps, out=wide_k)
    rotary_embedding(positions, wide, None, cos_sin_cache, interleaved=interleaved)
    reshape_and_cache(wide_k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q.copy_(wide_q)
