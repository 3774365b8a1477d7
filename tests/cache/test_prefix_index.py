"""Prompts start from K/V computed before: what is found, whose blocks are shared, and what is forgotten when."""

from __future__ import annotations

import hashlib
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paged import (
    BlockRemoved,
    BlocksStored,
    CacheCleared,
    InvalidInputError,
    OutOfBlocksError,
    PagedKvCacheManager,
)
from paged.cache_events import CacheEvent
from paged.prefix_index import ChainHash, PrefixIndex, Sha256Chain
from paged.token_chain import TokenChain
from tests.cache.prefix_cache import BLOCK, CONFIG, Cache

pytestmark = pytest.mark.usefixtures("torch_backend")


@pytest.fixture
def cache(device: torch.device) -> Cache:
    return Cache(device=device)


def block_hash(previous: int, tokens: Sequence[int]) -> int:
    """The formula of ChainHash's docstring."""
    digests = [hashlib.sha256(f"paged {offset}".encode()).digest()[:8] for offset in range(len(tokens))]
    factors = [int.from_bytes(digest, "little") | 1 for digest in digests]
    content = sum(factor * (token + 1) for factor, token in zip(factors, tokens, strict=True))
    return (6364136223846793005 * previous + content) % (1 << 64)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 64, 65, 300])
def test_chain_hash_is_its_formula(count: int) -> None:
    rng = np.random.default_rng(count)
    blocks = rng.integers(-(1 << 31), 1 << 31, (count, BLOCK), dtype=np.int64).astype(np.int32)
    chain = ChainHash(BLOCK)
    previous = start = (1 << 64) - 5
    expected, stepwise = [], []
    for block in blocks:
        expected.append(block_hash(expected[-1] if expected else start, block.tolist()))
        previous = chain.extend(previous, block[None])[0]  # type: ignore[assignment]
        stepwise.append(previous)
    assert chain.extend(start, blocks) == stepwise == expected


def test_hashes_are_the_same_in_every_process() -> None:
    chain = ChainHash(BLOCK)
    root = chain.root(("model", "adapter"))
    assert root == 5_026_032_558_425_948_998
    assert chain.extend(root, np.array([[1, 2, 3, 4]], np.int32)) == [5_364_142_828_442_713_310]


def test_sha256_chain() -> None:
    blocks, chain = np.arange(3 * BLOCK, dtype=np.int32).reshape(-1, BLOCK), Sha256Chain()
    previous, expected = chain.root("a"), []
    for block in blocks.tolist():
        content = b"".join(token.to_bytes(4, "little") for token in block)
        previous = hashlib.sha256(previous + content).digest()  # type: ignore[operator]
        expected.append(previous)
    assert chain.extend(chain.root("a"), blocks) == expected
    assert chain.root("a") != chain.root("b")


def test_the_longest_chain_of_full_blocks_is_found(cache: Cache) -> None:
    cache.run("long", range(19))
    for length, found in ((3, 0), (4, 4), (7, 4), (8, 8), (15, 12), (16, 16), (19, 16), (30, 16)):
        assert cache.found(range(length)) == found
    assert cache.found([*range(9), 99, *range(10, 19)]) == 8
    assert cache.found(range(1, 19)) == 0
    cache.run("other end", [*range(8), 50, 51, 52, 53])
    assert cache.found([*range(8), 50, 51, 52, 53, 54]) == 12
    assert cache.found(range(16)) == 16
    # A block is found after its own predecessors alone.
    assert cache.found([50, 51, 52, 53]) == 0
    assert cache.found([*range(4), 50, 51, 52, 53]) == 4


def test_running_chunks_and_generated_tokens_are_found(cache: Cache) -> None:
    prompt = list(range(10))
    first = cache.begin("a", prompt)
    assert cache.begin("too early", prompt).num_tokens == 0
    cache.feed(first, prompt[:6])
    assert cache.found(prompt) == 4
    cache.feed(first, prompt[6:])
    assert cache.found(prompt) == 8
    for token in (70, 71, 72):
        cache.feed(first, [token])
    assert cache.found([*prompt, 70, 71, 72, 73]) == 12
    second = cache.begin("b", [*prompt, 70, 71, 72, 73])
    assert second.num_tokens == second.num_cached_tokens == 12
    assert second.blocks[:3] == first.blocks[:3]


def test_live_sequences_share_blocks_from_the_first_step(cache: Cache) -> None:
    first = cache.run("a", range(10))
    second = cache.begin("b", [*range(8), 60, 61, 62])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.stats().shared_blocks == cache.manager.stats().shared_blocks == 2
    cache.feed(second, [60, 61, 62])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert cache.manager.stats().used_blocks == 4
    assert cache.manager.stats().cow_copies == 0
    cache.check()


