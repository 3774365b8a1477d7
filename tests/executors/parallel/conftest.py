"""One set of processes for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.executors.parallel.followers import Followers


@pytest.fixture(scope="session")
def followers() -> Iterator[Followers]:
    started = Followers(3)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the other processes: a step of Triton's interpreter takes seconds."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
