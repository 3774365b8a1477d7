"""RMS normalisation in PyTorch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor) -> torch.Tensor:
    """Twin of `kernels.rms_norm.rms_norm`: float32 inside, rounded once into `out`."""
    wide = x.float()
    return out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `kernels.rms_norm.fused_add_rms_norm`: both arguments change in place."""
    residual.add_(x)
    rms_norm(residual, weight, eps, out=x)
    return x, residual
