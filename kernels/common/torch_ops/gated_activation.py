"""Gated activations in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional


def gated_activation(x: torch.Tensor, activation: str, interleaved: bool) -> torch.Tensor:
    """PyTorch implementation of `kernels.common.gated_activation`; gate and up are halves of x or alternate."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "swiglu_oai":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
