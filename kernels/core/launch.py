"""Launch kernels, again and again if need be, and compile them ahead of use.

PAGED_PDL=1 lets a kernel start before the previous one has ended, on sm_90 and newer (NVIDIA's programmatic dependent
launch). The default is 0. The kernel's programs occupy free SMs as soon as all programs of the previous kernel have
started. They wait in `wait_for_inputs` until the previous kernel has ended.

PAGED_JIT=allow (default), warn or error decides about compilations while serving. A compilation takes seconds, in which
no sequence gets a token. Serving begins with `serving_begins` and pauses within `warming_up`. A kernel that Triton
loads from its disk cache counts as a compilation, because it was not warmed up either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NamedTuple

import torch

from .compat import HAS_TRITON, TensorDescriptor, tl, triton
from .device import device_of, setting
from .errors import InvalidInputError, UnsupportedError

_CHOICES = ("allow", "warn", "error")
# State of this thread or task alone, because another one may be serving.
_IS_WARMING_UP = ContextVar("_IS_WARMING_UP", default=False)
_IS_COLLECTING = ContextVar("_IS_COLLECTING", default=False)
# collecting(): whether to skip launches and only collect their kernels for compilation.
collecting = _IS_COLLECTING.get
# Threads that compile at once. Python's lock lets no more than about 6 run, see limits.md. On AMD, LLVM may abort if it
# compiles several kernels at once.
_AT_ONCE = 6 if torch.version.hip is None else 1
# Top-level package of this project's kernels. A copy of this folder has another one.
_PACKAGE = f"{__name__.partition('.')[0]}."


class _Watch:
    """Triton's hook before a compilation. It also calls the hook that was installed before.

    warned: kernels that a warning has named.
    """

    def __init__(self, before: Any) -> None:
        self._before = before
        self.warned: set[str] = set()

    def __call__(self, **compilation: Any) -> Any:
        kernel = compilation["fn"]
        is_expected = compilation["is_manual_warmup"] or _IS_WARMING_UP.get()
        if kernel.module.startswith(_PACKAGE) and not is_expected:
            choice = _choice()
            message = f"{kernel.name} is compiled while serving, for {compilation['repr']}"
            if choice == "error":
                raise UnsupportedError(f"PAGED_JIT=error: {message}")
            if choice == "warn" and kernel.name not in self.warned:
                self.warned.add(kernel.name)
                logging.getLogger(__name__).warning("PAGED_JIT=warn: %s", message)
        if self._before is None:
            return None
        return self._before(**compilation)


def serving_begins() -> None:
    """Apply PAGED_JIT to every later compilation in the process.

    Raises:
        InvalidInputError: PAGED_JIT is not allow, warn or error.
    """
    _choice()
    if HAS_TRITON and not isinstance(triton.knobs.runtime.jit_cache_hook, _Watch):
        triton.knobs.runtime.jit_cache_hook = _Watch(triton.knobs.runtime.jit_cache_hook)


@contextmanager
def warming_up() -> Iterator[None]:
    """Allow compilations inside, even in a process that already serves."""
    token = _IS_WARMING_UP.set(True)
    try:
        yield
    finally:
        _IS_WARMING_UP.reset(token)


def run_compiled(run: Callable[[], object], track: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
    """Compile every kernel that `run` launches (see `compile_all`), then call `run`."""
    compile_all(run, track)
    run()


def compile_all(run: Callable[[], object], track: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
    """Compile every kernel that `run` launches, several at once.

    run: called with its launches skipped, so it must not wait for results of kernels. A kernel that does not compile
    raises its error when it is launched.
    track: iterates over the kernels, and may show progress.
    """

    def collect() -> None:
        _IS_COLLECTING.set(True)
        with ThreadPoolExecutor(_AT_ONCE) as pool, triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
            run()
            if kernels := list(mode.future_kernels.values()):
                for kernel in track(kernels):
                    kernel.result(ignore_errors=True)

    if HAS_TRITON:
        copy_context().run(collect)


def _choice() -> str:
    choice = setting("PAGED_JIT") or "allow"
    if choice not in _CHOICES:
        raise InvalidInputError(f"PAGED_JIT={choice!r}: expected {', '.join(map(repr, _CHOICES))}")
    return choice


Compute = Callable[[dict[str, Any]], Any]
"""Computes a bound operation: a `Launch`, a `NumbaLaunch` or a function of PyTorch. Takes tensors by the names of the
kernel's arguments."""
# Numbers of rows that together select every row tile. A tile holds a power of two of rows, at most 1,024.
ROW_COUNTS = tuple(1 << exponent for exponent in range(11))
# The first NVIDIA architecture on which a kernel can wait for the previous one: sm_90.
_FIRST_EARLY_ARCH = 90


