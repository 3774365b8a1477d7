"""Checkpoints that many tests read and none changes, saved once."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model of a Llama with an untied head, and its folder."""
    from tests.models.families import FAMILIES, save_checkpoint

    folder = tmp_path_factory.mktemp("llama")
    return save_checkpoint(FAMILIES["llama"], folder), folder


@pytest.fixture(scope="session")
def llama_folder(llama_checkpoint: tuple[Any, Path]) -> Path:
    return llama_checkpoint[1]
