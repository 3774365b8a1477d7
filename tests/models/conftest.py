"""What tests of models share."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import llama_checkpoint as llama_checkpoint
from tests.models.checkpoints import llama_folder as llama_folder
from tests.models.families import PACKABLE, save_checkpoint
from tests.operations import check_bound_calls


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operations in place of Triton's interpreter, which takes over a second a forward. A GPU runs Triton."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("PAGED_BACKEND", "torch")


@pytest.fixture
def bound_calls_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `check_bound_calls`."""
    check_bound_calls(monkeypatch)


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the Llama that a test may change."""
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


@pytest.fixture(scope="session")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights every format packs."""
    folder = tmp_path_factory.mktemp("packable")
    save_checkpoint(PACKABLE["llama"], folder)
    return folder
