"""Reads of files come in time, however busy the machine is."""

import pytest

from paged.cache.tiers import files
from tests.deadline import HANG_S


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", HANG_S)
    monkeypatch.setattr(files, "HANG_S", HANG_S)