def test_full_hit_leaves_the_last_token_and_copies_the_tail(cache: Cache) -> None:
    first = cache.run("a", range(8))
    second = cache.begin("b", range(8))
    assert (second.num_tokens, second.num_cached_tokens, second.capacity) == (7, 7, 8)
    assert second.blocks == first.blocks
    cache.feed(second, [7])
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    assert cache.manager.stats().cow_copies == 1
    for handle, token in ((first, 30), (second, 40)):
        cache.feed(handle, [token] * 5)
    cache.check()
    assert cache.found([*range(8), 30, 30, 30, 30]) == cache.found([*range(8), 40, 40, 40, 40]) == 12


def test_full_hit_on_a_freed_sequence(cache: Cache) -> None:
    cache.free(cache.run("a", range(8)))
    again = cache.run("b", range(8))
    assert again.num_cached_tokens == 7
    assert cache.found(range(8)) == 8
    cache.check()


def test_prompt_of_one_block_or_less(cache: Cache) -> None:
    cache.run("a", range(4))
    assert cache.begin("b", range(4)).num_cached_tokens == 3
    assert cache.begin("c", range(3)).num_cached_tokens == 0
    assert cache.begin("d", []).num_cached_tokens == 0


def test_freed_blocks_are_revived(cache: Cache) -> None:
    first = cache.run("a", range(10))
    blocks = first.blocks
    cache.free(first)
    stats = cache.manager.stats()
    assert (stats.cached_blocks, stats.free_blocks, stats.published_blocks) == (2, 12, 2)
    again = cache.begin("b", range(10))
    assert again.blocks[:2] == blocks[:2]
    stats = cache.manager.stats()
    assert (stats.cached_blocks, stats.free_blocks, stats.published_blocks) == (0, 9, 2)


def test_unpublished_blocks_are_reused_first(cache: Cache) -> None:
    cache.free(cache.run("a", range(8)))
    rest = cache.begin("b", [99] * 40)
    assert cache.manager.stats().evictions == 0
    assert cache.found(range(8)) == 8
    cache.begin("c", [98])
    assert cache.manager.stats().evictions == 1
    assert cache.found(range(8)) == 4
    # A block that was freed without being published goes before one that is.
    cache.free(rest)
    cache.begin("d", [97] * 40)
    assert cache.found(range(8)) == 4


def test_eviction_takes_the_least_recently_used_from_the_end(cache: Cache) -> None:
    a, b = list(range(8)), list(range(50, 58))
    for seq_id, tokens in (("a", a), ("b", b)):
        cache.free(cache.run(seq_id, tokens))
    cache.free(cache.begin("touch a", [*a, 0]))
    found = []
    for count in (0, 1, 1, 1):
        assert cache.manager.evict(count) == count
        found.append((cache.found(a), cache.found(b)))
    assert found == [(8, 8), (8, 4), (8, 0), (4, 0)]
    assert cache.manager.evict(100) == 1
    assert cache.manager.evict(100) == 0
    stats = cache.manager.stats()
    assert (stats.evictions, stats.published_blocks, stats.free_blocks) == (4, 0, 12)
    with pytest.raises(InvalidInputError, match="num_blocks"):
        cache.manager.evict(-1)


def test_evict_leaves_blocks_in_use(cache: Cache) -> None:
    cache.free(cache.run("a", range(8)))
    cache.run("b", [*range(4), 9])
    assert cache.manager.evict(100) == 1
    assert cache.found(range(8)) == 4
    cache.check()


@pytest.mark.parametrize("is_shared", [False, True])
def test_truncate_and_rewrite_forgets_the_old_content(cache: Cache, is_shared: bool) -> None:
    handle = cache.run("a", range(12))
    if is_shared:
        cache.run("b", range(13))
    cache.truncate(handle, 6)
    assert cache.found(range(12)) == 12, "nothing was written yet"
    cache.feed(handle, [90, 91, 92])
    assert cache.found(range(12)) == (12 if is_shared else 4)
    assert cache.found([*range(6), 90, 91, 92]) == 8
    cache.check()
    cache.run("c", [*range(6), 90, 91, 92])
    cache.run("d", range(12))
    cache.check()


def test_overwriting_through_write_kv_forgets_the_old_content(cache: Cache) -> None:
    handle = cache.run("a", range(8))
    row = torch.zeros(1, CONFIG.head_dim)
    cache.manager.write_kv(handle, 0, 5, row, row)
    assert cache.found(range(8)) == 4
    cache.manager.commit(handle, range(4))
    assert cache.found(range(8)) == 4
    cache.manager.commit(handle, range(8))
    assert cache.found(range(8)) == 8


