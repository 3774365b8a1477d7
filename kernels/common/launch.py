"""Launches: how much a program takes, strides as kernel arguments, and one kernel launched again and again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import repeat
from typing import Any

import torch

from paged.kernels.common.compat import TensorDescriptor, triton


def num_warps(block_size: int) -> int:
    """Warps for a row of `block_size` elements: one for each 512 (16 a thread, two 16-byte loads of a 16-bit type)."""
    return min(max(block_size // 512, 1), 16)


def tile(num_rows: int, row_size: int) -> tuple[int, int]:
    """Rows and columns, powers of two, of a program that reads two tensors: 1,024 elements of each at most.

    In 4 warps every thread then takes 16 bytes of a 16-bit type from each tensor.
    """
    columns = min(triton.next_power_of_2(row_size), 1024)
    return min(1024 // columns, triton.next_power_of_2(num_rows)), columns


def strides(axes: str, **tensors: torch.Tensor | None) -> dict[str, int]:
    """Kernel arguments `stride_<tensor>_<axis>` for each tensor's first axes, which `axes` names; 0 for None.

    strides("token head", key=key) is {"stride_key_token": key.stride(0), "stride_key_head": key.stride(1)}.
    """
    return {
        argument: step
        for name, tensor in tensors.items()
        for argument, step in zip(
            _stride_names(name, axes), repeat(0) if tensor is None else tensor.stride(), strict=False
        )
    }


@functools.cache
def _stride_names(tensor: str, axes: str) -> tuple[str, ...]:
    return tuple(f"stride_{tensor}_{axis}" for axis in axes.split())


def signature(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """What two tensors must have in common for a `Launch` to take one after the other."""
    if tensor is None:
        return None
    address = tensor.data_ptr()  # 0: an empty one, or one without memory, which the checks tell apart
    alignment = address % 16 if address else None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, alignment, tensor.is_neg()


class Launch:
    """One kernel on one grid, launched again and again with tensors that differ in their addresses alone.

    Triton looks at each of 50 arguments anew to find the compiled kernel: the two launches of a decode step took 78 us
    of host time, and take 12 from here (one core of an AMD EPYC, without the driver's share).
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        *,
        boxes: Mapping[str, tuple[int, ...]] | None = None,
        **options: int,
    ) -> None:
        """arguments: by name, as far as they stay the same. boxes: tensors that the kernel takes as descriptors, with
        the shapes of their boxes. options: those of the compiler, as num_warps.
        """
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._arguments = dict(arguments)
        self._boxes = boxes or {}
        self._options = options
        self._ordered: list[Any] = []
        self._positions: list[tuple[int, str]] = []
        self._run: Any = None

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        """Launch with these arguments besides, on the current stream; names that the kernel does not have are ignored.

        They have the signatures of those of the first call, and the same ones are None.
        """
        if self._boxes:
            tensors = {**tensors, **{name: _descriptor(tensors[name], box) for name, box in self._boxes.items()}}
        if self._run is not None:
            ordered = self._ordered.copy()
            for position, name in self._positions:
                ordered[position] = tensors[name]
            self._run(*ordered)
            return
        names = self._kernel.arg_names
        self._positions = [(position, name) for position, name in enumerate(names) if name in tensors]
        arguments = self._arguments | {name: tensors[name] for _, name in self._positions}
        compiled = self._kernel[self._grid](**arguments, **self._options)
        if compiled is not None:  # the interpreter has nothing to keep
            # Without this call's tensors: a plan, which lives as long as its step, would keep its first layer's alive.
            self._ordered = [None if name in tensors else arguments[name] for name in names]
            self._run = compiled[self._grid]


def _descriptor(tensor: torch.Tensor, box: tuple[int, ...]) -> Any:
    """The whole tensor, fetched in such boxes; the copy engine fills with 0 what exceeds it."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box))
