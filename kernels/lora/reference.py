"""Adapters in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import torch

from ..common.reference import f64


def add_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    adapters: list[dict[int, tuple[torch.Tensor, torch.Tensor, float]]],
    part_sizes: tuple[int, ...],
    row_slots: list[int],
) -> torch.Tensor:
    """out[row] + scale * B (A x[row]), where row_slots[row] is an index into `adapters`, or -1 for out[row] alone.

    An adapter maps the parts that it changes (runs of columns of out, part_sizes wide) to A [rank, in_features],
    B [part size, rank] and scale.
    """
    total, x = f64(out).clone(), f64(x)
    for row, slot in enumerate(row_slots):
        if slot < 0:
            continue
        for part, (a, b, scale) in adapters[slot].items():
            first = sum(part_sizes[:part])
            total[row, first : first + part_sizes[part]] += scale * (f64(b) @ (f64(a) @ x[row]))
    return total
