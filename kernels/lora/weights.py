"""The adapters of one linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.checks import FLOAT_DTYPES, check_contiguous, check_is_tensor, check_tensor
from ..core.errors import InvalidInputError, as_int

MAX_PARTS = 3


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """Adapters of one linear layer. A layer has up to three parts: projections of one input, side by side.

    Attributes:
        a: [num_slots, num_parts, max_rank, in_features], contiguous.
        b: [num_slots, max_rank, out_features], contiguous: B of each part, transposed, in the columns of the part.
        ranks: int32 [num_slots, num_parts], contiguous; 0 if the adapter does not change the part. Elements beyond a
            rank are never read.
        scales: float32 [num_slots, num_parts], contiguous.
        part_sizes: out_features of each part, one to three.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor
    part_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        check_is_tensor("a", self.a)
        sizes = tuple(as_int(f"part_sizes[{part}]", size, 1) for part, size in enumerate(self.part_sizes))
        object.__setattr__(self, "part_sizes", sizes)
        dtype, device, num_parts = self.a.dtype, self.a.device, len(sizes)
        if not 1 <= num_parts <= MAX_PARTS:
            raise InvalidInputError(f"part_sizes: {self.part_sizes}, expected 1 to {MAX_PARTS} sizes above 0")
        check_tensor("a", self.a, ("num_slots", num_parts, "max_rank", "in_features"), FLOAT_DTYPES, device)
        num_slots, _, max_rank, _ = self.a.shape
        check_tensor("b", self.b, (num_slots, max_rank, sum(self.part_sizes)), (dtype,), device)
        check_tensor("ranks", self.ranks, (num_slots, num_parts), (torch.int32,), device)
        check_tensor("scales", self.scales, (num_slots, num_parts), (torch.float32,), device)
        tensors = {"a": self.a, "b": self.b, "ranks": self.ranks, "scales": self.scales}
        for name, tensor in tensors.items():
            check_contiguous(name, tensor)
