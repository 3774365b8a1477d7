"""Low-rank adapters as a formula; see `kernels.layers.definition` for what a definition is."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .batch import LoraBatch
from .weights import LoraWeights


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return out[row] + scale * B (A x[row]) in the parts that the row's adapter changes, out[row] elsewhere."""
    total = out.to(compute, copy=True)  # [num_rows, sum of part sizes]
    for rows, columns, change in changes(x, weights, batch, compute=compute):
        total[rows, columns] += change
    return total


def changes(
    x: torch.Tensor, weights: LoraWeights, batch: LoraBatch, *, compute: torch.dtype
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """Yield rows, columns and what an adapter adds to them, scale * B (A x) (Hu et al., 2021).

    Ranks and scales differ by adapter and part.
    """
    for adapter in batch.slots.unique().tolist():
        if adapter < 0:
            continue
        rows = batch.rows[batch.slots == adapter].flatten()
        rows = rows[rows >= 0].long()
        x_rows = x[rows].to(compute)
        end = 0
        for part, size in enumerate(weights.part_sizes):
            start, end = end, end + size
            rank = int(weights.ranks[adapter, part])
            if rank == 0:
                continue
            a = weights.a[adapter, part, :rank].to(compute)  # [rank, in_features]
            b = weights.b[adapter, :rank, start:end].to(compute)  # [rank, size]
            scale = weights.scales[adapter, part].to(compute)
            yield rows, slice(start, end), scale * (x_rows @ a.T @ b)
