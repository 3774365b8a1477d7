"""Checkpoints and an adapter, made once for the tests of a file."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.models.lora.folders import Adapter


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's checkpoint."""
    from tests.models.families import FAMILIES, save_checkpoint

    root = tmp_path_factory.mktemp("families")

    @cache
    def saved(name: str) -> Path:
        save_checkpoint(FAMILIES[name], root / name)
        return root / name

    return saved


@pytest.fixture(scope="module")
def folder(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("llama")


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter for `folder`."""
    return Adapter(("q_proj", "down_proj")).save(tmp_path_factory.mktemp("adapters") / "a", folder)
