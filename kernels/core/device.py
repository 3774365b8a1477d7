"""A tensor's device: which backend computes there, and the properties that tile choices use."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .compat import HAS_TRITON, interpreting
from .errors import InvalidInputError, UnsupportedError

# Chips with 227 KB of shared memory a program, whose matrix unit reads operands from it. The interpreter ("cpu") takes
# the same tiles, so that tests run the tiles that GPUs run.
LARGE_SHARED_MEMORY = ("sm_90", "sm_100", "sm_103", "cpu")
# Consumer chips with 99 KB of shared memory a program. For them ptxas uses fewer registers if it can.
SMALL_SHARED_MEMORY = ("sm_86", "sm_89", "sm_120")
# Dtypes that numba kernels take.
NUMBA_DTYPES = (torch.float32, torch.bfloat16)


class Backend(NamedTuple):
    """Settings by which operations choose an implementation.

    Attributes:
        name: PAGED_BACKEND, "" if it is not set.
        wants_numba: whether numba kernels run on CPU tensors.
        checks: PAGED_CHECK, "" if it is not set.
        is_invariant: whether a row's result has the same bits whatever other rows are in the call.
    """

    name: str
    wants_numba: bool
    checks: str
    is_invariant: bool = False


# Equal settings share one `Backend`, so that keys of bound operations compare fast.
_as_backend = functools.cache(Backend)
_encoded = functools.cache(os.environ.encodekey)
# The backend of the forward that runs in this thread or task.
_FORWARD: ContextVar[Backend | None] = ContextVar("_FORWARD", default=None)
# forward_backend(): the backend of the running forward, or None outside of a forward.
forward_backend = _FORWARD.get


@dataclass(frozen=True)
class Device:
    """Properties that tile choices depend on.

    Attributes:
        arch: architecture, such as "sm_90", "gfx942" or "cpu".
        num_sms: number of SMs.
        name: chip name in tuned tables; "" if there are none.
    """

    arch: str
    num_sms: int
    name: str = ""


# What kernels on CPU tensors run on: 8 SMs, so that tests see split sequences. `bench.compiled` puts a GPU here.
INTERPRETER = Device("cpu", 8)


def setting(name: str) -> str:
    """Return os.environ.get(name, ""), six times as fast, because operations outside of a forward read two settings."""
    values = getattr(os.environ, "_data", None)  # in CPython; os.environ would encode the name at each lookup
    if values is None:
        return os.environ.get(name, "")
    value: str | bytes = values.get(_encoded(name), "")
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def default_device() -> torch.device:
    """Return the default device of models and caches: CUDA if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return the device's architecture and size."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
    return Device(arch, properties.multi_processor_count, properties.name)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Return whether a graph is being captured on the tensor's device; False on CPU builds of torch."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def use_triton(place: torch.Tensor | torch.device) -> bool:
    """Return whether operations on a tensor or device run Triton kernels; False for the PyTorch implementations.

    CUDA and ROCm tensors take Triton. CPU tensors take PyTorch, or Triton's interpreter if TRITON_INTERPRET=1 was set
    before the first import. The environment variable PAGED_BACKEND (`triton`, `torch` or `numba`) overrides both.

    Raises:
        InvalidInputError: PAGED_BACKEND has another value.
        UnsupportedError: Triton is required but cannot run here, or the tensor has no memory ("meta").
    """
    device = place.device if isinstance(place, torch.Tensor) else place
    if device.type == "meta":
        raise UnsupportedError("tensors on meta have no values to compute with")
    choice = backend().name
    if choice in ("torch", "numba"):
        return False
    if choice not in ("", "triton"):
        raise InvalidInputError(f"PAGED_BACKEND={choice!r}: expected 'triton', 'torch' or 'numba'")
    on_gpu = device.type == "cuda"
    runnable = HAS_TRITON and (on_gpu or interpreting())
    if runnable:
        return True
    if choice == "triton" or on_gpu:
        reason = "CPU tensors need TRITON_INTERPRET=1"
        if not HAS_TRITON:
            reason = "triton is not installed"
        raise UnsupportedError(f"the Triton backend cannot run on device {device}: {reason}")
    return False


@functools.cache
def has_numba() -> bool:
    """Return whether numba kernels can run: numba is installed, and PyTorch has loaded an OpenMP for the process."""
    try:
        importlib.import_module("numba")
    except Exception:  # numba is not installed, or raises one of many errors because it does not fit this NumPy
        return False
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    return all(hasattr(ctypes.CDLL(None), name) for name in names)


def load_numba() -> bool:
    """Import numba, and return whether models may use its kernels: not if PAGED_BACKEND is `torch`.

    The import takes half a second, so only models with packed weights do it.
    """
    return setting("PAGED_BACKEND") != "torch" and has_numba()


@contextmanager
def using_numba(is_used: bool, *, is_invariant: bool = False) -> Iterator[None]:
    """Run a forward with or without numba kernels, whatever other models of the process do.

    The environment is read once, here, and not again by operations of the forward. is_invariant: as in `Backend`.
    """
    token = _FORWARD.set(_backend(uses_numba=is_used, is_invariant=is_invariant))
    try:
        yield
    finally:
        _FORWARD.reset(token)


def backend() -> Backend:
    """Return the backend of the running forward, or of the environment outside of a forward."""
    return forward_backend() or _backend(uses_numba=False)


def _backend(*, uses_numba: bool, is_invariant: bool = False) -> Backend:
    name = setting("PAGED_BACKEND")
    wants_numba = name == "numba" or (uses_numba and name != "torch")
    return _as_backend(name, wants_numba, setting("PAGED_CHECK"), is_invariant)


def wants_numba() -> bool:
    """Return whether numba kernels run on CPU tensors: within `using_numba`, unless PAGED_BACKEND overrides that."""
    return backend().wants_numba


def takes_numba(
    *tensors: torch.Tensor | None,
    weights: Sequence[torch.Tensor | None] = (),
    dtypes: Sequence[torch.dtype] = NUMBA_DTYPES,
) -> bool:
    """Return whether an operation runs numba kernels, which its function then imports from `kernels.cpu`.

    It does if numba kernels are wanted and all tensors are on the CPU with one dtype, one of `dtypes`. Weights may have
    this dtype or float32.

    Raises:
        UnsupportedError: numba kernels are wanted but cannot run.
    """
    if not wants_numba():
        return False
    if not has_numba():
        raise UnsupportedError("the numba backend cannot run: numba is not installed, or PyTorch has no GNU OpenMP")
    dtype = None
    for tensor in tensors:
        if tensor is None:
            continue
        if dtype is None:
            dtype = tensor.dtype
        if tensor.dtype != dtype or not tensor.is_cpu:
            return False
    if dtype not in dtypes:
        return False
    return all(weight is None or weight.dtype in (dtype, torch.float32) for weight in weights)
