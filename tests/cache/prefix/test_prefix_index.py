"""Prompts start from K/V computed before: what is found, whose blocks are shared, and what is forgotten when."""

from typing import Any

import pytest
import torch

from paged import InvalidInputError, KvSlotRequest
from tests.cache.prefix_cache import Cache
from tests.cache.snapshot import snapshot


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


def test_full_hit_leaves_the_last_token_and_copies_the_tail(cache: Cache) -> None:
    first = cache.run("a", range(8))
    second = cache.begin("b", range(8))
    assert (second.num_tokens, second.num_cached_tokens, second.capacity) == (7, 7, 8)
    assert second.blocks == first.blocks
    cache.feed(second, [7])
    assert [now == then for now, then in zip(second.blocks, first.blocks, strict=True)] == [True, False]
    assert cache.manager.stats().cow_copies == 1
    for handle, token in ((first, 30), (second, 40)):
        cache.feed(handle, [token] * 5)
    cache.check()
    assert cache.found([*range(8), 30, 30, 30, 30]) == cache.found([*range(8), 40, 40, 40, 40]) == 12
    for handle in (first, second):
        cache.free(handle)
    assert cache.run("c", range(8)).num_cached_tokens == 7
    assert cache.found(range(8)) == 8
    assert [cache.begin(length, range(length)).num_cached_tokens for length in (4, 3, 0)] == [3, 0, 0]
    cache.check()


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
    touching = cache.begin("touch a", [*a, 0])
    blocks = touching.blocks[:2]
    cache.free(touching)
    found = []
    for count in (0, 1, 1, 1):
        assert cache.manager.evict(count) == count
        found.append((cache.found(a), cache.found(b)))
        assert cache.manager.cached_blocks()[-2:][::-1] == blocks[: 2 if cache.found(a) == 8 else 1]
    assert found == [(8, 8), (8, 4), (8, 0), (4, 0)]
    assert cache.manager.evict(100) == 1
    assert cache.manager.evict(100) == 0
    stats = cache.manager.stats()
    assert (stats.evictions, stats.published_blocks, stats.free_blocks) == (4, 0, 12)
    with pytest.raises(InvalidInputError, match="num_blocks"):
        cache.manager.evict(-1)


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


def test_without_prefix_cache(device: torch.device) -> None:
    cache = Cache(device=device, enable_prefix_cache=False)
    first = cache.run("a", range(8))
    cache.manager.commit(first, range(8))
    cache.manager.append_tokens([(first, [7])])
    assert cache.begin("b", range(8)).num_tokens == 0
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


def test_a_published_tail_that_is_advanced_over_gives_way(cache: Cache) -> None:
    """Other ids at positions that a hit had left to compute: the block is findable by what it holds now alone."""
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


@pytest.mark.parametrize("algorithm", ["fast", "sha256"])
def test_blocks_that_are_filled_in_one_step_are_found(algorithm: str, device: torch.device) -> None:
    """They are published together if all of them are new, and else one by one."""
    cache = Cache(device=device, num_blocks=40, prefix_hash=algorithm)
    handles = {name: cache.run(name, [name, 1, 2, 3]) for name in range(5)}
    handles[5] = cache.run(5, [0, 1, 2, 3])
    index, together = cache.manager._prefixes.index, list[bool]()
    publish = index.publish_one_each

    def noted(*given: Any) -> bool:
        together.append(publish(*given))
        return together[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "publish_one_each", noted)
        for step in [{0: 6, 1: 7, 2: 7}, {1: 8, 5: 6}, {3: 9, 4: 9, 2: 9}]:  # 5 repeats 0
            given = [(handles[name], [token] * 4) for name, token in step.items()]
            room = [KvSlotRequest(handle.cache_id, handle.num_tokens + 4) for handle, _ in given]
            cache.manager.reserve(room).commit()
            cache.manager.append_tokens(given)
            for handle, ids in given:
                cache.tokens[handle] += ids
            cache.manager.check_integrity()
    assert together == [True, False, True]
    assert all(cache.found(tokens) == len(tokens) > 4 for tokens in cache.tokens.values())
    assert [cache.found([4, 1, 2, 3, *[token] * 4]) for token in (6, 9)] == [4, 8]
