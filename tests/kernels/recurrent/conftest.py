"""This family has PyTorch implementations alone so far."""

import pytest


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    return "torch"
