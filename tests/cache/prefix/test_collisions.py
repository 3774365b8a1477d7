"""Namespaces and hashes that are alike: whatever is compared besides keeps prompts apart."""

from collections.abc import Hashable

import pytest

from tests.cache.prefix_cache import Cache


@pytest.mark.parametrize(("x", "y"), [("x", "y"), (None, "None"), (("m", 1), ("m", "1"))])
def test_namespaces_never_share(cache: Cache, x: Hashable, y: Hashable) -> None:
    first = cache.run("a", range(9), x)
    second = cache.run("b", range(9), y)
    assert second.num_cached_tokens == 0
    assert not set(first.blocks) & set(second.blocks)
    cache.manager.check_integrity()
    assert (cache.found(range(9), x), cache.found(range(9), y)) == (8, 8)
    for seq_id, namespace in (("c", x), ("d", y)):
        third = cache.begin(seq_id, range(9), namespace)
        assert not set(third.blocks[:2]) & set((second if namespace is x else first).blocks)


def test_a_namespace_without_blocks_costs_nothing(cache: Cache) -> None:
    index = cache.manager._prefixes.index
    for tenant in range(50):
        cache.free(cache.run("a", range(9), f"tenant {tenant}"))
        # Of 12 blocks, two are published a tenant.
        assert len(index._roots) == len(index._root_of) <= 6
    assert (cache.found(range(9), "tenant 49"), cache.found(range(9), "tenant 0")) == (8, 0)
    assert "tenant 49" in cache.manager.namespaces()
    cache.manager.evict(12)
    assert cache.manager.namespaces() == ()
    assert not index._root_of
    cache.free(cache.run("a", range(3), "nothing full"))
    assert cache.manager.namespaces() == ()
    assert cache.run("a", range(9), "tenant 0").num_cached_tokens == 0
    assert cache.found(range(9), "tenant 0") == 8
