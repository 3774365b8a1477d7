"""What namespaces cost, and who stays where two prompts have the same hash."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from paged import InvalidInputError
from paged.cache.prefix.chain_hash import ChainHash
from tests.cache.prefix_cache import Cache
from tests.cache.snapshot import snapshot

pytestmark = pytest.mark.usefixtures("torch_backend")


def test_a_namespace_without_blocks_costs_nothing(cache: Cache) -> None:
    roots = cache.manager._prefixes.index._roots
    for tenant in range(50):
        cache.free(cache.run("a", range(9), f"tenant {tenant}"))
        assert (
            len(roots._by_namespace) == len(roots._by_serial) == len(roots._of_block) <= 6
        )  # 12 blocks, two published a tenant
    assert cache.found(range(9), "tenant 49") == 8
    assert cache.found(range(9), "tenant 0") == 0
    assert "tenant 49" in cache.manager.namespaces()
    cache.manager.evict(12)
    assert cache.manager.namespaces() == ()
    assert not roots._by_serial
    assert not roots._of_block
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
    before = snapshot(cache.manager)["published"]
    second = cache.run("b", range(20, 29))
    assert snapshot(cache.manager)["published"] == before
    assert (cache.found(range(9)), cache.found(range(20, 29))) == (8, 0)
    cache.check(first, second)
    cache.free(first)
    assert cache.found(range(9)) == 8
    cache.manager.evict(2)
    cache.free(second)
    cache.run("c", range(20, 29))
    assert cache.found(range(20, 29)) == 8


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
    assert cache.run("b", range(9), None).num_cached_tokens == 0
    assert cache.run("c", range(9), "t").num_cached_tokens == 0
    for handle in manager.handles()[1:]:
        cache.free(handle)
    manager.forget_namespace("t")
    other = manager.allocate("d", token_ids=list(range(9)), namespace=Odd(does))
    assert other.num_cached_tokens == (8 if does == "equals all" else 0)
    for handle in manager.handles():
        manager.free(handle)
    manager.clear_prefix_cache()
    manager.check_integrity()
    assert not manager._prefixes.index._roots.namespaces


class Pair(NamedTuple):
    of: Any


@pytest.mark.parametrize("namespace", [Pair(True), Pair(1.0), frozenset({True}), frozenset({1.0}), (frozenset({1.0}),)])
def test_floats_and_bools_in_collections(namespace: Any, cache: Cache) -> None:
    with pytest.raises(InvalidInputError, match="namespace"):
        cache.run("a", range(9), namespace)
    cache.run("b", range(9), Pair(1))
    assert cache.run("c", range(9), (np.int64(1),)).num_cached_tokens == 8
    assert cache.run("d", range(9), frozenset({1})).num_cached_tokens == 0
