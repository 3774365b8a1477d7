"""One set of processes for all tests, and others for those that lose some."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.executors.parallel.followers import Followers


@pytest.fixture(scope="session")
def followers() -> Iterator[Followers]:
    with closing(Followers(3)) as started:
        yield started


@pytest.fixture
def mortals() -> Iterator[Followers]:
    with closing(Followers(2)) as started:
        yield started


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the other processes: a step of Triton's interpreter takes seconds."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
