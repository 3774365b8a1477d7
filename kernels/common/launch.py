"""Launches: how much a program takes, strides as kernel arguments, and one kernel launched again and again."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import repeat
from numbers import Number
from typing import Any, NamedTuple, TypeVar

import torch

from paged.kernels.common.compat import TensorDescriptor, interpreting, setting, triton
from paged.kernels.common.compilation import collecting
from paged.kernels.common.device import wants_loops

_T = TypeVar("_T")
# Numbers of rows that between them lead to every tile of rows, which holds a power of two of them, 1,024 at most.
ROW_COUNTS = tuple(1 << exponent for exponent in range(11))


def num_warps(block_size: int) -> int:
    """Warps for a row of `block_size` elements: one for each 512 (16 a thread, two 16-byte loads of a 16-bit type)."""
    return min(max(block_size // 512, 1), 16)


def tile(num_rows: int, row_size: int) -> tuple[int, int]:
    """Rows and columns, powers of two, of a program that reads two tensors: 1,024 elements of each at most.

    In 4 warps every thread then takes 16 bytes of a 16-bit type from each tensor.
    """
    columns = min(triton.next_power_of_2(row_size), 1024)
    return min(1024 // columns, triton.next_power_of_2(num_rows)), columns


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as [num_rows, size], each row contiguous; a copy where its strides are others."""
    if x.dim() == 2 and x.is_contiguous():
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


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


def signatures(tensors: Iterable[torch.Tensor | None]) -> tuple[object, ...]:
    """What tensors must have in common with others for a `Launch` to take those after these."""
    # An address of 0 is that of an empty tensor, or of one without memory, which the checks tell apart.
    return tuple(
        [
            None
            if x is None
            else (x.shape, x.stride(), x.dtype, x.device, at % 16 if (at := x.data_ptr()) else None, x.is_neg())
            for x in tensors
        ]
    )


# Types whose values stay what they are while they are in a key; NumPy's numbers are others.
_CONSTANT = frozenset((type(None), bool, int, float, str, torch.dtype))


@functools.cache
def _is_constant(kind: type) -> bool:
    is_numpys = kind.__module__ == "numpy" and (issubclass(kind, Number) or kind.__name__ in ("bool", "bool_"))
    return is_numpys or kind in _CONSTANT


def call_key(operation: str, tensors: Sequence[torch.Tensor | None], *values: Hashable) -> Hashable:
    """What two calls must have in common for one to launch what the other did, and to be as free of errors; None for a
    call that keeps nothing.

    values: all but the tensors that checks, tiles and arguments of kernels depend on, as they were given. The first
    tensor says where the call runs. What no kernel runs on, arguments that are no tensors and numbers of unknown types
    have no key.
    """
    types = tuple([type(value) for value in values])  # as 1 == True == 1.0
    if not (_CONSTANT.issuperset(types) or all(map(_is_constant, types))):
        return None
    try:
        if not (tensors[0].is_cuda or interpreting() or wants_loops()):  # type: ignore[union-attr]
            return None
        return operation, signatures(tensors), types, values, setting("PAGED_BACKEND")
    except (AttributeError, RuntimeError):  # no tensor, or one without strides or memory, as the checks will report
        return None


# What the operations launch, by `call_key`: for a model some ten for each number of tokens, of 1 to 8 KB.
_KNOWN: dict[Hashable, Any] = {}
_MAX_KNOWN = 4096


def known(key: Hashable) -> Any:
    """What was kept for this key, or None."""
    return None if key is None else _KNOWN.get(key)


def keep(key: Hashable, launches: _T) -> _T:
    """Keep `launches`, which hold no tensor, for the next call of this key, and return them.

    The key has what the checks look at besides values, so that calls which find something here need no other checks,
    and no choice of tiles. Where there are too many all are dropped: a step makes those that it needs once more.
    """
    if key is not None:
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = launches
    return launches


def forget_launches() -> None:
    """Drop what is kept: for whoever changes what tiles or kernels are chosen."""
    _KNOWN.clear()


class Launch:
    """One kernel on one grid, launched again and again with tensors that differ in their addresses alone.

    Triton looks at each of 50 arguments anew to find the compiled kernel: the two launches of a decode step took 78 us
    of host time, and take 12 from here (one core of an AMD EPYC, without the driver's share). It runs on the device of
    its tensors, whichever is current.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        *,
        boxes: Mapping[str, Box] | None = None,
        **options: int,
    ) -> None:
        """arguments: by name, as far as they stay the same. boxes: tensors that the kernel takes as descriptors.
        options: those of the compiler, as num_warps.
        """
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._arguments = dict(arguments)
        self.boxes = boxes or {}
        self._options = options
        self._device = -1
        self._ordered: list[Any] = []
        self._positions: list[tuple[int, str]] = []
        self._descriptors: list[tuple[int, str, dict[str, Any]]] = []
        self._run: Any = None

    def __call__(self, tensors: Mapping[str, Any]) -> None:
        """Launch with these arguments besides, on the current stream; names that the kernel does not have are ignored.

        They have the signatures of those of the first call, and the same ones are None.
        """
        if self._run is None or collecting():
            self._launch_first(tensors)
            return
        ordered = self._ordered.copy()
        for position, name in self._positions:
            ordered[position] = tensors[name]
        for position, name, fields in self._descriptors:
            ordered[position] = descriptor = object.__new__(TensorDescriptor)
            descriptor.__dict__ = {**fields, "base": tensors[name]}  # its checks take 10 us
        if self._device < 0 or torch.cuda.current_device() == self._device:
            self._run(*ordered)
        else:
            with torch.cuda.device(self._device):
                self._run(*ordered)

    def _launch_first(self, tensors: Mapping[str, Any]) -> None:
        names = self._kernel.arg_names
        arguments = self._arguments | {name: tensors[name] for name in names if name in tensors}
        on = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
        described = {name: box.describe(arguments[name]) for name, box in self.boxes.items()}
        with torch.cuda.device(on.device) if on.is_cuda else nullcontext():
            is_left_out = collecting()
            compiled = self._kernel.run(**arguments | described, **self._options, grid=self._grid, warmup=is_left_out)
            if compiled is None or is_left_out:  # the interpreter has nothing to keep
                return
            run = compiled.__getitem__(self._grid)  # [] would not find what another thread compiles ahead
        self._device = on.get_device()
        # Without this call's tensors: a plan, which lives as long as its step, would keep its first layer's alive.
        self._ordered = [None if name in tensors else arguments[name] for name in names]
        places = [(position, name) for position, name in enumerate(names) if name in tensors]
        self._positions = [place for place in places if place[1] not in described]
        self._descriptors = [
            (position, name, {**vars(described[name]), "base": None}) for position, name in places if name in described
        ]
        self._run = run


class Box(NamedTuple):
    """How a kernel fetches a tensor by the chip's copy engine: as one of this shape and these strides, in such boxes.
    The engine fills with 0 what exceeds the tensor."""

    shape: Sequence[int]
    strides: Sequence[int]
    size: Sequence[int]

    def describe(self, tensor: torch.Tensor) -> Any:
        return TensorDescriptor(tensor, *map(list, self))


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch once, with these arguments, of the kernel and of the compiler."""
    Launch(kernel, grid, arguments)({})
