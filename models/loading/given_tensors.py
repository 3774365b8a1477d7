"""Tensors of this process, read like the tensors of a checkpoint file."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paged.errors import InvalidInputError
from paged.kernels.core.errors import shown
from paged.models.loading.tensor_file import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class GivenTensors:
    """Tensors by their names in a checkpoint, with the methods of a `TensorFile`.

    Raises:
        InvalidInputError: an item is no pair of a name and a tensor, or a name comes twice.
    """

    def __init__(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._given: dict[str, torch.Tensor] = {}
        if not isinstance(pairs, Iterable):
            raise InvalidInputError(f"source: {shown(pairs)}, expected a folder, or pairs of a name and a tensor")
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise InvalidInputError(f"source: {shown(pair)}, expected pairs of a name and a tensor")
            name, tensor = pair
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _NAMES:
                raise InvalidInputError(f"source: {name} is {shown(getattr(tensor, 'dtype', tensor))}, not of a file")
            if name in self._given:
                raise InvalidInputError(f"source: {name} comes twice")
            self._given[name] = tensor.detach()
        self.tensors = {name: (_NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in self._given.items()}

    def __str__(self) -> str:
        return "the given tensors"

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._given[name]

    def get_part(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return entries `start` to `stop` of a dimension."""
        return self._given[name].narrow(dim, start, stop - start)

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor into `out` of the same shape."""
        out.copy_(self._given[name])
