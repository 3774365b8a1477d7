"""Low-rank adapters in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    scales: torch.Tensor,
    part_sizes: tuple[int, ...],
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Twin of `kernels.lora.add_lora`: two matrix products an adapter in use and part that it changes."""
    all_ranks, all_scales = ranks.tolist(), scales.tolist()
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        chosen = rows[slots == slot].flatten()
        chosen = chosen[chosen >= 0].long()
        x_rows = x[chosen]
        start = 0
        for part, size in enumerate(part_sizes):
            rank, columns = all_ranks[slot][part], slice(start, start + size)
            start += size
            if rank == 0:
                continue
            shrunk = functional.linear(x_rows, a[slot, part, :rank]).float()
            delta = all_scales[slot][part] * (shrunk @ b[slot, :rank, columns].float())
            out[chosen, columns] = (out[chosen, columns].float() + delta).to(out.dtype)
    return out
