"""Runs tests on kernels as compiled for a GPU: COMPILED=sm_90 pytest tests/kernels."""

from collections.abc import Iterator

import pytest

from paged.bench.compiled.device import CompiledDevice


class Plugin:
    """Puts every test on a compiled device. A fault of memory or order fails the test, whatever its result is."""

    def __init__(self, arch: str) -> None:
        self.device = CompiledDevice(arch)

    def pytest_sessionstart(self) -> None:
        self.device.__enter__()

    def pytest_sessionfinish(self) -> None:
        self.device.__exit__()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self.device.report.clear()
        result = yield
        faults = self.device.report.lines()
        assert not faults, "\n".join(faults)
        return result
