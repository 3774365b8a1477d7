"""Weights in MXFP4 (OCP Microscaling Formats 1.0): four-bit floats, 32 of which share a power of two."""

from __future__ import annotations

import torch

from paged.models.loading.weights import WeightSlots

GROUP_SIZE = 32
# Values of the codes 0 to 15: a sign, two bits of exponent, one of mantissa (E2M1).
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The two of each byte, the one in the low bits first.
_PAIRS = [(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)]
# What the codes 0 to 255 of a scale stand for (E8M0).
_FACTORS = [*(2.0 ** (code - 127) for code in range(255)), float("nan")]


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers, float32 [..., num_groups * 32].

    Args:
        blocks: uint8 [..., num_groups, 16], two values a byte, the first in the low bits.
        scales: uint8 [..., num_groups].
    """
    pairs, factors = (torch.tensor(table, device=blocks.device) for table in (_PAIRS, _FACTORS))
    # Pairs as 8-byte integers: looked up five to ten times faster on a CPU than one value at a time.
    values = pairs.view(torch.int64).flatten().index_select(0, blocks.flatten().int()).view(torch.float32)
    return values.view(*scales.shape, GROUP_SIZE).mul_(factors[scales.int()].unsqueeze(-1)).flatten(-2)


def mxfp4_slots(name: str, weight: torch.Tensor) -> WeightSlots:
    """Where blocks and scales of `weight` [num_experts, rows, columns] go; it is filled once both are there."""
    *shape, columns = weight.shape
    groups = (*shape, columns // GROUP_SIZE)
    found: dict[str, torch.Tensor] = {}
    return {
        f"{name}_blocks": _Part("blocks", torch.Size((*groups, GROUP_SIZE // 2)), found, weight),
        f"{name}_scales": _Part("scales", torch.Size(groups), found, weight),
    }


class _Part:
    """Blocks or scales, which wait for each other in `found`."""

    dtype = torch.uint8

    def __init__(self, kind: str, shape: torch.Size, found: dict[str, torch.Tensor], weight: torch.Tensor) -> None:
        self.kind, self.shape, self.found, self.weight = kind, shape, found, weight

    def copy_(self, stored: torch.Tensor) -> None:
        self.found[self.kind] = stored
        if len(self.found) == 2:
            # Expert by expert on the device: unpacked to float32, a layer of them would be twice the weights.
            device = self.weight.device
            for mine, blocks, scales in zip(self.weight, self.found["blocks"], self.found["scales"], strict=True):
                mine.copy_(dequantize_mxfp4(blocks.to(device), scales.to(device)))
            self.found.clear()
