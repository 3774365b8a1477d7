"""What tests of packed checkpoints share."""

from pathlib import Path

import pytest

from tests.models.quantization.checkpoints import Folders, write


@pytest.fixture
def folders(request: pytest.FixtureRequest, packable: Path, tmp_path: Path) -> Folders:
    """The format that a test names."""
    return write(request.param, packable, tmp_path)
