"""Slots for a whole batch: all or none, kept, committed or taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError, SequenceTooLongError
from paged.batch import KvSlotRequest
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.kernels.cache.copy_blocks import BlockCopy


@pytest.fixture
def manager() -> PagedKvCacheManager:
    config = PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=10, dtype=torch.float32, max_seq_len=100)
    return PagedKvCacheManager(config)


def append(manager: PagedKvCacheManager, handle: KvCacheHandle, *tokens: int) -> None:
    """Grow `handle` by tokens whose K is filled with their number."""
    start = handle.num_tokens
    manager.extend(handle, len(tokens))
    write(manager, handle, start, *tokens)


def write(manager: PagedKvCacheManager, handle: KvCacheHandle, start: int, *tokens: int) -> None:
    key = torch.tensor(tokens, dtype=torch.float32)[:, None, None].expand(-1, 1, 8)
    manager.write_kv(handle, 0, start, key, -key)


def read(manager: PagedKvCacheManager, handle: KvCacheHandle) -> list[int]:
    key, value = manager.read_kv(handle, 0, 0, handle.num_tokens)
    assert torch.equal(key, -value)
    assert torch.equal(key, key[..., :1].expand_as(key))
    return [int(number) for number in key[:, 0, 0].tolist()]


def snapshot(manager: PagedKvCacheManager) -> object:
    manager.check_integrity()
    handles = [(h.cache_id, h.blocks, h.num_tokens, h.stats(), read(manager, h)) for h in manager.handles()]
    return (
        handles,
        replace(manager.stats(), cow_copies=0, allocation_failures=0),
        sorted(manager._pool._free),
        dict(manager._pool._extra_references),
    )


def forked(manager: PagedKvCacheManager) -> tuple[KvCacheHandle, KvCacheHandle]:
    """Two sequences 1..6 over the same two blocks."""
    parent = manager.allocate("a")
    append(manager, parent, 1, 2, 3, 4, 5, 6)
    return parent, manager.fork(parent, "b")


def test_commit_moves_every_sequence_to_its_target(manager: PagedKvCacheManager) -> None:
    a, b = forked(manager)
    c = manager.allocate("c")
    with manager.reserve([KvSlotRequest("b", 9), KvSlotRequest("c", 2)]) as reservation:
        assert (a.num_tokens, b.num_tokens, c.num_tokens) == (6, 6, 0)
        assert (b.capacity, c.capacity) == (12, 4)
        manager.check_integrity()
        write(manager, b, 6, 7, 8, 9)
        write(manager, c, 0, 10, 11)
        reservation.commit()
        assert not reservation.is_open
    assert (read(manager, a), read(manager, b), read(manager, c)) == (
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [10, 11],
    )
    with pytest.raises(InvalidInputError, match="closed"):
        reservation.commit()
    reservation.rollback()
    assert b.num_tokens == 9
    assert manager.stats().used_blocks == 5
    manager.check_integrity()


@pytest.mark.parametrize("way", ["rollback", "exception"])
def test_rollback_leaves_no_trace(manager: PagedKvCacheManager, way: str) -> None:
    _, b = forked(manager)
    c = manager.allocate("c", 3)
    write(manager, c, 0, 7, 8)
    before = snapshot(manager)
    reservation = manager.reserve([KvSlotRequest("a", 13), KvSlotRequest("b", 7), KvSlotRequest("c", 6)])
    assert manager.stats().cow_copies == 2
    write(manager, b, 6, 99)
    write(manager, c, 0, 98, 97, 96, 95, 94)
    manager.check_integrity()
    if way == "rollback":
        reservation.rollback()
    else:
        with pytest.raises(RuntimeError, match="forward failed"), reservation:
            raise RuntimeError("forward failed")
    assert snapshot(manager) == before
    with pytest.raises(InvalidInputError, match="expected within the 2 written"):
        manager.read_kv(c, 0, 2, 1)
    with pytest.raises(InvalidInputError, match="closed"):
        reservation.commit()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_all_holders_of_a_shared_block_grow_at_once(manager: PagedKvCacheManager, end: str) -> None:
    """Each gets a copy, so that no sequence is left to hold the block that they shared."""
    a, b = forked(manager)
    tail = a.blocks[1]
    reservation = manager.reserve([KvSlotRequest("a", 7), KvSlotRequest("b", 7)])
    assert tail not in (a.blocks[1], b.blocks[1])
    getattr(reservation, end)()
    manager.check_integrity()
    assert manager._pool.ref_count(tail) == (0 if end == "commit" else 2)


def test_leaving_without_commit_keeps_the_room(manager: PagedKvCacheManager) -> None:
    a, b = forked(manager)
    with manager.reserve([KvSlotRequest("b", 9)]):
        assert manager.stats().used_blocks == 4
    assert (b.num_tokens, b.capacity) == (6, 12)
    assert not set(a.blocks[1:]) & set(b.blocks)
    manager.free(a)
    assert manager.stats().used_blocks == 3
    manager.check_integrity()


def test_a_replaced_block_stays_until_the_reservation_ends(manager: PagedKvCacheManager) -> None:
    a, b = forked(manager)
    shared = a.blocks
    reservation = manager.reserve([KvSlotRequest("b", 7)])
    append(manager, a, 70)
    assert a.blocks[1] != shared[1]
    manager.free(a)
    reservation.rollback()
    assert b.blocks == shared
    assert read(manager, b) == [1, 2, 3, 4, 5, 6]
    manager.check_integrity()


def test_all_or_nothing(manager: PagedKvCacheManager) -> None:
    forked(manager)
    manager.allocate("c")
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError) as caught:
        manager.reserve([KvSlotRequest("a", 9), KvSlotRequest("b", 9), KvSlotRequest("c", 17)])
    assert (caught.value.needed, caught.value.free) == (9, 8)
    assert snapshot(manager) == before
    with manager.reserve([KvSlotRequest("a", 9), KvSlotRequest("b", 9), KvSlotRequest("c", 16)]) as reservation:
        assert manager.stats().free_blocks == 0
        reservation.commit()


def test_admission_length_is_checked_and_not_allocated(manager: PagedKvCacheManager) -> None:
    manager.allocate("a")
    manager.allocate("b")
    before = snapshot(manager)
    with pytest.raises(OutOfBlocksError):
        manager.reserve([KvSlotRequest("a", 1, admission_target_len=20), KvSlotRequest("b", 24)])
    assert snapshot(manager) == before
    manager.reserve([KvSlotRequest("a", 1, admission_target_len=20), KvSlotRequest("b", 20)]).commit()
    assert manager.stats().used_blocks == 6


def test_requests_are_checked(manager: PagedKvCacheManager) -> None:
    forked(manager)
    before = snapshot(manager)
    for requests, message in (
        ([KvSlotRequest("a", 7), KvSlotRequest("x", 1)], "'x' names no live sequence"),
        ([KvSlotRequest("a", 7), KvSlotRequest("a", 8)], "'a' is given twice"),
        ([KvSlotRequest("a", 5)], "expected 6 <= target_len"),
        ([KvSlotRequest("a", 8, admission_target_len=7)], "target_len <= admission_target_len"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            manager.reserve(requests)
    with pytest.raises(SequenceTooLongError):
        manager.reserve([KvSlotRequest("a", 7, admission_target_len=101)])
    assert snapshot(manager) == before
    manager.reserve([]).commit()
    manager.reserve([KvSlotRequest("a", 6), KvSlotRequest("b", 6)]).commit()
    assert snapshot(manager) == before


def test_all_copies_of_a_call_are_one_launch(manager: PagedKvCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = forked(manager)
    manager.fork(a, "c")
    calls: list[int] = []
    real = BlockCopy.__call__

    def counted(copy: BlockCopy, pairs: torch.Tensor) -> None:
        calls.append(len(pairs))
        real(copy, pairs)

    monkeypatch.setattr(BlockCopy, "__call__", counted)
    manager.reserve([KvSlotRequest(name, 7) for name in "abc"]).commit()
    manager.reserve([KvSlotRequest(name, 8) for name in "abc"]).commit()
    assert calls == [3]


CHANGES: dict[str, Callable[[PagedKvCacheManager, KvCacheHandle], object]] = {
    "extend": lambda manager, handle: manager.extend(handle, 2),
    "advance": lambda manager, handle: manager.advance(handle, 2),
    "truncate": lambda manager, handle: manager.truncate(handle, 3),
    "fork": lambda manager, handle: manager.fork(handle, "fork"),
    "free": lambda manager, handle: manager.free(handle),
    "reserve": lambda manager, handle: manager.reserve([KvSlotRequest("b", 20)]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_changed_sequence_is_settled_first(manager: PagedKvCacheManager, change: str, end: str) -> None:
    _, b = forked(manager)
    c = manager.allocate("c")
    reservation = manager.reserve([KvSlotRequest("b", 9), KvSlotRequest("c", 1)])
    CHANGES[change](manager, b)
    manager.check_integrity()
    blocks, num_tokens = b.blocks, b.num_tokens
    getattr(reservation, end)()
    manager.check_integrity()
    assert (b.blocks, b.num_tokens) == (blocks, num_tokens)
    assert (c.num_tokens, c.capacity) == ((1, 4) if end == "commit" else (0, 0))


def test_a_reservation_that_grows_nothing_leaves_a_shared_tail_to_be_copied() -> None:
    manager = PagedKvCacheManager(PagedKvCacheConfig(1, 1, 8, 4, 12, dtype=torch.float32, device="cpu"))
    first = manager.allocate("a", 4)
    manager.extend(first, 2)
    second = manager.fork(first, "b")
    with manager.reserve([KvSlotRequest("b", 2)]):
        manager.build_metadata([(second, 2)])
    assert set(first.blocks).isdisjoint(second.blocks)


def test_a_rollback_does_not_bring_back_what_was_overwritten() -> None:
    manager = PagedKvCacheManager(PagedKvCacheConfig(1, 1, 8, 4, 12, dtype=torch.float32, device="cpu"))

    def write(handle: KvCacheHandle, position: int, *values: float) -> None:
        rows = torch.tensor(values).view(-1, 1, 1).expand(-1, 1, 8)
        manager.write_kv(handle, 0, position, rows, -rows)

    handle = manager.allocate("a", 8)
    write(handle, 0, 1, 2, 3)
    manager.advance(handle, 3)
    manager.commit(handle, [1, 2, 3])
    manager.fork(handle, "b")
    reservation = manager.reserve([KvSlotRequest("a", 4)])
    write(handle, 0, 7, 8, 9)
    manager.commit(handle, [7, 8, 9])
    reservation.rollback()
    assert manager.read_kv(handle, 0, 0, 3)[0][:, 0, 0].tolist() == [7, 8, 9]
    manager.check_integrity()


def test_an_extend_that_fails_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PagedKvCacheManager(PagedKvCacheConfig(1, 1, 8, 4, 12, dtype=torch.float32, device="cpu"))
    handle = manager.allocate("a")

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(manager._tensors, "clear", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            manager.extend(handle, 6)
    assert (handle.blocks, handle.num_tokens, manager.stats().used_blocks) == ((), 0, 0)
    manager.extend(handle, 6)
    assert len(handle.blocks) == 2
