"""What tests of packed checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.families import save_checkpoint
from tests.models.quantization.checkpoints import CONFIG, Folders, write


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(CONFIG, folder)
    return folder


@pytest.fixture
def folders(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Folders:
    return write(request.param, base, tmp_path)
