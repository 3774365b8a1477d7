"""Compile kernels ahead of use; PAGED_JIT=allow (default), warn or error decides about compilations while serving.

A compilation takes seconds, in which no sequence gets a token. Serving begins with `serving_begins` and pauses within
`warming_up`. Kernels that Triton finds in its cache on disk count too: they were not warmed up either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import torch

from .compat import HAS_TRITON, triton
from .device import setting
from .errors import InvalidInputError, UnsupportedError

_CHOICES = ("allow", "warn", "error")
# Of this thread or task alone: another one may be serving.
_IS_WARMING_UP = ContextVar("_IS_WARMING_UP", default=False)
_IS_COLLECTING = ContextVar("_IS_COLLECTING", default=False)
# collecting(): whether launches are skipped, and their kernels compiled.
collecting = _IS_COLLECTING.get
# Threads, as Python's lock was free for 84 % of the time that 8 kernels took for sm_90 (passes, LLVM, ptxas of Triton
# 3.7.1); more than 6 wait for one another. On AMD LLVM may abort where it compiles several.
_AT_ONCE = 6 if torch.version.hip is None else 1
# Packages that hold kernels of ours: this one, "paged.", and what lies beside it.
_PACKAGE = f"{__name__.partition('.')[0]}."


class _Watch:
    """Triton's hook before a compilation; calls the hook that was there.

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
        InvalidInputError: PAGED_JIT holds another word.
    """
    _choice()
    if HAS_TRITON and not isinstance(triton.knobs.runtime.jit_cache_hook, _Watch):
        triton.knobs.runtime.jit_cache_hook = _Watch(triton.knobs.runtime.jit_cache_hook)


@contextmanager
def warming_up() -> Iterator[None]:
    """Allow compilations inside, even in a process that serves already."""
    token = _IS_WARMING_UP.set(True)
    try:
        yield
    finally:
        _IS_WARMING_UP.reset(token)


def run_compiled(run: Callable[[], object], track: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
    """Compile every kernel that `run` launches, see `compile_all`, then call it."""
    compile_all(run, track)
    run()


def compile_all(run: Callable[[], object], track: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> None:
    """Compile every kernel that `run` launches, several at once.

    run: called without its launches, so it must not wait for results of kernels. A kernel that does not compile raises
    when it is launched. track: iterates over the kernels, and may show progress.
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
