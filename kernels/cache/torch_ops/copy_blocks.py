"""Block copies in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], block_pairs: torch.Tensor) -> None:
    """PyTorch implementation of `kernels.cache.copy_blocks.BlockCopy`; block_pairs is on the caches' device."""
    from_blocks, to_blocks = block_pairs.unbind(1)
    for source, target in zip(sources, targets, strict=True):
        if source.dtype == torch.float8_e4m3fn:  # bytes, as not every device has indexing of 8-bit floats
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        target[to_blocks] = source[from_blocks]
