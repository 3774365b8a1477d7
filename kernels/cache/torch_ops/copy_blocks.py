"""Block copies in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(caches: Sequence[torch.Tensor], block_pairs: torch.Tensor) -> None:
    """PyTorch implementation of `kernels.cache.copy_blocks`; block_pairs is a tensor on the caches' device."""
    sources, destinations = block_pairs.unbind(1)
    for cache in caches:
        if cache.dtype == torch.float8_e4m3fn:  # bytes, as not every device has indexing of 8-bit floats
            cache = cache.view(torch.uint8)
        cache[destinations] = cache[sources]