def test_clear_prefix_cache(cache: Cache) -> None:
    cache.free(cache.run("a", range(8)))
    live = cache.run("b", range(50, 58))
    cache.manager.clear_prefix_cache()
    stats = cache.manager.stats()
    assert (stats.published_blocks, stats.cached_blocks, stats.free_blocks) == (0, 0, 10)
    assert cache.found(range(8)) == cache.found(range(50, 58)) == 0
    cache.feed(live, [58, 59, 60, 61])
    assert cache.found(range(50, 62)) == 12, "a sequence that runs on is published again from its start"
    cache.check()


def test_without_prefix_cache(device: torch.device) -> None:
    cache = Cache(device=device, enable_prefix_cache=False)
    first = cache.run("a", range(8))
    cache.manager.commit(first, range(8))
    cache.manager.append_tokens([(first, [7])])
    second = cache.begin("b", range(8))
    assert second.num_tokens == 0
    assert not set(first.blocks) & set(second.blocks)
    stats = cache.manager.stats()
    assert (stats.published_blocks, stats.prefix_hits, stats.prefix_misses, stats.prefix_hit_tokens) == (0, 0, 0, 0)


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
    # Of two whose chains have the same hashes one is findable.
    found = cache.found(range(9), x), cache.found(range(9), y)
    assert found == ((0, 8) if isinstance(x, SameName) else (8, 8))
    for seq_id, namespace in (("c", x), ("d", y)):
        third = cache.begin(seq_id, range(9), namespace)
        assert not set(third.blocks[:2]) & set((second if namespace is x else first).blocks)


class Mirror:
    """What a subscriber knows of the index, and the removals it could not make sense of."""

    def __init__(self, manager: PagedKvCacheManager) -> None:
        self.hashes: set[int | bytes] = set()
        self.events: list[CacheEvent] = []
        self.unknown: list[CacheEvent] = []
        manager.subscribe(self.hear)

    def hear(self, event: CacheEvent) -> None:
        self.events.append(event)
        if isinstance(event, BlocksStored):
            self.hashes |= set(event.hashes)
        elif isinstance(event, BlockRemoved):
            if event.hash not in self.hashes:
                self.unknown.append(event)
            self.hashes.discard(event.hash)
        else:
            self.hashes.clear()


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
        before = cache.snapshot()
        tokens = [int(rng.random() < 0.1) for _ in range(rng.randrange(1, 18))]
        try:
            if name in ("begin", "run"):
                namespace = rng.choice("xxxy")
                handle = cache.begin(step, tokens, namespace)
                done["hit"] += handle.num_tokens > 0
                if name == "run":
                    before = cache.snapshot()
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
            assert cache.snapshot() == before
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
        assert displaced == [entry for block in blocks for entry in in_turn.publish([block], second, "x")]
        assert first == second
        for index in (at_once, in_turn):
            index.check()
        assert all(at_once.match(known, "x") == in_turn.match(known, "x") for known in prompts)


@pytest.mark.parametrize("algorithm", ["fast", "sha256"])
def test_events_tell_what_was_stored(algorithm: str, device: torch.device) -> None:
    cache = Cache(device=device, prefix_hash=algorithm)
    mirror = Mirror(cache.manager)
    handle = cache.run("a", range(5), "x")
    cache.feed(handle, range(5, 12))
    chain = PrefixIndex(1, BLOCK, algorithm)._chain
    root = chain.root("x")
    hashes = chain.extend(root, np.arange(12, dtype=np.int32).reshape(3, BLOCK))
    assert mirror.events == [
        BlocksStored((hashes[0],), root, (0, 1, 2, 3), "x"),
        BlocksStored((hashes[1], hashes[2]), hashes[0], tuple(range(4, 12)), "x"),
    ]
    cache.free(handle)
    assert len(mirror.events) == 2
    cache.manager.evict(1)
    cache.manager.clear_prefix_cache()
    assert mirror.events[2:] == [BlockRemoved(hashes[2]), CacheCleared()]


def test_commit_wants_the_ids_given_before(cache: Cache) -> None:
    handle = cache.manager.allocate("a")
    cache.manager.extend(handle, 9)
    cache.manager.commit(handle, range(6))
    assert cache.found(range(9)) == 4
    before = cache.snapshot()
    for wrong in ([9], [0, 1, 2, 3, 9, 5, 6, 7], [1 << 31]):
        with pytest.raises(InvalidInputError, match="token_ids"):
            cache.manager.commit(handle, wrong)
    assert cache.snapshot() == before
    cache.manager.commit(handle, range(20))
    assert cache.found(range(20)) == 8, "ids beyond the length do not count"
    cache.manager.commit(handle, [])


