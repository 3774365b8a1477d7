"""Merge of attention states in PyTorch."""

from __future__ import annotations

import torch


def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch implementation of `kernels.attention.merge_attn_states`."""
    # FlashAttention writes inf for a row without keys; this implementation writes -inf.
    lse_a, lse_b = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    out = torch.zeros(out_a.shape, dtype=torch.float32, device=out_a.device)
    for part, part_lse, other_lse in ((out_a, lse_a, lse_b), (out_b, lse_b, lse_a)):
        # sigmoid of the difference, not exp(part_lse - lse): lse is rounded, by 5e-4 where it is 5,000.
        weight = torch.sigmoid(part_lse - other_lse).masked_fill(part_lse == -torch.inf, 0.0).T.unsqueeze(-1)
        # 0 * NaN is NaN: an empty side is left out, not weighted.
        out += torch.where(weight == 0, 0.0, weight * part)
    return out.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)
