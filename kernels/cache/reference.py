"""Writes to the cache in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import torch

from ..common.reference import f64, to_float8


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
                    row = f64(row) / f64(scale).expand(cache.shape[2])[head]
                if cache.element_size() == 1:
                    row = to_float8(row, cache.dtype)
                copy[slot // block_size, slot % block_size, head] = row.to(copy)
        written.append(copy)
    return written[0], written[1]


def concat_and_cache_mla(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """A copy of the cache as `concat_and_cache_mla` leaves it; rows of 656 bytes by their definition."""
    copy, block_size = kv_cache.clone(), kv_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        if kv_cache.dtype == torch.uint8:
            codes, scales, rope = packed_latents(latent[token : token + 1], k_rope[token : token + 1])
            parts = (to_float8(codes, torch.float8_e4m3fn), scales.float(), rope.to(torch.bfloat16))
            row = torch.cat([part.view(torch.uint8) for part in parts], 1)[0]
        else:
            row = torch.cat([f64(latent[token]), f64(k_rope[token])])
            if scale is not None:
                row = row / f64(scale)
            if kv_cache.element_size() == 1:
                row = to_float8(row, kv_cache.dtype)
        copy[slot // block_size, slot % block_size] = row.to(copy)
    return copy


def packed_latents(latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of rows of 656 bytes before they are rounded: codes [n, 512], scales [n, 4], rotated parts [n, 64]."""
    groups = f64(latent).unflatten(1, (4, 128))
    largest = groups.abs().amax(2, keepdim=True)
    return (groups / largest * 448).flatten(1), (largest / 448).squeeze(2), f64(k_rope)
