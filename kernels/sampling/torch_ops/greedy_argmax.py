"""Greedy choice of tokens in PyTorch."""

from __future__ import annotations

import torch

# Tokens of a group. PyTorch's argmax looks at one value at a time and its amax at 16: the best group first, then the
# best in it, takes 83 us where 32 rows of 8,000 took 470.
_GROUP = 64


def greedy_argmax(
    logits: torch.Tensor, *, token_mask: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None
) -> torch.Tensor:
    """PyTorch implementation of `kernels.sampling.greedy_argmax`."""
    values = logits.float()
    if repetition_penalty is not None:
        values = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    if token_mask is not None:
        values = values.masked_fill(~token_mask, -torch.inf)
    tokens, best = _largest(values)
    if best.isnan().any():  # a copy of all logits without them takes as long as the rest
        tokens, best = _largest(values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    return tokens.masked_fill_(best == -torch.inf, -1)


def _largest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the largest values of each row and that value; NaN is larger than all."""
    num_missing = -values.shape[1] % _GROUP
    if num_missing:
        values = torch.nn.functional.pad(values, (0, num_missing), value=-torch.inf)
    groups = values.unflatten(1, (-1, _GROUP))
    group = groups.amax(-1).argmax(-1)  # the first of equals
    best, within = groups[torch.arange(len(groups), device=groups.device), group].max(-1)
    return group * _GROUP + within, best
