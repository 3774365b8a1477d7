"""Building blocks of CPU kernels that numba compiles. `NumbaLaunch` runs them."""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import types
from numba.core import config
from numba.extending import intrinsic, overload

_LOG = logging.getLogger("paged")
# Fast-math options without those that assume finite values: NaN and infinities are valid results.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
_thread = types.ExternalFunction("omp_get_thread_num", types.int32())
_num_threads = types.ExternalFunction("omp_get_num_threads", types.int32())


def cpu_features() -> Mapping[str, bool]:
    """Return the instruction sets that numba compiles for: the CPU's, unless NUMBA_CPU_FEATURES names others.

    An instruction that the CPU lacks would end the process.
    """
    if config.CPU_FEATURES is None:
        return dict(llvmlite.binding.get_host_cpu_features())
    return {name[1:]: name[0] == "+" for name in config.CPU_FEATURES.split(",") if name}


def cpu_name() -> str:
    """Return the processor that numba compiles for, as LLVM names it: this one, unless NUMBA_CPU_NAME names another."""
    return config.CPU_NAME or llvmlite.binding.get_host_cpu_name()


# Options of device functions, which only compiled code calls: without wrappers for other callers.
_DEVICE_OPTIONS = {
    "fastmath": FASTMATH,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
device_function = numba.njit(**_DEVICE_OPTIONS)
# Device function whose code numba copies into each caller. Compilation takes longer, but attention of few queries is up
# to a fifth faster.
inlined = numba.njit(**_DEVICE_OPTIONS, inline="always")


@cache
def _origin(folder: Path) -> str:
    """Return a hash of what a folder's kernels are made of: its files, the files beside this one, and the processor."""
    parts = [cpu_name(), *sorted(name for name, is_set in cpu_features().items() if is_set)]
    for source_folder in (folder, Path(__file__).parent):
        for path in sorted(source_folder.glob("*.py")):
            parts.append(path.read_text())
    return f"{zlib.crc32(chr(0).join(parts).encode()):08x}"


class Kernel:
    """Machine code of a function of one int64 array, see `NumbaLaunch`. All threads of a call run it side by side.

    numba keeps the code beside the file or in the user's cache. It compiles again after a file of the kernel's folder
    or of this folder changes, and for another processor.
    """

    def __init__(
        self, body: Callable[[Any], None], *, name: str = "", functions: Mapping[str, Any] | None = None
    ) -> None:
        """Keep the function.

        Args:
            body: the function.
            name: tells kernels apart that have one body.
            functions: device functions that the body calls by these global names. A closure over them would be compiled
                again in every process, because numba's cache compares closures by values that change.
        """
        if functions is not None:
            qualname = f"{body.__qualname__}_{name}"
            body = FunctionType(body.__code__, {**body.__globals__, **functions})
            body.__qualname__ = qualname
        self._body = body
        # numba looks cached code up by this name, and checks only the function's own file. So add a hash of all
        # sources. Two processors that compile at once into one folder would also take one file for both their codes,
        # and the index of one of them would then name the code of the other.
        body.__qualname__ += f"_{_origin(Path(body.__code__.co_filename).parent)}"

    @cached_property
    def address(self) -> int:
        """Address of the machine code; the first use compiles it or loads it from the cache."""
        options = {"fastmath": FASTMATH, "error_model": "numpy"}
        signature = types.void(types.CPointer(types.int64))
        try:
            compiled = numba.cfunc(signature, cache=True, **options)(self._body)
        except (OSError, RuntimeError) as error:  # there is no writable cache folder
            _LOG.info("%s is compiled anew in every process: %s", self._body.__name__, error)
            compiled = numba.cfunc(signature, **options)(self._body)
        address: int = compiled.address
        return address


def bits(number: float) -> int:
    """Return a float as an integer argument; `as_float` converts it back."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


@intrinsic(prefer_literal=True)
def unpack(_typing_context: Any, arguments: types.Type, count: types.Type) -> Any:
    """Return the first `count` arguments of a kernel, a literal number, as a tuple."""
    kind = types.UniTuple(types.int64, count.literal_value)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        elements = [builder.load(builder.gep(args[0], [context.get_constant(types.intp, i)])) for i in range(len(kind))]
        return context.make_tuple(builder, kind, elements)

    return kind(arguments, count), generate


@device_function
def as_float(argument):
    return np.float32(np.int64(argument).view(np.float64))


@device_function
def share(count):
    """Return this thread's share of `count` items: the first, and one past the last."""
    thread, threads = np.int64(_thread()), np.int64(_num_threads())
    return count * thread // threads, count * (thread + 1) // threads


@device_function
def rounded_up(number, step):
    return (number + step - 1) // step * step


@device_function
def thread_index():
    return np.int64(_thread())


def _pointer(element: types.Type) -> Any:
    @intrinsic
    def pointer(_typing_context: Any, address: types.Type) -> Any:
        kind = types.CPointer(element)
        return kind(types.int64), lambda context, builder, _, args: builder.inttoptr(
            args[0], context.get_value_type(kind)
        )

    return pointer


# Addresses as pointers to elements; bfloat16 elements are handled as 16 bits.
floats, bfloats, uint8s = (_pointer(kind) for kind in (types.float32, types.uint16, types.uint8))
int8s, int32s, int64s = (_pointer(kind) for kind in (types.int8, types.int32, types.int64))


def load(pointer: Any, index: int) -> float:
    """Return an element as float32."""
    raise NotImplementedError


def store(pointer: Any, index: int, value: float | np.float32) -> None:
    """Write a float32, rounded to the nearest, ties to even."""
    raise NotImplementedError


@overload(load, inline="always")
def _load(pointer, index):
    if pointer.dtype == types.float32:
        return lambda pointer, index: pointer[index]
    return lambda pointer, index: np.uint32(np.uint32(pointer[index]) << np.uint32(16)).view(np.float32)


@overload(store)
def _store(pointer, index, value):
    if pointer.dtype == types.float32:

        def write(pointer, index, value):
            pointer[index] = value

    else:

        def write(pointer, index, value):
            word = np.float32(value).view(np.uint32)
            rounded = np.uint32(word + np.uint32(0x7FFF) + np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1)))
            pointer[index] = np.uint16(0x7FC0) if value != value else np.uint16(rounded >> np.uint32(16))

    return write


# Bounds of x: below the first 2^x is 0, above the second it is infinite. The coefficients are of a minimax polynomial
# of 2^x on [0, 1), highest power first.
EXP2_RANGE = -127.0, 128.0
EXP2_COEFFICIENTS = 1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1


@device_function
def exp2(x):
    """Return 2^x with a relative error of 2e-7, by arithmetic alone, so that LLVM vectorises loops of it."""
    low, high = EXP2_RANGE
    c5, c4, c3, c2, c1, c0 = EXP2_COEFFICIENTS
    x = np.float32(low) if x < np.float32(low) else x
    x = np.float32(high) if x > np.float32(high) else x
    floor = np.floor(x)
    fraction = x - floor
    result = np.float32(c5)
    result = result * fraction + np.float32(c4)
    result = result * fraction + np.float32(c3)
    result = result * fraction + np.float32(c2)
    result = result * fraction + np.float32(c1)
    result = result * fraction + np.float32(c0)
    return result * np.int32((np.int32(floor) + np.int32(127)) << np.int32(23)).view(np.float32)


@device_function
def inverse_rms(x, start, size, eps):
    """Return 1 / sqrt(mean(x^2) + eps) of `size` elements from `start` on."""
    total = np.float32(0)
    for i in range(start, start + size):
        value = load(x, i)
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(size) + eps)
