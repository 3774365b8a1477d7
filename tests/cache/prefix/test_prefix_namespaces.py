"""What namespaces cost, and who stays where two prompts have the same hash."""

from __future__ import annotations

from typing import Any

import pytest

from paged.cache.prefix.index import ChainHash
from tests.cache.everything import everything
from tests.cache.prefix_cache import Cache

pytestmark = pytest.mark.usefixtures("torch_backend")


def test_a_namespace_without_blocks_costs_nothing(cache: Cache) -> None:
    index = cache.manager._prefixes.index
    for tenant in range(50):
        cache.free(cache.run("a", range(9), f"tenant {tenant}"))
        assert len(index._roots) == len(index._root_of) <= 6  # 12 blocks, two published a tenant
    assert cache.found(range(9), "tenant 49") == 8
    assert cache.found(range(9), "tenant 0") == 0
    assert "tenant 49" in cache.manager.namespaces()
    cache.manager.evict(12)
    assert cache.manager.namespaces() == ()
    assert not index._root_of
    cache.free(cache.run("a", range(3), "nothing full"))
    assert cache.manager.namespaces() == ()
    assert cache.run("a", range(9), "tenant 0").num_cached_tokens == 0
    assert cache.found(range(9), "tenant 0") == 8


def _position(self: ChainHash, previous: Any, blocks: Any) -> list[int]:
    """All prompts of a namespace have the same hashes."""
    return [previous + 1 + i for i in range(len(blocks))]


def test_the_older_of_two_that_collide_stays(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChainHash, "extend", _position)
    first = cache.run("a", range(9))
    before = everything(cache.manager)["published"]
    second = cache.run("b", range(20, 29))
    assert everything(cache.manager)["published"] == before
    assert (cache.found(range(9)), cache.found(range(20, 29))) == (8, 0)
    cache.check(first, second)
    cache.free(first)
    assert cache.found(range(9)) == 8
    cache.manager.evict(2)
    cache.free(second)
    cache.run("c", range(20, 29))
    assert cache.found(range(20, 29)) == 8
