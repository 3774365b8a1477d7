"""An emulated machine with CUDA devices: while it is on, PyTorch and Triton believe that they are there."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from tests.emulated_device.emulator.kernels import Kernels, driver
from tests.emulated_device.emulator.memory import Memory, Transfers, access
from tests.emulated_device.emulator.operations import CudaTensor, Operations
from tests.emulated_device.emulator.report import Report, Synchronisation, place
from tests.emulated_device.emulator.streams import Clock, CUDAGraph, Event, Pool, Stream, Work, covers, merge

_ROOT = Path(__file__).resolve().parents[3]
_OURS = {torch.Tensor.data_ptr, torch.Tensor.tolist, torch.Tensor.numpy}


class _Thread(threading.local):
    """What every thread has of its own: a device, a stream of each where it is not the default, the one it captures."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}
        self.capturing: Stream | None = None


class EmulatedCuda:
    """num_devices GPUs of a compute capability and a number of SMs, with total_memory bytes each.

    executes: False computes nothing. Every result is zeros, in memory that is not there until somebody writes to it, so
    that models of any size run; what is launched, compiled, allocated and waited for is the same.
    fault: "hangs" or "lost" for a device whose work never ends, or whose context an error has ended.
    """

    def __init__(
        self, *, num_devices: int = 1, num_sms: int = 8, capability: tuple[int, int] = (9, 0),
        total_memory: int = 80 << 30, executes: bool = True,
    ) -> None:  # fmt: skip
        self.num_devices, self.num_sms, self.capability = num_devices, num_sms, capability
        self.total_memory, self.executes = total_memory, executes
        self.fault = ""
        self.report = Report()
        self.lock = threading.RLock()
        self.host: Clock = {}  # what the host knows to be over
        self.memory, self.transfers = Memory(self), Transfers(self)
        self.operations, self.kernels = Operations(self), Kernels(self)
        self.streams: list[Stream] = []
        self.new_stream, self.new_event, self.new_graph = (
            type(kind.__name__, (kind,), {"machine": self}) for kind in (Stream, Event, CUDAGraph)
        )
        self.defaults = [self.new_stream(index) for index in range(num_devices)]
        self.thread = _Thread()

    # Devices and streams

    def index_of(self, device: Any) -> int:
        """The index of a device that is given in any way torch.cuda takes; the current one's where it has none."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        index = self.thread.device if index is None else index
        if not 0 <= index < self.num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}, there are {self.num_devices} devices")
        return index

    def current_device(self) -> int:
        return self.thread.device

    def set_device(self, device: Any) -> None:
        self.thread.device = self.index_of(device)

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index_of(device)
        return self.thread.streams.get(index, self.defaults[index])

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.thread.device
        if device is not None and device != -1:
            self.set_device(device)
        try:
            yield
        finally:
            self.thread.device = before

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        index = None if stream is None else stream.device.index
        chosen = {} if stream is None else {index: stream}
        with self.device(index), mock.patch.dict(self.thread.streams, chosen):
            yield

    @contextmanager
    def graph(
        self,
        graph: CUDAGraph,
        pool: Pool | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        """`torch.cuda.graph`, the context in which a graph is captured."""
        self.synchronize()
        with self.stream(stream or self.new_stream()):
            graph.capture_begin(pool, capture_error_mode)
            try:
                yield
            except BaseException:
                graph.capture_end()
                graph.reset()
                raise
            graph.capture_end()

    # Work and waits

    def submit(self, stream: Stream, work: Work) -> None:
        """Give work to a stream, which does it now, or takes it down."""
        if stream.capture is not None:
            stream.capture.add(work)
            return
        if self.thread.capturing is not None:
            self.report.hazard("outside the capture", f"{work.name} went to a stream that is not captured")
        self.perform(stream, work)

    def perform(self, stream: Stream, work: Work) -> None:
        """Do it, after all that the stream was given before."""
        if not all(block.is_alive for block in (*work.reads, *work.writes)):
            self.report.hazard("freed memory", f"{work.name} uses memory of a tensor that is gone", work.place)
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
        if self.fault == "hangs":
            threading.Event().wait()
        if self.fault == "lost":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.thread.capturing is not None:
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
        self._stack = ExitStack()
        self._stack.callback(_clear_caches)
        _clear_caches()
        kernels, run_thread = self.kernels, threading.Thread.run

        def run_with_modes(thread: threading.Thread) -> None:
            with self._modes():
                run_thread(thread)

        for patch in (
            _guarded_devices(),
            mock.patch.multiple(torch.cuda, **self._cuda_names()),
            mock.patch.object(torch._C, "_from_dlpack", _from_dlpack(torch._C._from_dlpack)),
            # `Module.to` puts other tensors in the place of the parameters: their memory is no emulated tensor's.
            mock.patch.object(torch.__future__, "_swap_module_params_on_conversion", True),
            mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"}),
            mock.patch.dict(vars(triton.knobs.runtime), {"interpret": True}),
            mock.patch.object(triton.runtime.driver, "_active", driver(self)),
            mock.patch.object(
                interpreter.InterpretedFunction, "run", lambda *args, **kwargs: kernels.run(*args, **kwargs)
            ),
            self._modes(),
            mock.patch.object(threading.Thread, "run", run_with_modes),
        ):
            self._stack.enter_context(patch)
        return self

    def __exit__(self, *error: Any) -> None:
        self.transfers.settle()
        self._stack.close()

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with _DeviceNames(self), _EveryOperation(self):
            yield

    def _cuda_names(self) -> dict[str, Any]:
        """torch.cuda, as far as programs ask for it."""
        properties = SimpleNamespace(
            name="emulated", major=self.capability[0], minor=self.capability[1], multi_processor_count=self.num_sms,
            total_memory=self.total_memory, L2_cache_size=50 << 20, shared_memory_per_block_optin=227 << 10,
            warp_size=32,
        )  # fmt: skip

        def used(device: Any = None) -> int:
            return self.memory.used[self.index_of(device)]

        def peak(device: Any = None) -> int:
            return self.memory.peak[self.index_of(device)]

        return {
            "_lazy_init": lambda: None,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0),
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "device_count": lambda: self.num_devices,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "device": self.device,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "get_device_capability": lambda device=None: self.capability,
            "Stream": self.new_stream,
            "Event": self.new_event,
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.defaults[self.index_of(device)],
            "CUDAGraph": self.new_graph,
            "graph": self.graph,
            "graph_pool_handle": Pool,
            "is_current_stream_capturing": lambda: self.current_stream().capture is not None,
            "synchronize": self.synchronize,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (self.total_memory - used(device), self.total_memory),
            "memory_allocated": used,
            "memory_reserved": used,
            "max_memory_allocated": peak,
            "max_memory_reserved": peak,
            "reset_peak_memory_stats": lambda device=None: None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
        }


class _EveryOperation(TorchDispatchMode):
    """Makes operations without an emulated tensor among their arguments, as factories are, arrive as well."""

    def __init__(self, machine: EmulatedCuda) -> None:
        super().__init__()
        self._machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation goes through Dynamo, which takes seconds to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._machine.operations.dispatch(func, args, kwargs or {})


class _DeviceNames(TorchFunctionMode):
    """Gives "cuda" its index: PyTorch would ask a driver for it. `torch.Tensor.data_ptr(tensor)` is ours as well."""

    def __init__(self, machine: EmulatedCuda) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OURS and isinstance(args[0], CudaTensor):
            return getattr(CudaTensor, func.__name__)(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._indexed(kwargs["device"])}
        is_tensor = isinstance(args[0], torch.Tensor) if args else False
        if func is torch.as_tensor and not is_tensor and hasattr(args[0], "__cuda_array_interface__"):
            return self._on_device(args[0].__cuda_array_interface__, kwargs["device"])
        if func is torch.Tensor.cuda:
            device = args[1] if len(args) > 1 else kwargs.get("device")
            device = torch.device("cuda", self._machine.index_of(device))
            return args[0].to(device, non_blocking=kwargs.get("non_blocking", False))
        if func is torch.Tensor.to:
            args = (args[0], *(self._indexed(one) if isinstance(one, (str, torch.device)) else one for one in args[1:]))
        return func(*args, **kwargs)

    def _on_device(self, layout: dict[str, Any], device: torch.device) -> CudaTensor:
        """Bytes of the host that a device reads in place."""
        ((size,), (address, _)) = layout["shape"], layout["data"]
        inner = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        return CudaTensor(inner, self._machine.memory.allocation_of(inner, device))

    def _indexed(self, device: Any) -> Any:
        if isinstance(device, int):
            return torch.device("cuda", device)
        if device is not None and torch.device(device).type == "cuda":
            return torch.device("cuda", self._machine.index_of(device))
        return device


@contextmanager
def _guarded_devices() -> Iterator[None]:
    """PyTorch asks for a guard of the device before it looks at a tensor, and a build for CPUs has none for CUDA: the
    one of "meta", which does nothing, takes its place. A build for CUDA has one that does nothing without a GPU."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before, lifts_cpu = guards[cuda], torch._C._only_lift_cpu_tensors()
    if before is None:
        guards[cuda] = guards[meta]
    else:
        torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device="cuda") asks for CUDA's own memory
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_cpu)
        if before is None:
            guards[cuda] = before


def _from_dlpack(real: Any) -> Any:
    """Takes the tensor itself for its capsule."""

    def convert(capsule: Any, *args: Any) -> Any:
        return capsule.detach() if isinstance(capsule, CudaTensor) else real(capsule, *args)

    return convert


def _clear_caches() -> None:
    """What our modules remember of devices, and on them."""
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("paged.") else ():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()
