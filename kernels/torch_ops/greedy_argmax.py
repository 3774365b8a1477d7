"""Greedy choice of tokens in PyTorch."""

from __future__ import annotations

import torch


def greedy_argmax(
    logits: torch.Tensor, token_mask: torch.Tensor | None, repetition_penalty: torch.Tensor | None
) -> torch.Tensor:
    """Twin of `kernels.greedy_argmax.greedy_argmax`."""
    values = logits.float()
    if repetition_penalty is not None:
        values = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    forbidden = values.isnan() if token_mask is None else values.isnan() | ~token_mask
    values = values.masked_fill(forbidden, -torch.inf)
    chosen = values.argmax(-1)  # the first of equals
    return chosen.masked_fill(values.gather(1, chosen[:, None]).squeeze(1) == -torch.inf, -1)
