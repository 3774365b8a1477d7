"""Memory of the recurrent layers' states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paged.cache.blocks.host_blocks import HostBlocks
from paged.cache.recurrent.spec import RecurrentSpec
from paged.errors import InvalidInputError
from paged.kernels.recurrent.metadata import RecurrentState


class StateTensors:
    """Tensors of all slots, with the recurrent layers along the first axis; see `RecurrentState`.

    listener: called with each swap before it runs, by its name in the other ranks' messages.
    """

    listener: Callable[[str, tuple[Any, ...]], None] | None = None

    def __init__(self, spec: RecurrentSpec, cache_dtype: torch.dtype, device: torch.device) -> None:
        """cache_dtype: of K and V."""
        is_wide = cache_dtype.is_floating_point and cache_dtype.itemsize > 1
        conv_dtype = spec.conv_dtype or (cache_dtype if is_wide else torch.float32)
        heads, keys = (spec.num_heads, spec.head_dim), (spec.num_key_heads, spec.key_dim)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "conv": ((spec.conv_width - 1 + spec.ring, spec.conv_channels), conv_dtype)
        }
        if spec.num_heads:
            shapes |= {
                "state": ((*heads, spec.key_dim), torch.float32),
                "ring_k": ((spec.ring, *keys), torch.float32),
                "ring_u": ((spec.ring, *heads), torch.float32),
                "ring_g": ((spec.ring, spec.num_heads), torch.float32),
            }
        begin = len(spec.layers), spec.num_slots + 1
        try:
            self.all = {
                name: torch.zeros((*begin, *shape), dtype=dtype, device=device)
                for name, (shape, dtype) in shapes.items()
            }
            self.host_slots = [HostBlocks(tensor, spec.num_swap_slots) for tensor in self.all.values()]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise InvalidInputError(f"recurrent: no states of shape {begin} and {shapes}: {error}") from error
        self.layers = {layer: index for index, layer in enumerate(spec.layers)}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot."""
        return sum(tensor.nbytes // tensor.shape[1] for tensor in self.all.values())

    def layer(self, layer: int) -> RecurrentState:
        """Return the views of one of `layers`."""
        index = self.layers[layer]
        tensors = {name: tensor[index] for name, tensor in self.all.items()}
        return RecurrentState(tensors.pop("conv"), **tensors)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device slot to host slot for every pair."""
        if self.listener is not None:
            self.listener("swap_out_states", (pairs,))
        for memory in self.host_slots:
            memory.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host slot to device slot for every pair."""
        if self.listener is not None:
            self.listener("swap_in_states", (pairs,))
        for memory in self.host_slots:
            memory.swap_in(pairs)

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN."""
        for tensor in self.all.values():
            tensor[:, list(slots)] = torch.nan
