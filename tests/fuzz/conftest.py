"""Parts the time of a long run among the tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if here and "FUZZ_S" in os.environ:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        os.environ["FUZZ_SHARE_S"] = str(float(os.environ["FUZZ_S"]) * workers / len(here))
