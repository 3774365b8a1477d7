"""What rows of logits must pay for tokens that occurred."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalties:
    """How often tokens occurred in what rows continue, and what that costs them.

    rows: int64 [num_rows], of the tables; -1 for a row without penalties. counts: int32 [num_tables, vocab_size],
    occurrences in the output. seen: bool, of that shape, whether in the output or the prompt. weights: float32
    [num_rows, 3], repetition (logits of tokens that were seen are divided by it where positive, else multiplied: Keskar
    et al., 2019), presence and frequency penalties (subtracted once, and once an occurrence).
    """

    rows: torch.Tensor
    counts: torch.Tensor
    seen: torch.Tensor
    weights: torch.Tensor
