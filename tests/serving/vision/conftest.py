"""Towers that all tests here share."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.serving.vision.towers import Tower


@pytest.fixture(scope="session")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tower]:
    """Make a tower of a name once."""
    return cache(lambda name: Tower(name, tmp_path_factory.mktemp(name)))
