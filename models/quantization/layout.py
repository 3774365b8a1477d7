"""What the weights of one projection are in a checkpoint, and what they become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paged.errors import CheckpointError
from paged.kernels.common.packed.packing import E2M1_GROUPS
from paged.kernels.quantization.weight import FP8_BLOCK, QuantizedWeight

Tensors = Mapping[str, torch.Tensor]


class Stored(NamedTuple):
    """A tensor of a projection as a file holds it, but for dimensions of 1 at the end.

    dtype: float32 for any floating point of 16 bits or more. row_dim: the dimension that runs along the output
    features, of which an entry spans `rows_each`; None where there is none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    row_dim: int | None = None
    rows_each: int = 1


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """How a projection is stored, and which fields of a `QuantizedWeight` it fills on a device.

    form: what a code is, as `QuantizedWeight.format` says it. group_size: columns that share a scale, 0 for all of a
    row; of e4m3 128 for blocks of 128 x 128. scale_dtype: of scales of whole numbers on the device.
    """

    form: str
    group_size: int = 0
    scale_dtype: torch.dtype = torch.float32
    has_zero_points: bool = False
    has_order: bool = False
    quantizes_input: bool = False
    has_input_scale: bool = False

    @property
    def has_tensor_scale(self) -> bool:
        return self.form in E2M1_GROUPS

    @property
    def in_blocks(self) -> bool:
        """Whether 128 rows share a scale."""
        return self.form == "e4m3" and self.group_size == FP8_BLOCK

    def scale_rows(self, rows: int) -> int:
        """Rows of scales that belong to rows of weights."""
        return -(-rows // FP8_BLOCK) if self.in_blocks else rows

    def num_groups(self, columns: int) -> int:
        """Scales of a row."""
        return -(-columns // self.group_size) if self.group_size else 1

    def check(self, name: str, rows: int, columns: int) -> None:
        """See that a projection of this size can be stored so.

        Raises:
            CheckpointError: groups or words do not divide it.
        """
        if self.group_size and not self.in_blocks and columns % self.group_size:
            raise CheckpointError(f"{name}: {columns} columns, expected a multiple of the group size {self.group_size}")

    @abstractmethod
    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        """The tensors by the ends of their names."""

    @abstractmethod
    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        """The weights; called with some rows at a time, but for MXFP4, whose largest exponent counts.

        Raises:
            InvalidInputError: numbers contradict each other.
        """


def see_that(name: str, size: int, divisor: int, what: str) -> None:
    """Raise CheckpointError unless the divisor divides."""
    if size % divisor:
        raise CheckpointError(f"{name}: {size} {what}, expected a multiple of {divisor}")
