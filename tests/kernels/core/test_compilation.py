"""PAGED_JIT: what a compilation is once serving began, with Triton's hook called as its JIT calls it."""

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="without it nothing is compiled")

import triton

from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.core.launch import serving_begins, warming_up


@pytest.fixture(autouse=True)
def _no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setenv("PAGED_JIT", "error")


def _compile(name: str = "_rms_norm_kernel", module: str = "paged.kernels.layers.rms_norm", **changes: Any) -> Any:
    fn = SimpleNamespace(name=name, module=module)
    given = {"key": "", "repr": f"{name}(x: *fp16)", "fn": fn, "compile": {}, "is_manual_warmup": False}
    hook = triton.knobs.runtime.jit_cache_hook
    return None if hook is None else hook(**given | {"already_compiled": False} | changes)


def test_one_warning_a_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And the hook that was there is called."""
    monkeypatch.setenv("PAGED_JIT", "warn")
    seen: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **given: seen.append(given["fn"].name) or True)
    serving_begins()
    serving_begins()
    names = ["_rms_norm_kernel", "_rms_norm_kernel", "_moe_sum_kernel"]
    with caplog.at_level(logging.WARNING):
        assert all(_compile(name) is True for name in names)
    assert [record.message.count("_rms_norm_kernel(x: *fp16)") for record in caplog.records] == [1, 0]
    assert seen == names


def test_an_error_names_the_kernel() -> None:
    assert _compile() is None, "before serving"
    serving_begins()
    serving_begins()
    with pytest.raises(UnsupportedError, match=r"_rms_norm_kernel.*x: \*fp16"):
        _compile()
    assert _compile(module="torch._inductor.kernel") is None, "others' kernels are theirs"
    assert _compile(is_manual_warmup=True) is None


def test_warming_up_is_of_its_thread() -> None:
    serving_begins()
    refused = []

    def serve() -> None:
        with pytest.raises(UnsupportedError):
            _compile()
        refused.append(True)

    with warming_up():
        assert _compile() is None
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    serve()
    assert len(refused) == 2


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_JIT", "never")
    with pytest.raises(InvalidInputError, match="PAGED_JIT='never'"):
        serving_begins()
