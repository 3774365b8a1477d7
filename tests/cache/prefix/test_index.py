"""Prompts start from K/V computed before: what is found, whose blocks are shared, and what is forgotten when."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError
from tests.cache.prefix_cache import CONFIG, Cache
from tests.cache.snapshot import snapshot

pytestmark = pytest.mark.usefixtures("torch_backend")


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


def test_forgotten_namespace(cache: Cache) -> None:
    """What was run there before is not found, what is run afterwards is; a live sequence would mix the two."""
    first = cache.run("a", range(9), "x")
    cache.free(cache.run("b", range(9), "y"))
    with pytest.raises(InvalidInputError, match="'x' is in use by 'a'"):
        cache.manager.forget_namespace("x")
    assert (cache.found(range(9), "x"), cache.found(range(9), "y")) == (8, 8)
    cache.free(first)
    assert set(cache.manager.namespaces()) == {"x", "y"}
    cache.manager.forget_namespace("x")
    cache.manager.forget_namespace("never used")
    assert cache.manager.namespaces() == ("y",)
    assert (cache.found(range(9), "x"), cache.found(range(9), "y")) == (0, 8)
    assert cache.run("c", range(9), "x").num_cached_tokens == 0
    assert cache.found(range(9), "x") == 8
    cache.manager.check_integrity()


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


def test_commit_wants_the_ids_given_before(cache: Cache) -> None:
    handle = cache.manager.allocate("a")
    cache.manager.extend(handle, 9)
    cache.manager.commit(handle, range(6))
    assert cache.found(range(9)) == 4
    before = snapshot(cache.manager)
    for wrong in ([9], [0, 1, 2, 3, 9, 5, 6, 7], [1 << 31]):
        with pytest.raises(InvalidInputError, match="token_ids"):
            cache.manager.commit(handle, wrong)
    assert snapshot(cache.manager) == before
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
    before = snapshot(cache.manager)
    with pytest.raises(OutOfBlocksError) as caught:
        cache.begin("b", range(24))  # two found, four to make, five free with those two
    assert (caught.value.needed, caught.value.free) == (6, 5)
    assert snapshot(cache.manager) == before
    cache.free(other)
    assert cache.begin("b", range(24)).num_cached_tokens == 8


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
