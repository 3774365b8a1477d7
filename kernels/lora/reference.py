"""Adapters in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import torch

from ..common.reference import f64
from .batch import LoraBatch
from .weights import LoraWeights


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> torch.Tensor:
    """out[row] + scale * B (A x[row]) in the parts that the row's adapter changes, out[row] elsewhere."""
    total, x, a, b, scales = f64(out).clone(), f64(x), f64(weights.a), f64(weights.b), f64(weights.scales)
    for rows, slot in zip(batch.rows.tolist(), batch.slots.tolist(), strict=True):
        last = 0
        for part, size in enumerate(weights.part_sizes):
            first, last = last, last + size
            rank = int(weights.ranks[slot, part])
            for row in rows:
                if row >= 0 and slot >= 0 and rank > 0:
                    shrunk = a[slot, part, :rank] @ x[row]
                    total[row, first:last] += scales[slot, part] * (shrunk @ b[slot, :rank, first:last])
    return total
