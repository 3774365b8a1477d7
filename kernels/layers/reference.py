"""Norms, rotation and activations in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import torch

from ..common.reference import f64, gated_activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""
    x, weight = f64(x), f64(weight)
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`rotary_embedding` of one tensor, x [num_tokens, num_heads, head_dim]."""
    x, cos_sin_cache = f64(x), f64(cos_sin_cache)
    half = cos_sin_cache.shape[1] // 2
    out = x.clone()
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = cos_sin_cache[position, i], cos_sin_cache[position, half + i]
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            out[token, :, a] = x[token, :, a] * cos - x[token, :, b] * sin
            out[token, :, b] = x[token, :, b] * cos + x[token, :, a] * sin
    return out


def silu_and_mul(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """activation(gate) * up, where the first half of the last axis is the gate and the second half is up."""
    gate, up = x.chunk(2, dim=-1)
    return gated_activation(gate, up, activation)
