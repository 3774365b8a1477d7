"""Block copies in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.kernels.common.fp8 import as_kernel_argument


def copy_blocks(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], block_pairs: torch.Tensor) -> None:
    """PyTorch implementation of `kernels.cache.copy_blocks.BlockCopy`; block_pairs is on the caches' device."""
    from_blocks, to_blocks = block_pairs.unbind(1)
    for source, target in zip(sources, targets, strict=True):
        # Not every device has indexing of 8-bit floats.
        as_kernel_argument(target)[to_blocks] = as_kernel_argument(source)[from_blocks]
