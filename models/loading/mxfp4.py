"""Experts in MXFP4 (OCP Microscaling Formats 1.0): four-bit floats, 32 of which share a power of two."""

from __future__ import annotations

import torch
from torch import nn

from paged.kernels.common.packed.packing import MXFP4_GROUP, num_words, pack_codes, unpack_pairs
from paged.models.loading.weights import ConvertedSlot, PackedModule, WeightSlots


class Mxfp4Experts(PackedModule):
    """One projection of all experts as `fused_moe` takes it: as many bits as in the checkpoint, in another order."""

    def __init__(self, num_experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        words, groups = (num_experts, out_features, num_words(in_features)), -(-in_features // MXFP4_GROUP)
        self.values = nn.Parameter(torch.empty(words, dtype=torch.int32), requires_grad=False)
        # Rows of a group side by side, as a step reads them.
        exponents = torch.empty(num_experts, groups, out_features, dtype=torch.uint8)
        self.exponents = nn.Parameter(exponents, requires_grad=False)

    @property
    def scale(self) -> torch.Tensor:
        """[num_experts, out_features, in_features / 32]."""
        return self.exponents.mT

    def weight_slots(self, name: str) -> WeightSlots:
        """Where blocks and scales of the tensor of this name go."""
        # Codes, two a byte, the first in the low bits.
        shape = torch.Size((*self.scale.shape, MXFP4_GROUP // 2))
        return {f"{name}_blocks": ConvertedSlot(shape, torch.uint8, self._take), f"{name}_scales": self.scale}

    def _take(self, blocks: torch.Tensor) -> None:
        # Expert by expert on the device: their codes take eight times as much while they are sorted.
        for mine, theirs in zip(self.values, blocks, strict=True):
            mine.copy_(pack_codes(unpack_pairs(theirs.to(mine.device).flatten(1))))
