"""Low-rank adapters in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..batch import LoraBatch
from ..weights import LoraWeights


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, batch: LoraBatch) -> torch.Tensor:
    """PyTorch implementation of `kernels.lora.add_lora`: two products an adapter in use and part that it changes."""
    all_ranks, all_scales, rows, slots = weights.ranks.tolist(), weights.scales.tolist(), batch.rows, batch.slots
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        chosen = rows[slots == slot].flatten()
        chosen = chosen[chosen >= 0].long()
        x_rows = x[chosen]
        start = 0
        for part, size in enumerate(weights.part_sizes):
            rank, columns = all_ranks[slot][part], slice(start, start + size)
            start += size
            if rank == 0:
                continue
            shrunk = functional.linear(x_rows, weights.a[slot, part, :rank]).float()
            delta = all_scales[slot][part] * (shrunk @ weights.b[slot, :rank, columns].float())
            out[chosen, columns] = (out[chosen, columns].float() + delta).to(out.dtype)
    return out
