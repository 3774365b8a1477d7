"""What several tests of the cache share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def torch_backend(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Copies by PyTorch on a CPU: thousands of launches of Triton's interpreter would take minutes."""
    if device.type == "cpu":
        monkeypatch.setenv("PAGED_BACKEND", "torch")
