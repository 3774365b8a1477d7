"""Namespaces and hashes that are alike, or are not what they were: whatever is compared besides keeps prompts apart."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from tests.cache.prefix_cache import Cache


class SameName:
    """Instances are different namespaces that hash to the same chain, as only their text is hashed."""

    def __repr__(self) -> str:
        return "namespace"


@pytest.mark.parametrize(("x", "y"), [("x", "y"), (None, "None"), (("m", 1), ("m", "1")), (SameName(), SameName())])
def test_namespaces_never_share(cache: Cache, x: Hashable, y: Hashable) -> None:
    first = cache.run("a", range(9), x)
    second = cache.run("b", range(9), y)
    assert second.num_cached_tokens == 0
    assert not set(first.blocks) & set(second.blocks)
    cache.manager.check_integrity()
    # Of two whose chains have the same hashes the older is findable.
    found = cache.found(range(9), x), cache.found(range(9), y)
    assert found == ((8, 0) if isinstance(x, SameName) else (8, 8))
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


class Odd:
    """A namespace of a caller's class that changes its mind, or fails, once it is in use."""

    def __init__(self, does: str) -> None:
        self.does, self.calls = does, 0

    def __hash__(self) -> int:
        self.calls += 1
        if self.does == "unhashable later" and self.calls > 1:
            raise TypeError
        return self.calls if self.does == "hash changes" else 7

    def __eq__(self, other: object) -> Any:
        if self.does == "eq raises":
            raise RuntimeError
        return np.array([True, False]) if self.does == "eq is an array" else self.does == "equals all" or self is other

    def __repr__(self) -> str:
        self.calls += self.does == "repr changes"
        return f"Odd {self.calls if self.does == 'repr changes' else 0}"


ODD = ["eq raises", "eq is an array", "equals all", "hash changes", "unhashable later", "repr changes"]


@pytest.mark.parametrize("does", ODD)
def test_namespaces_that_change_their_mind(does: str, cache: Cache) -> None:
    """Nobody else's calls fail or find anything of theirs, and nothing of them stays."""
    manager, odd = cache.manager, Odd(does)
    first = cache.run("a", range(9), odd)
    assert first.namespace is odd
    assert manager.namespaces() == (odd,) or does == "eq raises"
    for namespace in (None, "t"):
        other = cache.run("b", range(9), namespace)
        assert other.num_cached_tokens == 0
        cache.free(other)
    manager.forget_namespace("t")
    other = manager.allocate("d", token_ids=list(range(9)), namespace=Odd(does))
    assert other.num_cached_tokens == (8 if does == "equals all" else 0)
    for handle in manager.handles():
        manager.free(handle)
    manager.clear_prefix_cache()
    manager.check_integrity()
    assert not manager._prefixes.index._roots
