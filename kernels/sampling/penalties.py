"""Penalties of tokens that occurred before."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalties:
    """Repetition, presence and frequency penalties of rows of logits, with the token counts that they use.

    Attributes:
        rows: int64 [num_rows], row of `counts` and `seen` for each row of logits; -1 for a row without penalties.
        counts: int32 [num_tables, vocab_size], occurrences of each token in the output.
        seen: bool [num_tables, vocab_size], whether a token occurs in the output or the prompt.
        weights: float32 [num_rows, 3]: repetition, presence, frequency. Positive logits of seen tokens are divided by
            the repetition penalty, others multiplied by it (Keskar et al., 2019). The presence penalty is subtracted
            once from tokens of the output, the frequency penalty once for each occurrence.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    seen: torch.Tensor
    weights: torch.Tensor
