"""The gated norm in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    norm_first: bool,
    group_size: int,
    activation: str,
) -> torch.Tensor:
    """PyTorch implementation of `kernels.recurrent.gated_rms_norm`."""
    if activation == "sigmoid":
        gate = torch.sigmoid(z.float())
    else:
        gate = functional.silu(z.float())
    values = x.float()
    if not norm_first:
        values = values * gate
    normed = functional.rms_norm(values.flatten(1).unflatten(1, (-1, group_size)), (group_size,), eps=eps)
    normed = (normed.flatten(1).unflatten(1, (-1, weight.numel())) * weight.float()).view(x.shape)
    if norm_first:
        normed = normed * gate
    return normed.to(x.dtype)
