"""PAGED_JIT: what a compilation is once serving began. Triton's hook is called as its JIT calls it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="without it nothing is compiled")

import torch
import triton

from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.common.compilation import serving_begins, warming_up


@pytest.fixture(autouse=True)
def _no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)


def _compile(name: str = "_rms_norm_kernel", module: str = "paged.kernels.layers.rms_norm", **changes: Any) -> Any:
    fn = SimpleNamespace(name=name, module=module)
    given = {"key": "", "repr": f"{name}(x: *fp16)", "fn": fn, "compile": {}, "is_manual_warmup": False}
    hook = triton.knobs.runtime.jit_cache_hook
    return None if hook is None else hook(**given | {"already_compiled": False} | changes)


def test_allowed_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("PAGED_JIT", raising=False)
    serving_begins()
    assert _compile() is None
    assert not caplog.records


def test_one_warning_a_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PAGED_JIT", "warn")
    _compile()
    serving_begins()
    with caplog.at_level(logging.WARNING):
        for name in ("_rms_norm_kernel", "_rms_norm_kernel", "_moe_sum_kernel"):
            _compile(name)
    assert [record.message.count("_rms_norm_kernel(x: *fp16)") for record in caplog.records] == [1, 0]


def test_an_error_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_JIT", "error")
    assert _compile() is None, "before serving"
    serving_begins()
    serving_begins()
    with pytest.raises(UnsupportedError, match=r"_rms_norm_kernel.*x: \*fp16"):
        _compile()
    assert _compile(module="torch._inductor.kernel") is None, "others' kernels are theirs"
    assert _compile(is_manual_warmup=True) is None


def test_warming_up_is_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_JIT", "error")
    serving_begins()
    refused = []

    def serve() -> None:
        try:
            _compile()
        except UnsupportedError as error:
            refused.append(error)

    with warming_up():
        assert _compile() is None
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert len(refused) == 1
    with pytest.raises(UnsupportedError):
        _compile()


def test_the_hook_that_was_there_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_JIT", "warn")
    seen: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **given: seen.append(given["fn"].name) or True)
    serving_begins()
    serving_begins()
    assert _compile() is True
    assert seen == ["_rms_norm_kernel"]


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_JIT", "never")
    with pytest.raises(InvalidInputError, match="PAGED_JIT='never'"):
        serving_begins()


@pytest.mark.skipif(torch.version.hip is not None, reason="one at a time on AMD")
def test_several_are_compiled_at_once_and_before_any_launch(tmp_path: Path) -> None:
    """In a process of its own: this one may have replaced the compiler by the interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.common.compiles_ahead"],
        cwd=Path(__file__).resolve().parents[3],
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
    )
