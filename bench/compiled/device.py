"""The compiled device: while it is on, the project's Triton kernels run as compiled PTX, on CPU tensors.

with CompiledDevice("sm_90") as device:
    paged.rms_norm(torch.randn(3, 100), torch.ones(100))
assert not device.report.lines()

The process must not have TRITON_INTERPRET=1, because Triton then has no kernels to compile.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

import paged
from paged.bench.compiled.counters import Counters
from paged.bench.compiled.driver import SCHEDULES, Settings, driver
from paged.bench.compiled.report import Report
from paged.bench.compiled.translate import Translation
from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core import compat
from paged.kernels.core import device as devices

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_120")


class CompiledDevice:
    """Runs Triton kernels for an architecture, see `driver.Settings`."""

    def __init__(
        self,
        arch: str,
        *,
        num_sms: int = 8,
        schedule: str = "random",
        seed: int = 0,
        counts: bool = False,
        report: Report | None = None,
    ) -> None:
        """Check the settings. report: takes what runs find; None makes one.

        Raises:
            InvalidInputError: an unknown architecture or schedule.
            UnsupportedError: Triton is missing, or interprets kernels in this process.
        """
        if arch not in ARCHS:
            raise InvalidInputError(f"compiled {arch}: expected one of {', '.join(ARCHS)}")
        if schedule not in SCHEDULES:
            raise InvalidInputError(f"schedule {schedule}: expected one of {', '.join(SCHEDULES)}")
        if not compat.HAS_TRITON or compat.interpreting():
            raise UnsupportedError("compiled kernels need Triton, and a process without TRITON_INTERPRET=1")
        self._settings = Settings(arch, num_sms, schedule, seed, None, counts, report or Report())

    @property
    def arch(self) -> str:
        return self._settings.arch

    @property
    def report(self) -> Report:
        return self._settings.report

    @property
    def counters(self) -> dict[str, Counters]:
        """What kernels did, by name, if `counts` was asked for."""
        return self._settings.counters

    @property
    def translations(self) -> list[Translation]:
        """The kernels that were loaded, in order."""
        return self._settings.translations

    @contextmanager
    def ordered(self, order: Callable[[str, int], Sequence[int] | None]) -> Iterator[None]:
        """Let CTAs run one after the other, in the order that a kernel's name and number of CTAs give."""
        self._settings.order = order
        try:
            yield
        finally:
            self._settings.order = None

    def __enter__(self) -> CompiledDevice:
        _import_kernels()
        chip = devices.Device(self.arch, self._settings.num_sms)
        self._stack = ExitStack()
        # Fill uninitialised memory with NaN, so that a result which is not written is no result of an earlier call.
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
        self._stack.callback(torch.use_deterministic_algorithms, is_deterministic, warn_only=is_warning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self._stack.callback(_forget)
        _forget()
        # A cubin is not needed, and for it a cache of its own: Triton's key does not know that it is PTX.
        cache = f"{triton.knobs.cache.dir}-compiled"
        self._stack.callback(setattr, triton.knobs.cache, "dir", triton.knobs.cache.dir)
        triton.knobs.cache.dir = cache
        for patch in (
            mock.patch.object(CUDABackend, "make_cubin", lambda _self, source, *_: source.encode()),
            mock.patch.object(triton.runtime.driver, "_active", driver(self._settings)),
            mock.patch.object(devices, "interpreting", return_value=True),
            mock.patch.object(devices, "INTERPRETER", chip),
        ):
            self._stack.enter_context(patch)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _import_kernels() -> None:
    """Import all kernels, so that `_forget` sees what they keep."""
    for module in pkgutil.walk_packages(paged.kernels.__path__, "paged.kernels."):
        if ".cpu" not in module.name:
            importlib.import_module(module.name)


def _forget() -> None:
    """Forget tiles, launches and compiled kernels of another device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("paged."):
            for value in list(vars(module).values()):
                _forget_value(value)


def _forget_value(value: Any) -> None:
    clear = getattr(value, "cache_clear", None)
    if callable(clear):
        clear()
    if isinstance(value, triton.runtime.jit.JITFunction):
        value.device_caches.clear()
