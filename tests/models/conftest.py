"""What tests of models share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.families import FAMILIES, save_checkpoint


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations in place of Triton's interpreter, which takes over a second a forward. A GPU runs Triton."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("PAGED_BACKEND", "torch")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with an untied head; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(FAMILIES["llama"], folder)
    return folder
