"""What several tests of the cache share."""

import pytest
import torch

from paged.cache.manager import PagedKvCacheManager
from tests.cache.prefix_cache import Cache
from tests.cache.random_kv import make_manager


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Without the fixture `backend`, PyTorch copies on a CPU: launches of Triton's interpreter would take minutes."""
    if device.type == "cpu":
        monkeypatch.setenv("PAGED_BACKEND", "torch")


@pytest.fixture
def cache(device: torch.device) -> Cache:
    """A small cache whose contents are known."""
    return Cache(device=device)


@pytest.fixture
def manager(device: torch.device) -> PagedKvCacheManager:
    """Six blocks of four tokens, in two layers."""
    return make_manager(device=device)
