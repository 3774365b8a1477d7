"""RMS normalisation in PyTorch."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, *, eps: float
) -> None:
    """Run `kernels.layers.rms_norm` or `fused_add_rms_norm` in PyTorch, on rows x or on residual += x.

    Computed in float32 and rounded once into `out`, which may be x. It makes one temporary as large as x: three of them
    made 2,048 rows fifteen times as slow, because of the pages that memory came in.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    torch.mul(wide * mean_square.add_(eps).rsqrt_(), weight.float(), out=out.view(x.shape))
