"""Blocks that have the same hash, or hashes of other prompts: whatever is compared besides keeps prompts apart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from paged import CacheCleared, OutOfBlocksError
from paged.cache.prefix.chain import TokenChain
from paged.cache.prefix.chain_hash import ChainHash, Sha256Chain
from paged.cache.prefix.index import PrefixIndex
from tests.cache.event_mirror import Mirror
from tests.cache.prefix_cache import BLOCK, Cache
from tests.cache.snapshot import snapshot

pytestmark = pytest.mark.usefixtures("torch_backend")


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


def _constant(self: ChainHash, previous: Any, blocks: Any) -> list[int]:
    return [7] * len(blocks)


def _three_values(self: ChainHash, previous: Any, blocks: Any) -> list[int]:
    return [int(block.sum()) % 3 for block in blocks]


def _ignores_parents(self: ChainHash, previous: Any, blocks: Any) -> list[int]:
    return [hash(tuple(block.tolist())) for block in blocks]


@pytest.mark.parametrize("forged", [None, _constant, _three_values, _ignores_parents])
@pytest.mark.parametrize("algorithm", ["fast", "sha256"])
def test_random_calls_serve_right_data_and_tell_every_change(
    forged: Callable[..., list[int]] | None, algorithm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of mostly zeros meet often; with forged hashes every block collides with others, in any order."""
    if forged is not None:
        monkeypatch.setattr(ChainHash if algorithm == "fast" else Sha256Chain, "extend", forged)
    rng = random.Random(1)
    cache = Cache(device=device, prefix_hash=algorithm, num_swap_blocks=8)
    manager, mirror = cache.manager, Mirror(cache.manager)
    done: Counter[str] = Counter()
    for step in range(400):
        running = [handle for handle in cache.tokens if not handle.is_swapped]
        names = ["begin", "run", "run", "evict", "clear"] + ["feed", "free", "truncate", "fork", "swap"] * 2
        name = rng.choice(names if cache.tokens else names[:5])
        if name == "clear" and rng.random() < 0.7:
            continue
        before = snapshot(cache.manager)
        tokens = [int(rng.random() < 0.1) for _ in range(rng.randrange(1, 18))]
        try:
            if name in ("begin", "run"):
                namespace = rng.choice("xxxy")
                handle = cache.begin(step, tokens, namespace)
                done["hit"] += handle.num_tokens > 0
                if name == "run":
                    before = snapshot(cache.manager)
                    cache.feed(handle, tokens[handle.num_tokens :])
            elif name == "evict":
                done["evicted"] += manager.evict(rng.randrange(4))
            elif name == "clear":
                manager.clear_prefix_cache()
            elif name == "swap":
                handle = rng.choice(list(cache.tokens))
                (manager.swap_in if handle.is_swapped else manager.swap_out)(handle)
            elif running:
                handle = rng.choice(running)
                if name == "feed":
                    cache.feed(handle, tokens[:5])
                elif name == "free":
                    cache.free(handle)
                elif name == "truncate":
                    cache.truncate(handle, rng.randint(0, handle.num_tokens))
                else:
                    cache.tokens[manager.fork(handle, step)] = list(cache.tokens[handle])
            done[name] += 1
        except OutOfBlocksError:
            assert snapshot(cache.manager) == before
            done["refused"] += 1
            handle = rng.choice(list(cache.tokens))
            cache.free(handle)
        running = [handle for handle in cache.tokens if not handle.is_swapped]
        if running:
            cache.check(*running)
        manager.check_integrity()
        assert mirror.hashes == cache.hashes()
    if forged is None:  # else a chain can displace its own block before that was told of
        assert not mirror.unknown
    assert sum(isinstance(event, CacheCleared) for event in mirror.events) == done["clear"]
    assert min(done[name] for name in ("begin", "run", "feed", "truncate", "fork", "swap", "refused", "clear")) > 0
    assert done["hit"] > (5 if forged is None else 0)


def _publish_in_turn(index: PrefixIndex, blocks: list[int], chain: TokenChain) -> list[tuple[int, Any]]:
    """Up to a collision; behind one, blocks that were published before only lose that."""
    displaced = []
    for position, block in enumerate(blocks):
        if len(chain.serials) == position:
            displaced += index.publish([block], chain, "x")
        elif block in index.published:
            displaced += index.forget([block])
    return displaced


@pytest.mark.parametrize("forged", [None, _constant, _three_values, _ignores_parents])
@pytest.mark.parametrize("seed", range(10))
def test_publishing_many_blocks_is_publishing_one_after_the_other(
    forged: Callable[..., list[int]] | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of up to nine blocks that begin alike, some in blocks of an earlier one."""
    if forged is not None:
        monkeypatch.setattr(ChainHash, "extend", forged)
    rng = random.Random(seed)
    at_once, in_turn = PrefixIndex(60, BLOCK, "fast"), PrefixIndex(60, BLOCK, "fast")
    prompts = [[int(rng.random() < 0.05) for _ in range(rng.randrange(9 * BLOCK))] for _ in range(12)]
    for prompt in prompts:
        blocks = rng.sample(range(1, 61), len(prompt) // BLOCK)
        first, second = TokenChain(prompt.copy()), TokenChain(prompt.copy())
        displaced = at_once.publish(blocks, first, "x")
        assert displaced == _publish_in_turn(in_turn, blocks, second)
        assert first == second
        for index in (at_once, in_turn):
            index.check()
        assert all(at_once.match(known, "x") == in_turn.match(known, "x") for known in prompts)
