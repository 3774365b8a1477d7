"""What an emulated machine puts in place of torch.cuda's names, and of PyTorch's ways to a device."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paged.kernels.common.launch import forget_launches
from tests.emulated_device.emulator.graphs import Pool
from tests.emulated_device.emulator.tensor import Capsule, CudaTensor

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda

_OURS = {torch.Tensor.data_ptr, torch.Tensor.tolist, torch.Tensor.numpy}


def cuda_names(machine: EmulatedCuda) -> dict[str, Any]:
    """torch.cuda, as far as programs ask for it."""
    major, minor = machine.capability
    properties = SimpleNamespace(
        name="emulated",
        major=major,
        minor=minor,
        multi_processor_count=machine.num_sms,
        total_memory=machine.total_memory,
        L2_cache_size=50 << 20,
        shared_memory_per_block_optin=227 << 10,
        warp_size=32,
    )
    cuda_graph, graph_context = machine.graph_classes
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: machine.num_devices,
        "current_device": machine.current_device,
        "set_device": machine.set_device,
        "device": machine.device,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: machine.capability,
        "Stream": machine.new_stream,
        "Event": machine.new_event,
        "stream": machine.stream,
        "current_stream": machine.current_stream,
        "default_stream": lambda device=None: machine.defaults[machine.index_of(device)],
        "CUDAGraph": cuda_graph,
        "graph": graph_context,
        "graph_pool_handle": Pool,
        "is_current_stream_capturing": lambda: machine.current_stream().capture is not None,
        "synchronize": machine.synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (machine.total_memory - machine.used(device), machine.total_memory),
        "memory_allocated": machine.used,
        "memory_reserved": machine.used,
        "max_memory_allocated": lambda device=None: machine.memory.peak(machine.index_of(device)),
        "max_memory_reserved": lambda device=None: machine.memory.peak(machine.index_of(device)),
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }


class EveryOperation(TorchDispatchMode):
    """Makes operations without an emulated tensor among their arguments, as factories are, arrive as well."""

    def __init__(self, machine: EmulatedCuda) -> None:
        super().__init__()
        self._machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operation goes through Dynamo, which takes seconds to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._machine.operations.dispatch(func, args, kwargs or {})


class DeviceNames(TorchFunctionMode):
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
        if func is torch.Tensor.cuda:
            device = args[1] if len(args) > 1 else kwargs.get("device")
            return args[0].to(torch.device("cuda", self._machine.index_of(device)), kwargs.get("non_blocking", False))
        if func is torch.Tensor.to:
            args = (args[0], *(self._indexed(one) if isinstance(one, (str, torch.device)) else one for one in args[1:]))
        return func(*args, **kwargs)

    def _indexed(self, device: Any) -> Any:
        if isinstance(device, int):
            return torch.device("cuda", device)
        if device is not None and torch.device(device).type == "cuda":
            return torch.device("cuda", self._machine.index_of(device))
        return device


@contextmanager
def guarded_devices() -> Iterator[None]:
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


def from_dlpack(real: Any) -> Any:
    def convert(capsule: Any, *args: Any) -> Any:
        return capsule.tensor.detach() if isinstance(capsule, Capsule) else real(capsule, *args)

    return convert


def clear_caches() -> None:
    """What our modules remember of devices, and on them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("paged."):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()
    forget_launches()
