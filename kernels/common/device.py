"""The device of a tensor: which backend computes there, and its properties for tile choices."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .compat import HAS_TRITON, interpreting
from .errors import InvalidInputError, UnsupportedError

# Chips whose programs may take 227 KB of shared memory and whose matrix unit reads its operands from there. The
# interpreter ("cpu") gets the same tiles, so that what tests run is what they launch.
LARGE_SHARED_MEMORY = ("sm_90", "sm_100", "sm_103", "cpu")
# Consumer chips, whose programs may take 99 KB, and for which ptxas keeps to fewer registers where it can.
SMALL_SHARED_MEMORY = ("sm_86", "sm_89", "sm_120")
# Dtypes of numba kernels.
LOOP_DTYPES = (torch.float32, torch.bfloat16)


class Backend(NamedTuple):
    """The settings by which operations choose an implementation.

    Attributes:
        name: PAGED_BACKEND, "" if it is not set.
        wants_loops: whether numba kernels run on CPU tensors.
        checks: PAGED_CHECK, "" if it is not set.
        is_invariant: whether a row's result has the same bits whatever other rows a call has.
    """

    name: str
    wants_loops: bool
    checks: str
    is_invariant: bool = False


# One object for the same settings, so that keys of bound operations compare fast.
_as_backend = functools.cache(Backend)
_encoded = functools.cache(os.environ.encodekey)
# The backend of the forward that runs in this thread or task.
_FORWARD: ContextVar[Backend | None] = ContextVar("_FORWARD", default=None)
# forward_backend(): that of the forward, or None outside of one.
forward_backend = _FORWARD.get


@dataclass(frozen=True)
class Device:
    """Properties that tile choices depend on.

    Attributes:
        arch: architecture, such as "sm_90", "gfx942" or "cpu".
        num_sms: number of programs that run side by side.
        name: chip name in tuned tables; "" if there are none.
    """

    arch: str
    num_sms: int
    name: str = ""


def setting(name: str) -> str:
    """Return os.environ.get(name, ""), in 0.2 us instead of 1.3: every operation outside of a forward reads two."""
    values = getattr(os.environ, "_data", None)  # CPython's; os.environ encodes the name anew to look there
    if values is None:
        return os.environ.get(name, "")
    value: str | bytes = values.get(_encoded(name), "")
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def default_device() -> torch.device:
    """Return where models and caches are made if the caller names no device: CUDA if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("cpu")


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return the device's architecture and size; the interpreter gets 8 SMs, so that tests see sequences split."""
    if device.type != "cuda":
        return Device("cpu", 8)
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).split(":")[0]
    return Device(arch, properties.multi_processor_count, properties.name)


def use_triton(place: torch.Tensor | torch.device) -> bool:
    """Return whether operations on a tensor or device run Triton kernels; False for the PyTorch implementations.

    CUDA and ROCm tensors take Triton. CPU tensors take PyTorch, or Triton's interpreter if TRITON_INTERPRET=1 was set
    before the first import. The environment variable PAGED_BACKEND (`triton`, `torch` or `numba`) overrides both.

    Raises:
        InvalidInputError: PAGED_BACKEND holds another word.
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
    """Return whether numba kernels can run here: numba is installed, and PyTorch loaded an OpenMP for the process."""
    try:
        importlib.import_module("numba")
    except Exception:  # it is not installed, or does not fit the NumPy there is, which it says in many ways
        return False
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    return all(hasattr(ctypes.CDLL(None), name) for name in names)


def load_numba() -> bool:
    """Import numba, and return whether models may use its kernels: not if PAGED_BACKEND is `torch`.

    The import takes half a second, so only models that are packed do it.
    """
    return setting("PAGED_BACKEND") != "torch" and has_numba()


@contextmanager
def using_numba(is_used: bool, *, is_invariant: bool = False) -> Iterator[None]:
    """Run a forward with numba kernels or without, whatever other models of the process do.

    The environment is read once, here: operations of a forward do not read it again. is_invariant: as in `Backend`.
    """
    token = _FORWARD.set(_backend(uses_numba=is_used, is_invariant=is_invariant))
    try:
        yield
    finally:
        _FORWARD.reset(token)


def backend() -> Backend:
    """Return the backend of the forward that runs, or else that of the environment."""
    return forward_backend() or _backend(uses_numba=False)


def _backend(*, uses_numba: bool, is_invariant: bool = False) -> Backend:
    name = setting("PAGED_BACKEND")
    wants_loops = name == "numba" or (uses_numba and name != "torch")
    return _as_backend(name, wants_loops, setting("PAGED_CHECK"), is_invariant)


def wants_loops() -> bool:
    """Return whether numba kernels run on CPU tensors: within `using_numba`, unless PAGED_BACKEND overrides that."""
    return backend().wants_loops


def loops_of(module: str, *tensors: torch.Tensor | None, weights: Sequence[torch.Tensor | None] = ()) -> Any:
    """Return a module of numba kernels, such as "common.numba_ops.linear"; None if they are not used.

    Its `prepare` makes a `LoopLaunch`. It is used if numba kernels are wanted, all tensors are on the CPU with one
    dtype, float32 or bfloat16, and weights have that dtype or float32.

    Raises:
        UnsupportedError: numba kernels are wanted but cannot run.
    """
    if not wants_loops():
        return None
    if not has_numba():
        raise UnsupportedError("the numba backend cannot run: numba is not installed, or PyTorch has no GNU OpenMP")
    dtype = None
    for tensor in tensors:
        if tensor is None:
            continue
        if dtype is None:
            dtype = tensor.dtype
        if tensor.dtype != dtype or not tensor.is_cpu:
            return None
    if dtype not in LOOP_DTYPES:
        return None
    for weight in weights:
        if weight is not None and weight.dtype not in (dtype, torch.float32):
            return None
    return importlib.import_module(f"..{module}", __package__)
