"""Slots for a whole batch: all or none, kept, committed or taken back."""

import warnings
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError, SequenceTooLongError
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.step.batch import KvSlotRequest
from tests.cache.snapshot import snapshot as whole_snapshot


@pytest.fixture
def manager() -> PagedKvCacheManager:
    config = PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=10, dtype=torch.float32, max_seq_len=100)
    return PagedKvCacheManager(config)


def requests(**targets: int) -> list[KvSlotRequest]:
    return [KvSlotRequest(name, target) for name, target in targets.items()]


def write(manager: PagedKvCacheManager, handle: KvCacheHandle, start: int, *tokens: int) -> None:
    """Tokens whose K is filled with their number."""
    key = torch.tensor(tokens, dtype=torch.float32)[:, None, None].expand(-1, 1, 8)
    manager.write_kv(handle, 0, start, key, -key)


def read(manager: PagedKvCacheManager, handle: KvCacheHandle) -> list[int]:
    key, value = manager.read_kv(handle, 0, 0, handle.num_tokens)
    assert torch.equal(key, -value)
    assert torch.equal(key, key[..., :1].expand_as(key))
    return [int(number) for number in key[:, 0, 0].tolist()]


def snapshot(manager: PagedKvCacheManager) -> object:
    """But for the order of free blocks, and how many copies were made; of blocks, what can be read."""
    parts = whole_snapshot(manager)
    free, cached, references = parts["free"]
    data = [read(manager, handle) for handle in manager.handles()]
    return parts | {
        "free": (sorted(free), cached, references),
        "counts": replace(parts["counts"], cow_copies=0),
        "K/V": data,
    }


def forked(manager: PagedKvCacheManager) -> tuple[KvCacheHandle, KvCacheHandle]:
    """Two sequences 1..6 over the same two blocks."""
    parent = manager.allocate("a")
    manager.extend(parent, 6)
    write(manager, parent, 0, 1, 2, 3, 4, 5, 6)
    return parent, manager.fork(parent, "b")


@pytest.mark.parametrize("way", ["rollback", "exception"])
def test_rollback_leaves_no_trace(manager: PagedKvCacheManager, way: str) -> None:
    _, b = forked(manager)
    c = manager.allocate("c", 3)
    write(manager, c, 0, 7, 8)
    before = snapshot(manager)
    reservation = manager.reserve(requests(a=13, b=7, c=6))
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


def test_what_is_refused_leaves_no_trace(manager: PagedKvCacheManager) -> None:
    """All or nothing; an admission length is checked and not allocated."""
    forked(manager)
    manager.allocate("c")
    before = snapshot(manager)
    for refused, error, message in (
        (requests(a=9, b=9, c=17), OutOfBlocksError, "9"),
        ([KvSlotRequest("c", 1, admission_target_len=20), *requests(a=22)], OutOfBlocksError, "10"),
        ([*requests(a=7), KvSlotRequest("x", 1)], InvalidInputError, "'x' is not a live sequence"),
        ([*requests(a=7), KvSlotRequest("a", 8)], InvalidInputError, "'a' is given twice"),
        (requests(a=5), InvalidInputError, "target_len is the total length: 'a' holds 6 tokens, got 5"),
        (
            [KvSlotRequest("a", 8, admission_target_len=7)],
            InvalidInputError,
            "admission_target_len: 7 for 'a', expected at least target_len 8",
        ),
        ([KvSlotRequest("a", 7, admission_target_len=101)], SequenceTooLongError, "101"),
    ):
        with pytest.raises(error, match=message) as caught:
            manager.reserve(refused)
        assert error is not OutOfBlocksError or (caught.value.needed, caught.value.free) == (int(message), 8)
        assert snapshot(manager) == before
    manager.reserve([]).commit()
    manager.reserve(requests(a=6, b=6)).commit()
    assert snapshot(manager) == before
    reservation = manager.reserve([KvSlotRequest("c", 1, admission_target_len=12), *requests(a=17)])
    assert manager.stats().used_blocks == 2 + 1 + 4
    reservation.rollback()
    with manager.reserve(requests(a=9, b=9, c=16)) as reservation:
        assert manager.stats().free_blocks == 0
        assert [handle.num_tokens for handle in manager.handles()] == [6, 6, 0]
        reservation.commit()
        assert not reservation.is_open
    reservation.rollback()
    assert [handle.num_tokens for handle in manager.handles()] == [9, 9, 16]


