"""Memory of table kinds that keep slots: states of recurrent layers, and rows of open pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paged.cache.groups import RecurrentSpec
from paged.cache.host_blocks import HostMemory
from paged.errors import InvalidInputError
from paged.kernels.recurrent.metadata import RecurrentState


class SlotMemory:
    """Memory of a kind's own, in slots.

    all: contiguous tensors by name, [layers, num_slots + 1, ...]. host: host memory; its blocks hold a slot each.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], num_swap_slots: int, num_tier_bytes: int) -> None:
        """num_tier_bytes: host memory for a tier, besides the slots for swap."""
        self.all = tensors
        self.num_swap_slots = num_swap_slots
        self.num_slots = min(tensor.shape[1] for tensor in tensors.values()) - 1
        self.host = HostMemory(tensors.values(), num_swap_slots + num_tier_bytes // self.bytes_per_slot)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot."""
        return sum(tensor.nbytes // tensor.shape[1] for tensor in self.all.values())

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of a slot's parts by name, empty parts excluded; the same in every process."""
        layout: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, tensor in self.all.items():
            layout[name] = (tensor.shape[0], *tensor.shape[2:]), str(tensor.dtype)
        return layout

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN."""
        for tensor in self.all.values():
            if tensor.dtype.is_floating_point:  # int8 states have scales
                tensor[:, list(slots)] = torch.nan


class OpenRows(SlotMemory):
    """Rows of open pools of all slots, float32.

    layers: the rows of each layer, [num_slots + 1, num_rows, size]; position p of a sequence has row p % num_rows.
    """

    def __init__(
        self,
        parts: Iterable[tuple[tuple[int, ...], int, int]],
        num_slots: int,
        num_swap_slots: int,
        device: torch.device,
    ) -> None:
        """parts: layers, num_rows and size of rows."""
        tensors: dict[str, torch.Tensor] = {}
        self.layers: dict[int, torch.Tensor] = {}
        for index, (layers, num_rows, size) in enumerate(parts):
            shape = len(layers), num_slots + 1, num_rows, size
            tensors[f"rows{index}"] = rows = torch.zeros(shape, dtype=torch.float32, device=device)
            self.layers |= zip(layers, rows, strict=True)
        super().__init__(tensors, num_swap_slots, 0)


class StateTensors(SlotMemory):
    """State tensors of all slots, with the recurrent layers along the first axis; see `RecurrentState`.

    `conv` has the layers of `conv_layers` too, behind the others. Each layer of `other_convs` has a tensor of its own.
    """

    def __init__(
        self, spec: RecurrentSpec, cache_dtype: torch.dtype, device: torch.device, num_tier_bytes: int = 0
    ) -> None:
        """cache_dtype: dtype of K and V. num_tier_bytes: see `SlotMemory`."""
        is_wide = cache_dtype.is_floating_point and cache_dtype.itemsize > 1
        conv_dtype = spec.conv_dtype
        if conv_dtype is None:
            conv_dtype = cache_dtype if is_wide else torch.float32
        slots, rows = spec.num_slots + 1, spec.conv_width - 1 + spec.ring
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "conv": ((len(spec.layers) + len(spec.conv_layers), slots, rows, spec.conv_channels), conv_dtype)
        }
        for conv in spec.other_convs:
            conv_shape = 1, slots, conv.width - 1 + spec.ring, conv.channels
            shapes[_conv_name(conv.layer)] = conv_shape, conv.dtype or conv_dtype
        for name, shape in spec.state_shapes().items():
            dtype = spec.state_dtype if name == "state" else torch.float32  # rings and scales are float32
            shapes[name] = (len(spec.layers), slots, *shape), dtype
        try:
            tensors: dict[str, torch.Tensor] = {}
            for name, (shape, dtype) in shapes.items():
                tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
            super().__init__(tensors, spec.num_swap_slots, num_tier_bytes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise InvalidInputError(f"recurrent: no states of shapes {shapes}: {error}") from error
        self.layers = {layer: index for index, layer in enumerate(spec.all_layers)}
        self._num_whole = len(spec.layers)
        self._of_layer = ("conv", *spec.state_shapes())

    def layer(self, layer: int) -> RecurrentState:
        """Return the views of one recurrent layer; layers of `conv_layers` and `other_convs` have `conv` alone."""
        index, other = self.layers[layer], self.all.get(_conv_name(layer))
        if other is not None:
            return RecurrentState(other[0])
        if index >= self._num_whole:
            return RecurrentState(self.all["conv"][index])
        tensors = {name: self.all[name][index] for name in self._of_layer}
        return RecurrentState(tensors.pop("conv"), **tensors)


def _conv_name(layer: int) -> str:
    """Return the name of the rows of a layer of `other_convs`."""
    return f"conv_{layer}"
