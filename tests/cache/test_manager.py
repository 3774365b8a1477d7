"""Room and lengths of sequences, and what the manager counts."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError
from paged.cache.manager import PagedKvCacheManager
from tests.cache.random_kv import assert_holds, grow, make_manager, random_rows
from tests.cache.snapshot import snapshot


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_blocks_for_a_length(num_tokens: int, blocks: int) -> None:
    manager = make_manager(block_size=16)
    handle = manager.allocate("a", num_tokens)
    assert len(handle.blocks) == blocks
    assert (handle.num_tokens, handle.capacity) == (0, 16 * blocks)
    assert manager.stats().used_blocks == blocks


def test_room_for_token_ids(manager: PagedKvCacheManager) -> None:
    assert manager.allocate("a", token_ids=range(5)).capacity == 8
    assert manager.allocate("b", 2, token_ids=range(5)).capacity == 8
    assert manager.allocate("c", 5, token_ids=[1]).capacity == 8


def test_full_pool_refuses_a_third_and_serves_it_after_a_free(manager: PagedKvCacheManager) -> None:
    a, _ = manager.allocate("a", 12), manager.allocate("b", 12)
    before = snapshot(manager)
    assert not manager.can_allocate(1)
    with pytest.raises(OutOfBlocksError) as caught:
        manager.allocate("c", 5)
    assert (caught.value.needed, caught.value.free) == (2, 0)
    assert manager.get_handle("c") is None
    assert snapshot(manager) == before
    assert manager.stats().allocation_failures == 1
    manager.free(a)
    assert manager.can_allocate(12)
    assert not manager.can_allocate(13)
    assert manager.allocate("c", 12).capacity == 12


def test_failed_extend_changes_nothing(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a")
    key, value = grow(manager, handle, 6)
    manager.allocate("b", 12)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError):
        manager.extend(handle, 7)
    assert snapshot(manager) == before
    assert_holds(manager, handle, key, value)
    manager.extend(handle, 6)
    assert handle.num_tokens == 12


def test_ten_rounds_leave_nothing_behind(manager: PagedKvCacheManager) -> None:
    for _ in range(10):
        handle = manager.allocate("a", 9)
        grow(manager, handle, 9)
        manager.free(manager.fork(handle, "b"))
        manager.free(handle)
        manager.check_integrity()
    stats = manager.stats()
    assert (stats.free_blocks, stats.num_sequences, stats.num_tokens, stats.utilization) == (6, 0, 0, 0.0)


def test_truncate_frees_whole_blocks(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 20)
    key, value = grow(manager, handle, 11)
    with pytest.raises(InvalidInputError, match="num_tokens: 12, expected at most the length 11"):
        manager.truncate(handle, 12)
    for length, blocks in ((11, 3), (9, 3), (8, 2), (5, 2), (4, 1), (0, 0)):
        manager.truncate(handle, length)
        assert (handle.num_tokens, len(handle.blocks)) == (length, blocks)
        assert manager.stats().used_blocks == blocks
        assert_holds(manager, handle, key[:length], value[:length])


def test_advance_stays_within_the_capacity(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 5)
    with pytest.raises(InvalidInputError, match="length 9, expected at most the capacity 8"):
        manager.advance(handle, 9)
    assert handle.num_tokens == 0
    manager.advance(handle, 8)
    assert handle.num_tokens == 8


def test_longest_length() -> None:
    manager = make_manager(max_seq_len=6)
    assert manager.can_allocate(6)
    assert not manager.can_allocate(7)
    with pytest.raises(SequenceTooLongError):
        manager.allocate("a", 7)
    handle = manager.allocate("a", 6)
    for call in (manager.extend, manager.advance):
        with pytest.raises(SequenceTooLongError, match="7 tokens, max_seq_len is 6"):
            call(handle, 7)
    manager.extend(handle, 5)
    manager.advance(handle, 1)
    assert handle.num_tokens == 6


def test_arguments_are_checked(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 4)
    for call in (manager.extend, manager.advance, manager.truncate):
        with pytest.raises(InvalidInputError, match="num_tokens: -1"):
            call(handle, -1)
    with pytest.raises(InvalidInputError, match="num_tokens: -1"):
        manager.allocate("b", -1)
    with pytest.raises(InvalidInputError, match="num_tokens: -1"):
        manager.can_allocate(-1)
    with pytest.raises(InvalidInputError, match="'a' names a live sequence"):
        manager.allocate("a")
    with pytest.raises(InvalidInputError, match="'a' names a live sequence"):
        manager.fork(handle, "a")
    for layer in (-1, 2):
        with pytest.raises(InvalidInputError, match="layer"):
            manager.k_cache(layer)
    key, value = random_rows(1)
    with pytest.raises(InvalidInputError, match=r"key: shape"):
        manager.write_kv(handle, 0, 0, key[..., :4], value)
    with pytest.raises(InvalidInputError, match=r"value: shape"):
        manager.write_kv(handle, 0, 0, key, torch.cat([value, value]))
    with pytest.raises(InvalidInputError, match=r"position: 4\.\.5, expected within the capacity 4"):
        manager.write_kv(handle, 0, 4, key, value)
    manager.write_kv(handle, 0, 3, key, value)
    assert manager.handles() == (handle,)


def test_stats_are_counted(manager: PagedKvCacheManager) -> None:
    parent = manager.allocate("a")
    grow(manager, parent, 6)
    manager.fork(parent, "b")
    stats = manager.stats()
    assert (stats.num_blocks, stats.free_blocks, stats.used_blocks, stats.shared_blocks) == (6, 4, 2, 2)
    assert (stats.num_sequences, stats.num_tokens, stats.capacity_tokens) == (2, 12, 24)
    assert stats.utilization == pytest.approx(1 / 3)


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
