"""Writes to the cache in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import torch

from paged.kernels.common.reference import f64, to_float8


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the caches as `reshape_and_cache` leaves them."""
    written = []
    for rows, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        copy, block_size = cache.clone(), cache.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            for head in range(cache.shape[2]):
                row = rows[token, head]
                if scale is not None:
                    row = f64(row) / f64(scale).flatten()[head if scale.numel() > 1 else 0]
                stored = to_float8(row, cache.dtype) if cache.element_size() == 1 else row
                copy[slot // block_size, slot % block_size, head] = stored.to(copy)
        written.append(copy)
    return written[0], written[1]
