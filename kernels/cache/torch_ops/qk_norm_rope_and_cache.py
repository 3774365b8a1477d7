"""Query and key norm, rotary embedding and cache write in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.cache.torch_ops.reshape_and_cache import reshape_and_cache
from paged.kernels.cache.write import CacheWrite
from paged.kernels.common.torch_ops.rms_norm import rms_norm
from paged.kernels.common.torch_ops.rotary_embedding import rotary_embedding


def qk_norm_rope_and_cache(
    q: torch.Tensor,
    write: CacheWrite,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    *,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """PyTorch implementation of `kernels.cache.qk_norm_rope_and_cache`: float32 inside, each result rounded once."""
    wide = torch.cat((q, write.key), 1).float()
    wide_q, wide_k = wide.split((q.shape[1], write.key.shape[1]), 1)
    if q_weight is not None and k_weight is not None:
        rms_norm(wide_q, None, q_weight, wide_q, eps=eps)
        rms_norm(wide_k, None, k_weight, wide_k, eps=eps)
    rotary_embedding(positions, wide, None, cos_sin_cache, interleaved=interleaved)
    reshape_and_cache(write._replace(key=wide_k))
    return q.copy_(wide_q)
