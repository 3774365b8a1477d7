"""Executors run many forwards: on a CPU they take the PyTorch backend unless a test asks for both backends."""

from importlib.util import find_spec

import pytest
import torch

# Without the extra `serve` its modules cannot be imported.
collect_ignore = [] if find_spec("uvicorn") else ["serving"]


@pytest.fixture(autouse=True)
def _fast_on_cpu(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setenv("PAGED_BACKEND", "torch")