def test_ids_must_be_of_all_sequences(manager: PagedKvCacheManager) -> None:
    """A list with None counts its entries too."""
    handles = [manager.allocate("a"), manager.allocate("b")]
    with manager.reserve(requests(a=1, b=1)) as reservation:
        for token_ids in ([None], [[1]], [None, None, None], [None, [1, 2]]):
            with pytest.raises(InvalidInputError, match="ids, expected"):
                reservation.commit(token_ids)
        reservation.commit([None, [1]])
    assert [handle.num_tokens for handle in handles] == [1, 1]


def test_all_copies_of_a_call_are_one_launch(manager: PagedKvCacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holder of a shared block gets a copy, so that nobody is left to hold it."""
    a, _ = forked(manager)
    manager.fork(a, "c")
    tail = a.blocks[1]
    calls: list[int] = []
    real = BlockCopy.__call__

    def counted(copy: BlockCopy, pairs: torch.Tensor) -> None:
        calls.append(len(pairs))
        real(copy, pairs)

    monkeypatch.setattr(BlockCopy, "__call__", counted)
    manager.reserve(requests(a=7, b=7, c=7)).commit()
    manager.reserve(requests(a=8, b=8, c=8)).commit()
    assert calls == [3]
    assert tail in manager._pool._free


def test_a_reservation_that_was_not_committed_warns(manager: PagedKvCacheManager) -> None:
    """Where all lengths are still 0: a caller who writes K/V and forgets them would read nothing."""
    manager.allocate("a")
    with pytest.warns(UserWarning, match="without commit"), manager.reserve(requests(a=4)):
        pass
    with warnings.catch_warnings(action="error"):
        with manager.reserve(requests(a=4)) as reservation:
            reservation.commit()
        with manager.reserve(requests(a=5)):
            pass
        manager.allocate("b")
        with manager.reserve(requests(b=5)) as reservation:
            reservation.rollback()
        with suppress(KeyError), manager.reserve(requests(b=5)):
            raise KeyError


def test_a_rollback_does_not_bring_back_what_was_overwritten(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 8)
    write(manager, handle, 0, 1, 2, 3)
    manager.advance(handle, 3)
    manager.commit(handle, [1, 2, 3])
    manager.fork(handle, "b")
    reservation = manager.reserve(requests(a=4))
    write(manager, handle, 0, 7, 8, 9)
    manager.commit(handle, [7, 8, 9])
    reservation.rollback()
    assert read(manager, handle) == [7, 8, 9]
    manager.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_decode_steps_have_the_blocks_and_slots_of_their_sequences(seed: int) -> None:
    """A step is made from the one before; whatever changes sequences in between, it is as if made anew."""
    rng, size = Random(seed), 4
    manager = PagedKvCacheManager(
        PagedKvCacheConfig(1, 1, 8, block_size=size, num_blocks=60, num_swap_blocks=60, dtype=torch.float32)
    )
    handles = [manager.allocate(index) for index in range(4)]
    for number in range(4, 200):
        change = rng.choice(["none"] * 6 + ["truncate", "fork", "swap", "replace", "reorder", "rollback", "extend"])
        row = rng.randrange(4)
        handle = handles[row]
        if change == "truncate" or handle.num_tokens > 40:
            manager.truncate(handle, rng.randint(0, handle.num_tokens))
        elif change == "fork":
            handles[row] = manager.fork(handles[(row + 1) % 4], number)
            manager.free(handle)
        elif change == "swap":
            manager.swap_out(handle)
            manager.swap_in(handle)
        elif change == "replace":
            manager.free(handle)
            handles[row] = manager.allocate(number, rng.randint(0, 9))
        elif change == "reorder":
            rng.shuffle(handles)
        elif change == "extend":
            manager.extend(handle, rng.randint(1, 6))
        reservation, host = manager.reserve_step(handles.copy(), [1] * 4)
        for place, handle in enumerate(handles):
            length, blocks = handle.num_tokens, list(handle.blocks)
            assert host.positions[place] == length
            assert host.seq_lens[place] == length + 1
            assert host.slot_mappings[0, place] == blocks[length // size] * size + length % size
            assert host.block_tables[0, place, : len(blocks)].tolist() == blocks
            assert not host.block_tables[0, place, len(blocks) :].any()
        assert host.max_seqlen_k == max(handle.num_tokens for handle in handles) + 1
        if change == "rollback":
            reservation.rollback()
        else:
            reservation.commit([[number]] * 4 if number % 3 else None)
        manager.check_integrity()
