"""Blocks that several sequences hold, and the copy that is made before one of them writes."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError
from paged.cache.manager import PagedKvCacheManager
from paged.kernels.cache.copy_blocks import BlockCopy
from tests.cache.random_kv import assert_holds, grow, random_rows
from tests.cache.snapshot import snapshot


def test_fork_shares_the_blocks_that_hold_tokens(manager: PagedKvCacheManager) -> None:
    parent = manager.allocate("a", 16, namespace="tenant")
    key, value = grow(manager, parent, 6)
    child = manager.fork(parent, "b")
    assert child.blocks == parent.blocks[:2]
    assert (child.num_tokens, child.num_cached_tokens, child.namespace) == (6, 0, "tenant")
    assert (child.stats().shared_blocks, manager.stats().shared_blocks) == (2, 2)
    assert manager.stats().used_blocks == 4
    manager.free(parent)
    assert manager.stats().used_blocks == 2
    assert_holds(manager, child, key, value)


@pytest.mark.usefixtures("backend")
def test_a_shared_tail_is_copied_before_it_is_written(manager: PagedKvCacheManager) -> None:
    parent = manager.allocate("a")
    key, value = grow(manager, parent, 6)
    child = manager.fork(parent, "b")
    child_key, child_value = grow(manager, child, 1)
    assert parent.blocks[0] == child.blocks[0]
    assert parent.blocks[1] != child.blocks[1]
    parent_key, parent_value = grow(manager, parent, 1)
    assert manager.stats().cow_copies == 1
    assert_holds(manager, parent, torch.cat([key, parent_key]), torch.cat([value, parent_value]))
    assert_holds(manager, child, torch.cat([key, child_key]), torch.cat([value, child_value]))
    manager.check_integrity()


def test_extending_from_a_full_block_copies_nothing(manager: PagedKvCacheManager) -> None:
    parent = manager.allocate("a")
    grow(manager, parent, 4)
    child = manager.fork(parent, "b")
    grow(manager, child, 1)
    assert manager.stats().cow_copies == 0
    assert child.blocks[0] == parent.blocks[0]


def test_write_kv_copies_a_shared_block_at_any_position(manager: PagedKvCacheManager) -> None:
    parent = manager.allocate("a")
    key, value = grow(manager, parent, 10)
    child = manager.fork(parent, "b")
    new_key, new_value = random_rows(2)
    for layer in range(2):
        manager.write_kv(child, layer, 3, new_key + layer, new_value + layer)
    assert manager.stats().cow_copies == 2
    assert_holds(manager, parent, key, value)
    assert_holds(manager, child, torch.cat([key[:3], new_key, key[5:]]), torch.cat([value[:3], new_value, value[5:]]))
    before = snapshot(manager)
    manager.allocate("c", 4)
    with pytest.raises(OutOfBlocksError):
        manager.write_kv(child, 0, 8, *random_rows(1))
    manager.free(manager.handles()[-1])
    assert snapshot(manager) == before


def test_a_failed_copy_changes_nothing(manager: PagedKvCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = manager.allocate("a")
    grow(manager, parent, 6)
    child = manager.fork(parent, "b")
    before = snapshot(manager)

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(BlockCopy, "__call__", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            manager.extend(child, 3)
    assert snapshot(manager) == before
    manager.extend(child, 3)


def test_share_prefix_blocks(manager: PagedKvCacheManager) -> None:
    source, target = manager.allocate("a"), manager.allocate("b", 8)
    key, value = grow(manager, source, 10)
    manager.share_prefix_blocks(source, target, 1)
    assert target.blocks[0] == source.blocks[0]
    assert (target.num_tokens, target.num_cached_tokens, target.capacity) == (4, 4, 8)
    assert manager.stats().used_blocks == 4
    assert_holds(manager, target, key[:4], value[:4])
    tail_key, tail_value = grow(manager, target, 3)
    assert_holds(manager, target, torch.cat([key[:4], tail_key]), torch.cat([value[:4], tail_value]))
    assert_holds(manager, source, key, value)
    manager.truncate(target, 2)
    assert target.num_cached_tokens == 2
    manager.check_integrity()


def test_share_prefix_blocks_refuses_what_does_not_fit(manager: PagedKvCacheManager) -> None:
    source, target = manager.allocate("a"), manager.allocate("b")
    grow(manager, source, 7)
    with pytest.raises(InvalidInputError, match="num_blocks: 2, expected at most the 1 full blocks"):
        manager.share_prefix_blocks(source, target, 2)
    with pytest.raises(InvalidInputError, match="the same sequence"):
        manager.share_prefix_blocks(source, source, 1)
    with pytest.raises(InvalidInputError, match="namespace 'other', expected None"):
        manager.share_prefix_blocks(source, manager.allocate("c", namespace="other"), 1)
    manager.share_prefix_blocks(source, target, 1)
    with pytest.raises(InvalidInputError, match="holds 4 tokens, expected an empty sequence"):
        manager.share_prefix_blocks(source, target, 1)