def num_warps(block_size: int) -> int:
    """Return the warps for a row of `block_size` elements: one warp for each 512 elements."""
    return min(max(block_size // 512, 1), 16)


def tile(num_rows: int, row_size: int) -> tuple[int, int]:
    """Return rows and columns, powers of two, of a program that reads two tensors.

    A program reads at most 1,024 elements of each tensor. With 4 warps, every thread then loads 16 bytes of a 16-bit
    dtype from each.
    """
    columns = min(triton.next_power_of_2(row_size), 1024)
    return min(1024 // columns, triton.next_power_of_2(num_rows)), columns


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as [num_rows, size] with contiguous rows. Copy it if its strides do not allow a view."""
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
    """Wait until the previous kernel has ended, then let the next one start. Every kernel begins with it.

    A kernel must not load or store anything before it. It compiles to instructions only with `early_options`. Triton's
    interpreter calls it without `_semantic`.
    """
    options = getattr(getattr(_semantic, "builder", None), "options", None)
    if getattr(options, "launch_pdl", False):
        tl.extra.cuda.gdc_wait(_semantic=_semantic)
        tl.extra.cuda.gdc_launch_dependents(_semantic=_semantic)


# Mark the function as a builtin. Triton's compiler then calls it with `_semantic` where a kernel uses it.
wait_for_inputs.__triton_builtin__ = True  # type: ignore[attr-defined]


def early_options(kernel: Any, device: torch.device) -> dict[str, bool]:
    """Return the compiler options that PAGED_PDL asks for; none for a kernel without `wait_for_inputs`.

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

    In each call Triton inspects about 50 arguments to find the compiled kernel. This class does so once, which takes
    less than a sixth of the host time (see limits.md). The kernel runs on the device of its tensors, even if that is
    not the current device.
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

        arguments: kernel arguments by name.
        boxes: tensors that the kernel takes as descriptors.
        options: compiler options, such as num_warps.
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
        """Launch with these arguments added, on the current stream. Names that the kernel does not have are ignored.

        The arguments must have the signatures of the first call, and the same arguments must be None.
        """
        if self._run is None or collecting():
            self._launch_first(tensors)
            return
        ordered = self._ordered.copy()
        for position, name in self._positions:
            ordered[position] = tensors[name]
        for position, name, fields in self._descriptors:
            ordered[position] = descriptor = object.__new__(TensorDescriptor)
            descriptor.__dict__ = {**fields, "base": tensors[name]}  # skip the constructor's checks, which take 10 us
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
            if is_skipped:
                return
            if compiled is None:  # the interpreter has no compiled kernel
                run = partial(self._kernel.run, grid=self._grid, warmup=False)
            else:
                run = compiled.__getitem__(self._grid)  # [] would miss a kernel compiled ahead by another thread
        self._device = on.get_device()
        # Do not keep this call's tensors: a plan lives as long as its step, and would keep its first layer's tensors.
        self._ordered = [None if name in tensors else arguments[name] for name in names]
        places = [(position, name) for position, name in enumerate(names) if name in tensors]
        self._positions = [place for place in places if place[1] not in described]
        self._descriptors = [
            (position, name, {**vars(described[name]), "base": None}) for position, name in places if name in described
        ]
        self._run = run


class Box(NamedTuple):
    """How the copy engine fetches a tensor: the tensor's shape and strides, and the size of a box.

    Elements of a box that lie outside of the tensor become 0.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    size: Sequence[int]

    def describe(self, tensor: torch.Tensor) -> Any:
        return TensorDescriptor(tensor, *map(list, self))


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch a kernel once, with these kernel arguments and compiler options."""
    Launch(kernel, grid, arguments)({})
