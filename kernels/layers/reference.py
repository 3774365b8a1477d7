"""Norms, rotation and activations in float64: what tests, benchmarks and self-checks compare with.

Slow and obviously right, with Python loops over the formula's own indices, never sharing code with the kernels or their
PyTorch twins.
All functions return new float64 (or integer) tensors on the CPU and change nothing.
"""

from __future__ import annotations

import torch

from paged.kernels.common.reference import f64, gated_activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, 2019)."""
    x, weight = f64(x), f64(weight)
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding (Su et al., 2021) of x [num_tokens, num_heads, head_dim] at `positions` [num_tokens].

    cos_sin_cache [max_position, rotary_dim]: cosines of the rotary_dim / 2 frequencies, then their sines. Pair i is
    (x[i], x[i + rotary_dim / 2]), or (x[2i], x[2i + 1]) where interleaved; what lies beyond rotary_dim passes through.
    """
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
