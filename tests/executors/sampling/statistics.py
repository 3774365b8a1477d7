"""How likely counts are, if they were drawn from a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chi_square_p(counts: Sequence[int], expected: Sequence[float]) -> float:
    """p-value of Pearson's test (1900): the share of samples of `expected` that fit it no better than `counts`."""
    total = sum(counts)
    pairs = [(count, share * total) for count, share in zip(counts, expected, strict=True) if share > 0]
    if total != sum(count for count, _ in pairs):
        return 0.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs)
    if len(pairs) < 2:
        return 1.0
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