def test_counters(cache: Cache) -> None:
    cache.run("a", range(9))
    cache.run("b", range(9))
    cache.run("c", range(5))
    cache.run("d", [99] * 9)
    cache.manager.allocate("no ids", 1)
    stats = cache.manager.stats()
    assert (stats.prefix_hits, stats.prefix_misses, stats.prefix_hit_tokens) == (2, 2, 12)
    assert (stats.published_blocks, stats.cached_blocks, stats.evictions) == (4, 0, 0)


def test_revived_blocks_are_no_longer_free(device: torch.device) -> None:
    cache = Cache(device=device, num_blocks=6)
    other = cache.begin("other", [50])
    cache.free(cache.run("a", range(8)))
    before = cache.snapshot()
    with pytest.raises(OutOfBlocksError) as caught:
        cache.begin("b", range(24))  # two found, four to make, five free with those two
    assert (caught.value.needed, caught.value.free) == (6, 5)
    assert cache.snapshot() == before
    cache.free(other)
    assert cache.begin("b", range(24)).num_cached_tokens == 8


def test_failing_callback_is_logged_and_harms_nothing(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: CacheEvent) -> None:
        raise RuntimeError("not today")

    cache.manager.subscribe(fail)
    mirror = Mirror(cache.manager)
    with caplog.at_level(logging.ERROR, logger="paged"):
        cache.run("a", range(8))
    assert "not today" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
    assert len(mirror.events) == 1
    assert cache.found(range(8)) == 8
    cache.check()


def test_callbacks_run_outside_of_the_lock(cache: Cache) -> None:
    answers: list[object] = []

    def call_from_another_thread(_: object) -> None:
        thread = threading.Thread(target=lambda: answers.append(cache.manager.stats()), daemon=True)
        thread.start()
        thread.join(5)
        answers.append(thread.is_alive())

    cache.manager.subscribe(call_from_another_thread)
    cache.manager.on_pressure(call_from_another_thread)
    cache.run("a", range(8))
    cache.manager.allocate("b", 9 * BLOCK)
    assert len(answers) == 4, "one event, one change of pressure"
    assert answers[1] is answers[3] is False


def test_callback_may_call_the_manager(cache: Cache) -> None:
    cache.manager.subscribe(lambda event: cache.manager.clear_prefix_cache() if type(event) is BlocksStored else None)
    cache.run("a", range(8))
    assert cache.manager.stats().published_blocks == 0
    cache.check()


def test_a_published_tail_that_is_advanced_over_gives_way() -> None:
    """Other ids at positions that a hit had left to compute: the block is findable by what it holds now alone."""
    cache = Cache()
    cache.free(cache.run("a", range(8)))
    handle = cache.manager.allocate("b", token_ids=range(8))
    assert handle.num_tokens == 7
    cache.manager.advance(handle, 1)
    cache.manager.commit(handle, [0, 1, 2, 3, 4, 5, 6, 99])
    cache.manager.check_integrity()
    assert (cache.found(range(8)), cache.found([0, 1, 2, 3, 4, 5, 6, 99])) == (4, 8)
    cache.manager.free(handle)
    cache.manager.evict(9)
    assert cache.manager.stats().published_blocks == 0
    cache.check(cache.run("c", range(8)))


def test_a_shorter_prompt_does_not_orphan_longer_ones() -> None:
    cache = Cache()
    cache.free(cache.run("a", range(12)))
    cache.free(cache.run("b", range(8)))
    assert cache.found(range(12)) == 12
    cache.check(cache.run("c", range(12)))


@pytest.mark.parametrize("chunk", [150, 30])
def test_chunks_beyond_a_window_are_published_before_they_are_given_back(chunk: int) -> None:
    cache = Cache(num_blocks=64, sliding_window=6)
    handle = cache.begin("a", range(150))
    for start in range(0, 150, chunk):
        cache.feed(handle, range(start, start + chunk))
    assert cache.found(range(150)) == 148
    cache.check()


def test_listeners_hear_everything_in_order() -> None:
    """Also of what the first listener does to the cache when it is called."""
    cache, heard = Cache(), list[str]()

    def clear_at_once(event: CacheEvent) -> None:
        if isinstance(event, BlocksStored):
            cache.manager.clear_prefix_cache()

    cache.manager.subscribe(clear_at_once)
    cache.manager.subscribe(lambda event: heard.append(type(event).__name__))
    cache.run("a", range(8))
    assert heard == ["BlocksStored", "CacheCleared"]


def test_pressure_is_called_for_changes_after_registration_alone() -> None:
    cache, levels = Cache(), list[str]()
    handle = cache.manager.allocate("a", 10 * BLOCK)
    cache.manager.on_pressure(lambda level: levels.append(level.value))
    assert levels == []
    cache.manager.free(handle)
    assert levels == ["low"]
