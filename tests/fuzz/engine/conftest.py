"""What tests of the engine share: its kernels are not what is tried here, so PyTorch computes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
