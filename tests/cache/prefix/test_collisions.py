"""Namespaces and hashes that are alike: whatever is compared besides keeps prompts apart."""

import random
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch

from paged.cache.token_chain import ChainHash
from tests.cache.prefix_cache import FORGED, Cache, forged_chain

# By their sums modulo 3, one of `FORGED`: 1, 1, 2, 1, 2, 0.
BLOCKS = [[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 2], [1, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 3]]


@pytest.mark.parametrize("forged", FORGED)
def test_blocks_of_one_hash_never_serve_each_other(forged: Callable[[Any], int], device: torch.device) -> None:
    """`Cache.run` compares the data of a hit. Prompts run one by one, or two at a time so that both stay."""
    hashes, rng, num_hits = forged_chain(forged), random.Random(1), 0
    with mock.patch.multiple(ChainHash, extend=hashes, extend_each=hashes):
        cache = Cache(device=device, num_blocks=30)
        for number in range(1000):
            blocks = rng.choices(BLOCKS[: rng.choice((3, 6))], k=rng.choice((1, 2, 3, 6)))
            tokens = list(chain.from_iterable(blocks))
            cache.manager.evict(rng.choice((0, 0, 1, 3, 30)))
            handle = cache.run(number, tokens + tokens[: rng.randint(0, 4)])
            num_hits += handle.num_cached_tokens > 0
            cache.check()
            while len(cache.tokens) > rng.randrange(3):
                cache.free(rng.choice(list(cache.tokens)))
    assert num_hits > 20


def test_a_prompt_does_not_continue_another_of_its_hash(device: torch.device) -> None:
    """Two first blocks have one hash; what follows the second is not published behind the first."""
    hashes = forged_chain(FORGED[1])
    with mock.patch.multiple(ChainHash, extend=hashes, extend_each=hashes):
        cache = Cache(device=device)
        cache.run("first", [*BLOCKS[0], 9])
        cache.run("second", [*BLOCKS[1], *BLOCKS[2], 9])
        assert cache.begin("both", [*BLOCKS[0], *BLOCKS[2], 9]).num_cached_tokens == 4


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
