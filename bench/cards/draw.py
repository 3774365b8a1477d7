"""Random tensors for problems of operations, dense or as awkward as callers may pass them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Draw:
    """Random tensors on a device, by default in a dtype.

    is_odd: rows of tensors lie apart in a larger tensor that holds NaN between them, and writes skip some slots.
    """

    device: torch.device
    dtype: torch.dtype
    is_odd: bool = False

    def normal(self, *shape: int) -> torch.Tensor:
        return self._placed(torch.randn(shape, device=self.device, dtype=self.dtype))

    def normals(self, count: int, *shape: int) -> list[torch.Tensor]:
        return [self.normal(*shape) for _ in range(count)]

    def floats(self, *shape: int) -> torch.Tensor:
        """Return float32 numbers."""
        return torch.randn(shape, device=self.device)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, device=self.device)

    def slots(self, tokens: int) -> tuple[int, torch.Tensor]:
        """Return the number of blocks of a cache with twice the needed size, and a random slot for each token."""
        num_blocks = max(-(-2 * tokens // BLOCK_SIZE), 1)
        slots = self.permutation(num_blocks * BLOCK_SIZE)[:tokens]
        if self.is_odd:
            slots[torch.rand(tokens, device=self.device) < 0.2] = -1
        return num_blocks, slots

    def rotary(self, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return shuffled positions, and cosines and sines of random angles."""
        angles = self.floats(tokens, dim // 2)
        return self.permutation(tokens), torch.cat([angles.cos(), angles.sin()], dim=1)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or a copy whose rows lie apart behind an odd offset, with NaN around them."""
        if not self.is_odd or tensor.dim() < 2:
            return tensor
        *sizes, width = tensor.shape
        row = width + random.randrange(9)
        offset = random.randrange(9)
        num_rows = math.prod(sizes)
        around = torch.full((offset + num_rows * row + 1,), math.nan, device=self.device, dtype=self.dtype)
        rows = around[offset : offset + num_rows * row].view(*sizes, row)[..., :width]
        return rows.copy_(tensor)
