"""Triton kernels: Triton's own way from call to launch, with its interpreter where the compiled kernel would run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.emulated_device.emulator.memory import Block
from tests.emulated_device.emulator.operations import CudaTensor
from tests.emulated_device.emulator.report import CompiledKernel, Launch, place
from tests.emulated_device.emulator.streams import Blocks, Work

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda

_GRID_LIMITS = (2**31 - 1, 65535, 65535)


def driver(machine: EmulatedCuda) -> Any:
    """What Triton asks its driver for before a launch."""
    major, minor = machine.capability
    return SimpleNamespace(
        get_current_device=machine.current_device,
        get_current_stream=lambda device: machine.current_stream(device).stream_id,
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_active_torch_device=lambda: torch.device("cuda", machine.current_device()),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
    )


class Kernels:
    """The kernels of the process, as the emulated devices know them."""

    def __init__(self, machine: EmulatedCuda) -> None:
        self.machine = machine
        self._known: dict[Any, _Kernel] = {}
        self._interpret = interpreter.InterpretedFunction.run

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """In place of the interpreter's own: `function[grid](*args, **kwargs)`."""
        with self.machine.lock:
            if function not in self._known:
                self._known[function] = _Kernel(self, function)
            return self._known[function].run(*args, grid=grid, warmup=warmup, **kwargs)

    def launch(self, kernel: _Kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """One launch on the current device's current stream."""
        machine, name, where = self.machine, kernel.name, place()
        grid = (*grid, 1, 1)[:3]
        if any(size > limit for size, limit in zip(grid, _GRID_LIMITS, strict=True)):
            machine.report.hazard("grid", f"{name} on a grid of {grid}, beyond {_GRID_LIMITS}")
        named = dict(zip(kernel.arg_names, args, strict=True))
        blocks = tuple(block for argument, value in named.items() for block in self._blocks(name, argument, value))
        machine.report.launches.append(Launch(name, grid, where))  # type: ignore[arg-type]
        if 0 in grid:
            return
        inner = {argument: _inner(value) for argument, value in named.items()}
        device = machine.current_device()

        def run() -> tuple[Blocks, Blocks]:
            with machine.lock, _CheckedAccess(machine, name, device) as access, torch._C._DisableTorchDispatch():
                self._interpret(kernel.function, grid=grid, warmup=False, **inner)
            return tuple(access.read.values()), tuple(access.written.values())

        machine.submit(machine.current_stream(), Work(name, where, blocks, (), run))

    def _blocks(self, kernel: str, argument: str, value: Any) -> list[Block]:
        """The memory that an argument points to; an error where the current device cannot reach it."""
        if isinstance(value, TensorDescriptor):
            value = value.base
        if isinstance(value, tuple):
            return [block for one in value for block in self._blocks(kernel, argument, one)]
        if not isinstance(value, torch.Tensor):
            return []
        if isinstance(value, CudaTensor):
            current = self.machine.current_device()
            if value.device.index != current:
                text = f"{kernel} was launched on cuda:{current} with {argument} on {value.device}"
                self.machine.report.hazard("wrong device", text)
            return [value.allocation.block]
        block = self.machine.transfers.pinned_block(value)
        if block is None and value.numel():
            raise ValueError(f"Pointer argument {argument} of {kernel} cannot be accessed from Triton (cpu tensor?)")
        return [] if block is None else [block]


class _Kernel(JITFunction[Any]):
    """A kernel whose compilation gives the interpreter's version of it."""

    def __init__(self, kernels: Kernels, function: Any) -> None:
        super().__init__(function.fn, **function.kwargs)
        self.kernels, self.function, self.name = kernels, function, function.fn.__name__

    def _do_compile(
        self, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, *_: Any
    ) -> Any:
        arguments: dict[str, str] = {}
        for index, (name, kind) in enumerate(signature.items()):
            fixed = [str(getattr(one, "__name__", one)) for path, one in constexprs.items() if path[0] == index]
            is_aligned = any(value for path, value in attrs.items() if path[0] == index)
            arguments[name] = ", ".join(fixed) if kind == "constexpr" else f"{kind}{' / 16' * is_aligned}"
        names = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
        shown = ", ".join(f"{option}={getattr(options, option)}" for option in names)
        new = CompiledKernel(self.name, int(device), arguments, shown, place())
        machine = self.kernels.machine
        machine.report.compiled.append(new)
        if machine.thread.capturing is not None:
            machine.report.hazard("compiled in a capture", self.name)
        compiled = self.device_caches[device][0][key] = _Compiled(self, new.device)
        return compiled

    def specialisation(self, args: tuple[Any, ...]) -> list[str]:
        """What Triton would fix of each of these arguments."""
        binder = self.device_caches[self.kernels.machine.current_device()][-1]
        return [str(one) for one in binder(*args)[1]]


class _Compiled:
    """In place of Triton's compiled kernel."""

    function = packed_metadata = None

    def __init__(self, kernel: _Kernel, device: int) -> None:
        self._kernel, self._device = kernel, device
        self._specialisation: list[str] = []

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, grid_0: int, grid_1: int, grid_2: int, *rest: Any) -> None:
        args = rest[-len(self._kernel.arg_names) :]
        self._specialisation = self._specialisation or self._kernel.specialisation(args)
        self._kernel.kernels.launch(self._kernel, (grid_0, grid_1, grid_2), args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        kernel, machine = self._kernel, self._kernel.kernels.machine

        def launch(*args: Any, stream: Any = None) -> None:
            found = kernel.specialisation(args)
            for argument, was, now in zip(kernel.arg_names, self._specialisation, found, strict=True):
                if was != now:
                    text = f"{kernel.name} was compiled for {argument} as {was}, and launched with {now}"
                    machine.report.hazard("other specialisation", text)
            if machine.current_device() != self._device:
                text = f"{kernel.name} was compiled for cuda:{self._device}"
                machine.report.hazard("wrong device", f"{text}, and launched on cuda:{machine.current_device()}")
            kernel.kernels.launch(kernel, grid, args)

        return launch


class _CheckedAccess:
    """Around a launch: every address that the kernel loads from or stores to has to lie in memory that is there."""

    def __init__(self, machine: EmulatedCuda, kernel: str, device: int) -> None:
        self._machine, self._kernel, self._device = machine, kernel, device
        self.read: dict[int, Block] = {}
        self.written: dict[int, Block] = {}

    def __enter__(self) -> _CheckedAccess:
        self._real, interpreter._interpreter = interpreter._interpreter, self
        return self

    def __exit__(self, *_: object) -> None:
        interpreter._interpreter = self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._real.load(ptrs, self._allowed(ptrs, mask, np.dtype(dtype).itemsize, self.read), other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        return self._real.store(ptrs, value, self._allowed(ptrs, mask, value.dtype.itemsize, self.written))

    def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, semantics: Any) -> Any:
        mask = self._allowed(ptrs, mask, value.dtype.itemsize, self.written)
        return self._real.atomic_rmw(op, ptrs, value, mask, semantics)

    def atomic_cas(self, ptrs: Any, expected: Any, value: Any, semantics: Any) -> Any:
        everywhere = np.ones_like(ptrs, dtype=bool)
        if not self._allowed(ptrs, everywhere, value.dtype.itemsize, self.written).all():
            return np.zeros_like(expected)
        return self._real.atomic_cas(ptrs, expected, value, semantics)

    def _allowed(self, ptrs: Any, mask: Any, size: int, used: dict[int, Block]) -> Any:
        """The mask without the lanes that would leave memory; what is used is noted."""
        mask = mask.astype(bool)  # the interpreter makes integers of a bool that it spreads over a block
        active = ptrs[mask]
        if active.size == 0:
            return mask
        low, high = int(active.min()), int(active.max()) + size
        block = self._machine.memory.find(low)
        if block is not None and high <= block.end:
            self._note(block, used)
            return mask
        allowed = mask.copy()
        for index in np.flatnonzero(mask):
            address = int(ptrs.flat[index])
            block = self._machine.memory.find(address)
            if block is None or address + size > block.end:
                allowed.flat[index] = False
                verb = "loads from" if used is self.read else "stores to"
                text = f"{self._kernel} {verb} an address that belongs to no tensor"
                self._machine.report.hazard("out of bounds", text)
            else:
                self._note(block, used)
        return allowed

    def _note(self, block: Block, used: dict[int, Block]) -> None:
        if block.start not in used:
            used[block.start] = block
            if block.device not in (None, self._device):
                text = f"{self._kernel} on cuda:{self._device} reaches memory of cuda:{block.device}"
                self._machine.report.hazard("wrong device", text)


def _inner(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=_inner(value.base))
    if isinstance(value, tuple):
        return tuple(map(_inner, value))
    return value.inner if isinstance(value, CudaTensor) else value
