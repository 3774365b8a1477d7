"""Set before anything imports triton: without a GPU the kernels run in Triton's interpreter, on CPU tensors."""

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paged  # noqa: F401  before torch, whose threads then wait as they do for users

# isort: split
import pytest
import torch
from hypothesis.internal.conjecture import providers

from tests import headroom

# An architecture, such as sm_90: kernels run as compiled for it, on the CPU; see docs/compiled.md.
COMPILED = os.environ.get("COMPILED")
if COMPILED:
    os.environ["TRITON_INTERPRET"] = "0"
elif not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Hypothesis also draws numbers and texts of the modules that are imported, so that what a test draws would depend on
# the tests before it.
_NO_CONSTANTS = providers._local_constants
providers._get_local_constants = lambda: _NO_CONSTANTS


def _patch_triton_once_a_launch() -> None:
    """Have Triton's interpreter replace the functions of its language once a launch, and put them back. By itself it
    does so anew in every call of a device function, for 0.4 of its time, and leaves some of them replaced."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})

    def launch_patched(*args: Any, **kwargs: Any) -> Any:
        scope = patch(language)
        try:
            return launch(*args, **kwargs)
        finally:
            scope.restore()

    interpreter.GridExecutor.__call__ = launch_patched
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_triton_once_a_launch()
# Two test processes share two cores, and the tensors of tests gain nothing from threads: on a busy machine waiting for
# them took ten times as long.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_DEVICE_LOST = 9  # an exit code that pytest does not have


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--headroom", metavar="FILE", type=Path, help="write every test's error / budget")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(headroom.Plugin(None if is_worker else config.getoption("--headroom")))
    if COMPILED:
        from tests.compiled.plugin import Plugin

        config.pluginmanager.register(Plugin(COMPILED))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of two processes begins with half of the tests marked long, as each is dealt half of the list: where they
    came last, one process ran them one after the other while the other was idle, minutes in all."""
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    middle = len(others) // 2
    items[:] = [*long[::2], *others[:middle], *long[1::2], *others[middle:]]


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what exists by now: to look through 900,000 objects takes 0.5 s each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Where a test has left the GPU unusable for the process, the others must run in another."""
    if DEVICE == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{nodeid} lost the device: {error}", returncode=_DEVICE_LOST)


@pytest.fixture(autouse=True)
def caches_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of bookkeeping name no device; those of kernels name theirs."""
    monkeypatch.setattr("paged.cache.tensors.default_device", lambda: torch.device("cpu"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tensors of a test live: the GPU where there is one."""
    return torch.device(DEVICE)


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test through the Triton kernels and through their PyTorch implementations."""
    monkeypatch.setenv("PAGED_BACKEND", request.param)
    return str(request.param)


@pytest.fixture
def frozen_objects() -> None:
    """Leaves what exists out of garbage collections, as a server does with what it begins with: looking through the
    objects of earlier tests takes up to 1.2 s, which a test that measures time must not count."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
