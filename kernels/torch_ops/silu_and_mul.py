"""Gated activations in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.torch_ops.fused_moe import gated_activation


def silu_and_mul(x: torch.Tensor, activation: str, *, out: torch.Tensor) -> torch.Tensor:
    """Twin of `kernels.silu_and_mul.silu_and_mul`: float32 inside, rounded once into `out`."""
    return out.copy_(gated_activation(x.float(), activation, interleaved=False))
