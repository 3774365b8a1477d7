"""Rotary embedding in PyTorch."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Twin of `kernels.rotary_embedding.rotary_embedding`: query and key change in place."""
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    half = rotary_dim // 2
    first, second = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (slice(half), slice(half, rotary_dim))
    )
    for x in (query,) if key is None else (query, key):
        a, b = x[..., first].float(), x[..., second].float()
        x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
