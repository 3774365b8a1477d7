"""What packed weights have that others have not: types of their own, which they keep, and fewer numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import nn

# Types of packed numbers and of what is stored beside them -> safetensors' names for them.
PACKED = {
    torch.uint8: ("U8",),
    torch.int8: ("I8",),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
    torch.float8_e4m3fn: ("F8_E4M3",),
}


class PackedModule(nn.Module, ABC):
    """Holds weights in fewer numbers."""

    @property
    @abstractmethod
    def num_weights(self) -> int: ...

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Go to another device, but stay of the same types when the network is given one."""

        def keeping_type(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor

        super()._apply(keeping_type, recurse)
        return self


def num_weights(network: nn.Module) -> int:
    """Weights and biases, a tied head once; scales and zero points are none."""
    count = 0
    for module in network.modules():
        if isinstance(module, PackedModule):
            count += module.num_weights
        else:
            count += sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return count


class LooseSlot:
    """A slot whose tensor may have further dimensions of size 1 at its end: a number for each row is stored both ways.

    shape: without them.
    """


def without_ones(shape: Sequence[int]) -> list[int]:
    """The shape less dimensions of size 1 at its end."""
    end = len(shape)
    while end and shape[end - 1] == 1:
        end -= 1
    return list(shape[:end])
