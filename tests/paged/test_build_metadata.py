"""The batch as kernels see it, against a loop over tokens."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from paged import InvalidInputError, StaleHandleError
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.step.batch import UnifiedBatchItem
from paged.step.metadata import AttentionMetadata
from tests.cache.stress.test_failed_calls import OURS
from tests.failure import CACHE_GUARD, Failure


@pytest.fixture
def manager(device: torch.device) -> PagedKvCacheManager:
    return PagedKvCacheManager(PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=64, device=device))


def check(manager: PagedKvCacheManager, pairs: list[tuple[KvCacheHandle, int]], items: Any = None) -> AttentionMetadata:
    """What is made of `pairs`, or of the items that stand for them, is what a loop over their tokens makes."""
    metadata = manager.build_metadata(pairs if items is None else items)
    slots, positions, offsets, lengths = [], [], [0], []
    for handle, count in pairs:
        for position in range(handle.num_tokens, handle.num_tokens + count):
            slots.append(handle.blocks[position // 4] * 4 + position % 4)
            positions.append(position)
        offsets.append(offsets[-1] + count)
        lengths.append(handle.num_tokens + count)
    width = max((len(handle.blocks) for handle, _ in pairs), default=0)
    table = torch.zeros(len(pairs), width, dtype=torch.int32)
    for row, (handle, _) in zip(table, pairs, strict=True):
        row[: len(handle.blocks)] = torch.tensor(handle.blocks)
    for tensor, values, dtype in (
        (metadata.slot_mapping, slots, torch.int64),
        (metadata.positions, positions, torch.int64),
        (metadata.cu_seqlens_q, offsets, torch.int32),
        (metadata.seq_lens, lengths, torch.int32),
        (metadata.block_table, table, torch.int32),
    ):
        torch.testing.assert_close(tensor.cpu(), torch.as_tensor(values, dtype=dtype), rtol=0, atol=0)
        assert tensor.is_contiguous()
        # Triton compiles a kernel anew for pointers that are not aligned to 16.
        assert tensor.data_ptr() % 16 == 0 or not tensor.is_cuda
    assert metadata.max_seqlen_q == max((count for _, count in pairs), default=0)
    assert metadata.plan.max_seqlen_k == max(lengths, default=0)
    return metadata


@pytest.mark.parametrize("seed", range(20))
def test_matches_a_loop_over_tokens(seed: int, manager: PagedKvCacheManager) -> None:
    rng = random.Random(seed)
    rng.shuffle(manager._pool._free)
    pairs = []
    for number in range(rng.randrange(1, 7)):
        held, new, spare = (rng.choice((0, 1, 3, 4, 5, 9, 13)) for _ in range(3))
        handle = manager.allocate(number, held + new + spare)
        manager.advance(handle, held)
        pairs.append((handle, new))
    check(manager, pairs)


def test_offsets_and_padding(manager: PagedKvCacheManager) -> None:
    metadata = check(manager, [(manager.allocate(number, count), count) for number, count in enumerate([5, 1, 3])])
    assert metadata.cu_seqlens_q.tolist() == [0, 5, 6, 9]
    assert (metadata.block_table[1:, 1] == 0).all()
    assert metadata.block_table[0, 1] != 0
    check(manager, [])
    check(manager, [(manager.allocate("empty"), 0)])
    manager.free(manager.get_handle("empty"))
    check(manager, [])


def test_a_failure_anywhere_leaves_no_wrong_row(manager: PagedKvCacheManager) -> None:
    """Neither one that an earlier sequence has left, nor one that was being written for blocks that are given back."""
    count, is_hit = 0, True
    while is_hit:
        for lengths in ((9, 14), (13, 3)):
            pairs = [(manager.allocate(number, length), length) for number, length in enumerate(lengths)]
            handles = [handle for handle, _ in pairs]
            for call in (partial(manager.build_metadata, pairs), partial(manager.reserve_step, handles, [9, 20])):
                is_hit = Failure(count, OURS, MemoryError(), skip=CACHE_GUARD).hits(call)
                check(manager, pairs[::-1])
                check(manager, pairs)
            for handle in handles:
                manager.free(handle)
        count += 1
    assert count > 100


def test_items_name_their_sequence_or_bring_it(manager: PagedKvCacheManager) -> None:
    mine, theirs = manager.allocate("a", 3), manager.allocate("b", 3)
    items = [UnifiedBatchItem("a", [1, 2, 3]), UnifiedBatchItem("x", [4], kv_cache=theirs)]
    check(manager, [(mine, 3), (theirs, 1)], items)


def test_refuses_what_does_not_fit(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 4)
    for items, message in (
        ([(handle, 5)], "no capacity for 5 more tokens"),
        ([(handle, 1), (handle, 1)], "given twice"),
        ([UnifiedBatchItem("b", [1])], "'b' is not a live sequence"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            manager.build_metadata(items)
    manager.build_metadata([(handle, 4)])
    manager.free(handle)
    with pytest.raises(StaleHandleError):
        manager.build_metadata([(handle, 0)])
