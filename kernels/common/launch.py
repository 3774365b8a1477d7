"""Launches: work of a program, strides as kernel arguments, and kernels that are launched again and again.

PAGED_PDL=1 lets a kernel start before the one ahead of it has ended, on sm_90 and newer (NVIDIA's programmatic
dependent launch); 0 is the default. Its programs take their places on the SMs when all programs of the one ahead have
begun and leave room, and wait there in `wait_for_inputs` until that kernel has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from .compat import TensorDescriptor, tl, triton
from .compilation import collecting
from .device import device_of, setting
from .errors import InvalidInputError

Compute = Callable[[dict[str, Any]], Any]
"""Computes a bound operation; takes its tensors by the names of the kernel's arguments. A `Launch`, a `LoopLaunch` or
a function of PyTorch."""
# Numbers of rows that select every tile of rows. Tiles hold a power of two of them, 1,024 at most.
ROW_COUNTS = tuple(1 << exponent for exponent in range(11))
# The first architecture, "sm_90", where a kernel can wait for the one before it.
_FIRST_EARLY_ARCH = 90


def num_warps(block_size: int) -> int:
    """Return the warps for a row of `block_size` elements: one for each 512 (two 16-byte loads of 16 bits a thread)."""
    return min(max(block_size // 512, 1), 16)


def tile(num_rows: int, row_size: int) -> tuple[int, int]:
    """Return rows and columns, powers of two, of a program that reads two tensors: at most 1,024 elements of each.

    In 4 warps every thread then takes 16 bytes of a 16-bit type from each tensor.
    """
    columns = min(triton.next_power_of_2(row_size), 1024)
    return min(1024 // columns, triton.next_power_of_2(num_rows)), columns


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as [num_rows, size] with contiguous rows; a copy if its strides do not allow a view."""
    if x.dim() == 2 and x.is_contiguous():
        return x
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows


def strides(axes: str, **tensors: torch.Tensor | None) -> dict[str, int]:
    """Return kernel arguments `stride_<tensor>_<axis>` for each tensor's first axes, named by `axes`; 0 for None.

    strides("token head", key=key) is {"stride_key_token": key.stride(0), "stride_key_head": key.stride(1)}.
    """
    axis_names = axes.split()
    arguments: dict[str, int] = {}
    for name, tensor in tensors.items():
        steps = (0,) * len(axis_names)
        if tensor is not None:
            steps = tensor.stride()
        for axis, step in zip(axis_names, steps, strict=False):
            arguments[f"stride_{name}_{axis}"] = step
    return arguments


def nothing(_tensors: object) -> None:
    """Do nothing: the launch for tensors without elements."""


def wait_for_inputs(_semantic: Any = None) -> None:
    """Wait until the kernel before has ended, then let the next one start: the first statement of every kernel.

    Nothing may be loaded before it, and nothing stored. Only with `early_options` it becomes instructions; Triton's
    interpreter calls it without `_semantic`.
    """
    options = getattr(getattr(_semantic, "builder", None), "options", None)
    if getattr(options, "launch_pdl", False):
        tl.extra.cuda.gdc_wait(_semantic=_semantic)
        tl.extra.cuda.gdc_launch_dependents(_semantic=_semantic)


# Triton's compiler calls it, with `_semantic`, where a kernel does.
wait_for_inputs.__triton_builtin__ = True  # type: ignore[attr-defined]


def early_options(kernel: Any, device: torch.device) -> dict[str, bool]:
    """Return the compiler's options that PAGED_PDL asks for; none for a kernel without `wait_for_inputs`.

    Raises:
        InvalidInputError: PAGED_PDL is neither 1 nor 0.
    """
    choice = setting("PAGED_PDL") or "0"
    if choice == "0":
        return {}
    if choice != "1":
        raise InvalidInputError(f"PAGED_PDL={choice!r}: expected '1' or '0'")
    arch = device_of(device).arch
    can_wait = arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= _FIRST_EARLY_ARCH
    if not can_wait or wait_for_inputs.__name__ not in kernel.fn.__code__.co_names:
        return {}
    return {"launch_pdl": True}


class Launch:
    """One kernel on one grid, launched again and again with tensors that differ only in their addresses.

    Triton inspects about 50 arguments in each call to find the compiled kernel. The two launches of a decode step took
    78 us of host time that way, and take 12 here (one core of an AMD EPYC, without the driver's share). It runs on the
    device of its tensors, even if that is not the current one.
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
        """Keep the fixed arguments.

        arguments: by name. boxes: tensors that the kernel takes as descriptors. options: of the compiler, such as
        num_warps.
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
        """Launch with these arguments added, on the current stream; names that the kernel does not have are ignored.

        Their signatures must be those of the first call, and the same ones must be None.
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
            is_skipped = collecting()
            options = self._options | early_options(self._kernel, on.device)
            compiled = self._kernel.run(**arguments | described, **options, grid=self._grid, warmup=is_skipped)
            if compiled is None or is_skipped:  # the interpreter has nothing to keep
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
    """How the copy engine fetches a tensor: its shape and strides, and the size of a box.

    The engine fills elements beyond the tensor with 0.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    size: Sequence[int]

    def describe(self, tensor: torch.Tensor) -> Any:
        return TensorDescriptor(tensor, *map(list, self))


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch once with these arguments of the kernel and the compiler."""
    Launch(kernel, grid, arguments)({})
