"""Cache writes in PyTorch."""

from __future__ import annotations

import torch


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Twin of `kernels.reshape_and_cache.reshape_and_cache`."""
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots, block_size = slot_mapping[rows], k_cache.shape[1]
    for source, cache in ((key, k_cache), (value, v_cache)):
        cache[slots // block_size, slots % block_size] = source[rows].to(cache.dtype)
