"""Room and lengths of sequences, blocks that several of them hold, and what the manager counts."""

from collections.abc import Callable

import pytest

from paged import InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError
from paged.cache.manager import PagedKvCacheManager
from tests.cache.random_kv import assert_holds, grow, make_manager, random_rows
from tests.cache.snapshot import snapshot


def test_full_pool_refuses_a_third_and_serves_it_after_a_free(manager: PagedKvCacheManager) -> None:
    a, b = manager.allocate("a", 12), manager.allocate("b", 12)
    before = snapshot(manager)
    assert not manager.can_allocate(1)
    for call in (lambda: manager.allocate("c", 5), lambda: manager.extend(b, 17)):
        with pytest.raises(OutOfBlocksError) as caught:
            call()
        assert (caught.value.needed, caught.value.free) == (2, 0)
        assert snapshot(manager) == before
    assert manager.stats().allocation_failures == 2
    manager.free(a)
    assert manager.can_allocate(12)
    assert not manager.can_allocate(13)
    assert manager.allocate("c", 12).capacity == 12


def test_longest_length() -> None:
    manager = make_manager(max_seq_len=6)
    assert manager.can_allocate(6)
    assert not manager.can_allocate(7)
    with pytest.raises(SequenceTooLongError):
        manager.allocate("a", 7)
    handle = manager.allocate("a", 6)
    for call in (manager.extend, manager.advance, lambda one, count: manager.reserve_step([one], [count])):
        with pytest.raises(SequenceTooLongError, match="7 tokens, expected at most max_seq_len 6"):
            call(handle, 7)
    manager.extend(handle, 5)
    manager.advance(handle, 1)
    assert handle.num_tokens == 6


def test_arguments_are_checked(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 4)
    key, value = random_rows(1)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("num_tokens: -1", lambda: manager.extend(handle, -1)),
        ("num_tokens: -1", lambda: manager.allocate("b", -1)),
        ("num_tokens: -1", lambda: manager.can_allocate(-1)),
        ("length 5, expected at most the capacity 4", lambda: manager.advance(handle, 5)),
        ("num_tokens: 1, expected at most the length 0", lambda: manager.truncate(handle, 1)),
        ("'a' is the id of a live sequence", lambda: manager.allocate("a")),
        ("'a' is the id of a live sequence", lambda: manager.fork(handle, "a")),
        ("a sequence is given twice", lambda: manager.reserve_step([handle, handle], [1, 1])),
        ("layer", lambda: manager.k_cache(2)),
        ("key: shape", lambda: manager.write_kv(handle, 0, 0, key[..., :4], value)),
        (r"position: 4\.\.5, expected within the capacity 4", lambda: manager.write_kv(handle, 0, 4, key, value)),
    ]
    for message, call in calls:
        with pytest.raises(InvalidInputError, match=message):
            call()
    manager.write_kv(handle, 0, 3, key, value)
    assert manager.handles() == (handle,)
    assert handle.num_tokens == 0
    manager.advance(handle, 4)


def test_check_integrity_sees_a_contradiction(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 4)
    manager.check_integrity()
    handle._state.num_tokens = 5
    with pytest.raises(PagedError, match="capacity 4"):
        manager.check_integrity()
    handle._state.num_tokens = 0
    handle._state.blocks = (handle.blocks[0], 5)
    with pytest.raises(PagedError, match="block 5"):
        manager.check_integrity()


def test_share_prefix_blocks(manager: PagedKvCacheManager) -> None:
    source, target = manager.allocate("a"), manager.allocate("b", 8)
    key, value = grow(manager, source, 10)
    other = manager.allocate("c", namespace="other")
    for args, message in (
        ((source, target, 3), "num_blocks: 3, expected at most the 2 full blocks"),
        ((source, source, 1), "the same sequence"),
        ((source, other, 1), "namespace 'other', expected None"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            manager.share_prefix_blocks(*args)
    manager.share_prefix_blocks(source, target, 1)
    assert target.blocks[0] == source.blocks[0]
    assert (target.num_tokens, target.num_cached_tokens, target.capacity) == (4, 4, 8)
    assert manager.stats().used_blocks == 4
    assert_holds(manager, target, key[:4], value[:4])
    with pytest.raises(InvalidInputError, match="holds 4 tokens, expected an empty sequence"):
        manager.share_prefix_blocks(source, target, 1)
    manager.truncate(target, 2)
    assert target.num_cached_tokens == 2
    manager.check_integrity()
