"""Rotary embedding in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.common.id_checks import check_ids_on_host


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """PyTorch implementation of `kernels.layers.rotary_embedding`: query and key change in place."""
    half = cos_sin_cache.shape[1] // 2
    try:
        rows = cos_sin_cache.index_select(0, positions)  # a CPU checks every index anyway
    except (IndexError, RuntimeError):  # the latter of a table without rows
        check_ids_on_host("positions", positions, 0, len(cos_sin_cache) - 1)
        raise
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    # The first of a pair becomes a cos - b sin, the second b cos + a sin: x cos + swapped (-sin, sin).
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    for x in (query,) if key is None else (query, key):
        rotated = x[..., : 2 * half]
        wide = rotated.float()
        swapped = wide.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else wide.roll(half, -1)
        wide.mul_(cos).addcmul_(swapped, sin)
        if wide is not rotated:
            rotated.copy_(wide)
