"""`paged info`: the backend and its reason, and features that follow them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged
from paged.executors.cpu_threads import choose_threads
from paged.executors.thread_waits import wait_text
from paged.kernels.core.device import has_numba
from paged.kernels.cpu.products import choose_product, this_cpu


def test_backend_and_its_reason(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for interpret, backend, name, reason in (
        ("1", "", "triton", "Triton's interpreter"),
        ("0", "", "torch", "no GPU: PyTorch operations"),
        ("1", "torch", "torch", "PAGED_BACKEND=torch"),
        ("1", "numba", "numba", "PAGED_BACKEND=numba"),
        ("0", "triton", "none", "CPU tensors need TRITON_INTERPRET=1"),
    ):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.setenv("PAGED_BACKEND", backend)
        found = run("info")
        assert found["backend"]["name"] == name
        assert reason in found["backend"]["reason"]
        supported = {feature["name"]: feature["supported"] for feature in found["features"]}
        assert supported["bfloat16"]
        assert not supported["native fp8"]
        assert supported["numba kernels"] == (name in ("torch", "numba") and backend != "torch" and has_numba())
        for form in ("int8", "int4"):
            chosen = choose_product(form, (1, 0), 128, 128, form == "int8", this_cpu())
            (feature,) = (one for one in found["features"] if one["name"] == f"{form} on the CPU")
            assert feature["supported"] == (chosen != "unpacked")
            assert f": {chosen}" in feature["reason"]
    assert found["versions"]["paged"] == paged.__version__
    choice = choose_threads(torch.get_num_threads())
    device = found["device"]
    assert (device["cpu_threads"], device["cpu_threads_reason"]) == (choice.num_threads, choice.reason)
    assert device["cpu_threads_wait"] == wait_text()
