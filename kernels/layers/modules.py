"""Layers for Hugging Face's `kernels`, which gives their `forward` to a model's modules of the same kind.

The library requires classes without state of their own: no constructor, no methods besides `forward`.
"""

from __future__ import annotations

import torch
from torch import nn

from .rms_norm import rms_norm
from .silu_and_mul import silu_and_mul


class RMSNorm(nn.Module):
    """`rms_norm` for modules with `weight` and `variance_epsilon`, such as transformers' `LlamaRMSNorm`."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised rows, [..., hidden_size]."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class SiluAndMul(nn.Module):
    """`silu_and_mul` for modules that take gate and up in one tensor."""

    can_torch_compile = True
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [..., size], of x, [..., 2 * size]."""
        return silu_and_mul(x)
