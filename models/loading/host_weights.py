"""Weights that stay in host memory, and that a GPU reads there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paged.errors import InvalidInputError


class HostWeights(nn.Module):
    """A module whose parameters are too large for a GPU. A step reads few of their rows.

    seen: the parameters as the device of the steps reads them, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, torch.Tensor] = {}

    def see_from(self, device: torch.device) -> None:
        """Prepare the parameters for a device; call it when they are at their final addresses."""
        for name, weight in self.named_parameters():
            seen = self.seen.get(name)
            if seen is None or seen.device.type != device.type or seen.data_ptr() != weight.data_ptr():
                self.seen[name] = seen_from(device, weight.data)


def allocate(network: nn.Module, device: torch.device) -> None:
    """Allocate the weights of a network without memory: on the device, and those of `HostWeights` on the host."""
    on_host: set[int] = set()
    for module in network.modules():
        if isinstance(module, HostWeights):
            on_host.update(map(id, module.parameters()))

    def memory(weight: torch.Tensor) -> torch.Tensor:
        place = device
        if id(weight) in on_host:
            place = torch.device("cpu")
        # Like `to_empty`, whose `empty_like` of a meta tensor would import sympy for 0.25 s.
        return torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=place)

    network._apply(memory)


def seen_from(device: torch.device, weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor on `device` with the weight's memory.

    A GPU reads the host's pages in place, so they are registered with CUDA and never move. `pin_memory` would round the
    size up to a power of two: 95 GB would take 137 GB.

    Raises:
        InvalidInputError: CUDA does not register the memory.
    """
    if weight.device.type == device.type:
        return weight
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(weight.data_ptr(), weight.nbytes, 0))
    if error:
        raise InvalidInputError(f"{weight.nbytes} bytes of host memory: CUDA error {error}, expected them to be pinned")
    as_bytes: torch.Tensor = torch.as_tensor(_OnDevice(weight), device=device)
    return as_bytes.view(weight.dtype).view(weight.shape)


class _OnDevice:
    """Host memory in the form that PyTorch takes over as a tensor on a GPU, as bytes."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # PyTorch keeps this object, and so the memory, alive
        self.__cuda_array_interface__ = {
            "shape": (weight.nbytes,),
            "typestr": "|u1",
            "data": (weight.data_ptr(), False),
            "version": 3,
        }
