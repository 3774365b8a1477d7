"""Rules of requests about tokens, applied to the logits of all rows of a batch at once: masks and biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenRules:
    """Which tokens may come, and by how much they are favoured; (row, token) pairs on the device, int64 [m] each.

    allowed: in `allowed_rows`, those that occur here, each once, only these tokens stay.
    bias: float32 [m], added to the logits of `biased`. banned: these never come.
    """

    allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    allowed_rows: torch.Tensor | None = None
    biased: tuple[torch.Tensor, torch.Tensor] | None = None
    bias: torch.Tensor | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None


def apply_rules_(logits: torch.Tensor, rules: TokenRules) -> torch.Tensor:
    """Apply masks and biases to float32 logits [n, V], in place; what is masked becomes -inf. Waits for no device."""
    if rules.allowed is not None and rules.allowed_rows is not None:
        kept = logits[rules.allowed]
        # Not by the pairs: a row that allows 150,000 tokens would be filled as many times, which takes 16 s.
        logits.index_fill_(0, rules.allowed_rows, -torch.inf)
        logits[rules.allowed] = kept
    if rules.biased is not None and rules.bias is not None:
        logits.index_put_(rules.biased, rules.bias, accumulate=True)
    if rules.banned is not None:
        logits[rules.banned] = -torch.inf
    return logits
