"""Executors run many forwards: on a CPU they take the PyTorch backend unless a test asks for both backends."""

import pytest
import torch

from tests.models.checkpoints import llama_checkpoint as llama_checkpoint
from tests.models.checkpoints import llama_folder as llama_folder


@pytest.fixture(autouse=True)
def _fast_on_cpu(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setenv("PAGED_BACKEND", "torch")
