"""An emulated machine with CUDA devices: while it is on, PyTorch and Triton believe that they are there."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime import interpreter

from tests.emulated_device.emulator.graphs import CUDAGraph, Work, graph
from tests.emulated_device.emulator.kernels import Driver, Kernels
from tests.emulated_device.emulator.memory import Memory, access
from tests.emulated_device.emulator.operations import Operations
from tests.emulated_device.emulator.order import Clock, Event, Stream, covers, merge
from tests.emulated_device.emulator.patches import (
    DeviceNames,
    EveryOperation,
    clear_caches,
    cuda_names,
    from_dlpack,
    guarded_devices,
)
from tests.emulated_device.emulator.report import Report, Synchronisation, place
from tests.emulated_device.emulator.transfers import Transfers

_ROOT = Path(__file__).resolve().parents[3]


class _Thread(threading.local):
    """What every thread has of its own: a device, a stream of each, and a capture."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.capturing: Stream | None = None


class EmulatedCuda:
    """num_devices GPUs of a compute capability and a number of SMs, with total_memory bytes each.

    executes: False computes nothing. Every result is zeros, in memory that is not there until somebody writes to it, so
    that models of any size run; what is launched, compiled, allocated and waited for is the same.
    """

    def __init__(
        self,
        *,
        num_devices: int = 1,
        num_sms: int = 8,
        capability: tuple[int, int] = (9, 0),
        total_memory: int = 80 << 30,
        executes: bool = True,
    ) -> None:
        self.num_devices, self.num_sms, self.capability = num_devices, num_sms, capability
        self.total_memory, self.executes = total_memory, executes
        self.report = Report()
        self.lock = threading.RLock()
        self.host: Clock = {}  # what the host knows to be over
        self.memory, self.transfers = Memory(self), Transfers(self)
        self.operations, self.kernels = Operations(self), Kernels(self)
        self.streams: list[Stream] = []
        bound = {"machine": self}
        self.new_stream, self.new_event = type("Stream", (Stream,), bound), type("Event", (Event,), bound)
        self.graph_classes = type("CUDAGraph", (CUDAGraph,), bound), type("graph", (graph,), bound)
        self.defaults = [self.new_stream(index) for index in range(num_devices)]
        self._thread = _Thread()

    # Devices and streams

    def index_of(self, device: Any) -> int:
        """The index of a device that is given in any way torch.cuda takes; the current one's where it has none."""
        if device is None:
            return self.current_device()
        index = device if isinstance(device, int) else torch.device(device).index
        index = self.current_device() if index is None else index
        if not 0 <= index < self.num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}, there are {self.num_devices} devices")
        return index

    def current_device(self) -> int:
        return self._thread.device

    def set_device(self, device: Any) -> None:
        self._thread.device = self.index_of(device)

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index_of(device)
        return self._thread.streams.get(index, self.defaults[index])

    @property
    def capturing(self) -> Stream | None:
        """The stream that this thread captures."""
        return self._thread.capturing

    @capturing.setter
    def capturing(self, stream: Stream | None) -> None:
        self._thread.capturing = stream

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._thread.device
        if device is not None and device != -1:
            self.set_device(device)
        try:
            yield
        finally:
            self._thread.device = before

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        index = stream.device.index
        with self.device(index):
            before = self._thread.streams.get(index)
            self._thread.streams[index] = stream
            try:
                yield
            finally:
                if before is None:
                    del self._thread.streams[index]
                else:
                    self._thread.streams[index] = before

    # Work and waits

    def submit(self, stream: Stream, work: Work) -> None:
        """Give work to a stream, which does it now, or takes it down."""
        if stream.capture is not None:
            stream.capture.add(work)
            return
        if self.capturing is not None:
            self.report.hazard("outside the capture", f"{work.name} went to a stream that is not captured")
        self.perform(stream, work)

    def perform(self, stream: Stream, work: Work) -> None:
        """Do it, after all that the stream was given before."""
        for block in (*work.reads, *work.writes):
            if not block.is_alive:
                text = f"{work.name} uses memory of a tensor that is gone"
                self.report.hazard("freed memory", text, work.place)
        time = stream.tick()
        with torch._C._DisableTorchDispatch():
            found = work.run() if self.executes else None
        reads, writes = (work.reads, work.writes) if found is None else found
        for block in reads:
            access(self, stream, time, block, writes=False, where=work.place)
        for block in writes:
            access(self, stream, time, block, writes=True, where=work.place)

    def wait_for(self, what: str, clock: Clock | None = None) -> None:
        """The host waits: for the current stream, or until all in `clock` is over, which may be the case already."""
        if self.capturing is not None:
            self.report.hazard("wait in a capture", what)
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if clock is None:
            stream = self.current_stream()
            stream.tick()
            clock = stream.clock
        if not covers(self.host, clock):
            self.report.synchronisations.append(Synchronisation(what, place()))
            merge(self.host, clock)
        self.transfers.settle(self.host)

    def synchronize(self, device: Any = None) -> None:
        """The host waits for everything on a device."""
        every: Clock = {}
        index = self.index_of(device)
        for stream in self.streams:
            if stream.device.index == index:
                merge(every, stream.clock)
        self.wait_for("torch.cuda.synchronize", every)

    # On and off

    def __enter__(self) -> EmulatedCuda:
        for path in sorted((_ROOT / "kernels").rglob("*.py")):  # before anything says that nothing is interpreted
            importlib.import_module(".".join(("paged", *path.relative_to(_ROOT).with_suffix("").parts)))
        self._stack = stack = ExitStack()
        stack.callback(clear_caches)
        clear_caches()
        stack.enter_context(guarded_devices())
        for name, value in cuda_names(self).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch._C, "_from_dlpack", from_dlpack(torch._C._from_dlpack)))
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"}))
        stack.enter_context(mock.patch.dict(vars(triton.knobs.runtime), {"interpret": True}))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", Driver(self)))
        kernels = self.kernels

        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            return kernels.run(function, *args, **kwargs)

        stack.enter_context(mock.patch.object(interpreter.InterpretedFunction, "run", run))
        stack.enter_context(self._modes())
        run_thread = threading.Thread.run

        def run_with_modes(thread: threading.Thread) -> None:
            with self._modes():
                run_thread(thread)

        stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_modes))
        return self

    def __exit__(self, *error: Any) -> None:
        self.transfers.settle_all()
        self._stack.close()

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with DeviceNames(self), EveryOperation(self):
            yield

    def used(self, device: Any = None) -> int:
        return self.memory.used(self.index_of(device))
