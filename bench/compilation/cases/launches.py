"""List the launches that an operation makes on a target, without a GPU, to make compile cases of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

import paged
from paged.bench.compilation.cases.case import EVERY_CASE, NUM_SMS, CompileCase
from paged.kernels.core import device
from paged.kernels.core import ids as id_checks
from paged.kernels.core.launch import Box, Launch

# Name in Triton's signatures -> dtype. Kernels take "b8", and two numbers a byte, as "u8".
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "i1": torch.bool,
    "i8": torch.int8,
    "u8": torch.uint8,
    "b8": torch.bits8,
    "u4x2": torch.bits4x2,
    "e2m1x2": torch.float4_e2m1fn_x2,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}
_INT32_MAX = 2**31 - 1
# Size arguments that are compiled as divisible by 16, like strides, because real launches have such values.
_ALIGNED_SIZES = ("K", "vocab_size", "words_per_block")
ELEMENTS = {dtype: kind for kind, dtype in DTYPES.items()}


class SeenLaunch(NamedTuple):
    """A kernel, its arguments by name, the arguments that it takes as boxes, and the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    boxes: Mapping[str, Box]
    options: dict[str, Any]


def empty(kind: str, *size: int) -> torch.Tensor:
    """Return a tensor for launches that never read or write it."""
    return torch.empty(size, dtype=DTYPES[kind])


@functools.cache
def _asking_modules() -> list[ModuleType]:
    """Load all operations, and return the modules that ask for a device's properties."""
    for name in dir(paged):
        getattr(paged, name)
    return [module for module in sys.modules.values() if vars(module).get("device_of") is device.device_of]


def launches_of(target: str, operation: Callable[..., object], *args: Any, **kwargs: Any) -> list[SeenLaunch]:
    """Return the launches of a call on one of TARGETS. Nothing runs, so the results are undefined.

    The call's tensors lie on the CPU; ids in them are not checked.
    """
    launches: list[SeenLaunch] = []
    chip = device.Device(target, NUM_SMS[target])
    stack = ExitStack()

    def replace(owner: object, name: str, function: Callable[..., Any]) -> None:
        stack.enter_context(mock.patch.object(owner, name, function))

    def note(launch: Launch, tensors: Mapping[str, Any]) -> None:
        # Triton refuses a fixed argument that a kernel does not have. Its interpreter does not.
        unknown = launch._arguments.keys() - {*launch._kernel.arg_names, "num_warps", "num_stages"}
        assert not unknown, f"{launch._kernel} takes no {unknown}"
        arguments = {**launch._arguments, **tensors}
        options: dict[str, Any] = dict(launch._options)
        for name in ("num_warps", "num_stages"):
            if name in arguments:  # an argument of `launch` itself
                options[name] = arguments[name]
        launches.append(SeenLaunch(launch._kernel, arguments, launch.boxes, options))

    with stack:
        replace(Launch, "__call__", note)
        replace(device, "interpreting", lambda: True)
        replace(id_checks, "checks_on_host", lambda *_, **__: False)
        for module in _asking_modules():
            replace(module, "device_of", lambda _: chip)
        backend = device._FORWARD.set(device.Backend("triton", wants_numba=False, checks=""))
        stack.callback(device._FORWARD.reset, backend)
        operation(*args, **kwargs)
    return launches


def launch_of(kernel: Any, target: str, operation: Callable[..., object], *args: Any, **kwargs: Any) -> SeenLaunch:
    """Return the last launch of a kernel in a call."""
    launches = launches_of(target, operation, *args, **kwargs)
    return [launch for launch in launches if launch.kernel is kernel][-1]


def launch_case(
    name: str, launch: SeenLaunch, ones: tuple[str, ...] = (), *, aligned: tuple[str, ...] | None = None, **options: Any
) -> CompileCase:
    """Return the case of a launch.

    ones: arguments that are 1, so that the launcher makes constants of them. aligned: see
    `CompileCase.divisible_by_16`; by default strides and some sizes. options: fields of `CompileCase`.
    """
    constexprs: dict[str, Any] = {}
    signature: dict[str, str] = {}
    annotations = launch.kernel.fn.__annotations__
    for argument in launch.kernel.arg_names:
        value = launch.arguments.get(argument)
        signature[argument] = "constexpr"
        if argument in ones:
            constexprs[argument] = 1
        elif value is None or "constexpr" in str(annotations.get(argument)):
            constexprs[argument] = value
        elif argument in launch.boxes:
            signature[argument] = f"tensordesc<{ELEMENTS[value.dtype]}{list(launch.boxes[argument].size)}>"
        elif isinstance(value, torch.Tensor):
            signature[argument] = f"*{ELEMENTS[value.dtype]}"
        elif isinstance(value, float):
            signature[argument] = "fp32"
        elif abs(value) > _INT32_MAX:
            signature[argument] = "i64"
        else:
            signature[argument] = "i32"
    if aligned is None:
        varying = getattr(launch.kernel, "do_not_specialize", ())  # the interpreter's kernels lack the attribute
        sizes = []
        for argument, kind in signature.items():
            is_size = argument.startswith("stride_") or argument in _ALIGNED_SIZES
            if kind == "i32" and is_size and argument not in varying:
                sizes.append(argument)
        aligned = tuple(sizes)
    return CompileCase(name, launch.kernel, signature, constexprs, divisible_by_16=aligned, **launch.options, **options)


def single_case(
    name: str, operation: Callable[..., object], *args: Any, targets: tuple[str, ...] = EVERY_CASE, **kwargs: Any
) -> CompileCase:
    """Return the case of the single launch that a call makes, the same on all of its targets."""
    (launch,) = launches_of(targets[0], operation, *args, **kwargs)
    return launch_case(name, launch, targets=targets)
