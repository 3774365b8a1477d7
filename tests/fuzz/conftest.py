"""What computes here, and the parts of a long run's time that the tests by `fuzz` get."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_drawn = sum(hasattr(getattr(item, "function", None), "draws") for item in items)
    if num_drawn and "FUZZ_S" in os.environ:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        os.environ["FUZZ_SHARE_S"] = str(float(os.environ["FUZZ_S"]) * workers / num_drawn)


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch, unless a test is one of kernels."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
