"""What several tests of the cache share."""

import pytest
import torch

from paged.cache.guard import CacheGuard
from paged.cache.manager import PagedKvCacheManager
from paged.errors import PagedError
from tests.cache.prefix_cache import Cache
from tests.cache.random_kv import make_manager


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Without the fixture `backend`, PyTorch copies on a CPU: launches of Triton's interpreter would take minutes."""
    if device.type == "cpu":
        monkeypatch.setenv("PAGED_BACKEND", "torch")


@pytest.fixture(autouse=True)
def _refusals_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call checks everything before it changes anything: where it refuses, there is nothing to roll back."""
    leave = CacheGuard.__exit__

    def check_and_leave(guard: CacheGuard, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        start = guard._marks[-1][1]
        if exc_type is not None and issubclass(exc_type, PagedError):
            assert guard.rollback[start:] == []
        leave(guard, exc_type, *exc_info)

    monkeypatch.setattr(CacheGuard, "__exit__", check_and_leave)


@pytest.fixture
def cache(device: torch.device) -> Cache:
    """A small cache whose contents are known."""
    return Cache(device=device)


@pytest.fixture
def manager(device: torch.device) -> PagedKvCacheManager:
    """Six blocks of four tokens, in two layers."""
    return make_manager(device=device)
