"""The batch as kernels see it, against a loop over tokens."""

from __future__ import annotations

import random

import pytest
import torch

from paged import InvalidInputError, StaleHandleError
from paged.batch import UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.metadata import AttentionMetadata


def make(device: torch.device, num_blocks: int = 64) -> PagedKvCacheManager:
    return PagedKvCacheManager(PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=num_blocks, device=device))


def assert_matches_loop(metadata: AttentionMetadata, pairs: list[tuple[KvCacheHandle, int]], block_size: int) -> None:
    slots, positions, offsets, lengths = [], [], [0], []
    for handle, count in pairs:
        for position in range(handle.num_tokens, handle.num_tokens + count):
            slots.append(handle.blocks[position // block_size] * block_size + position % block_size)
            positions.append(position)
        offsets.append(offsets[-1] + count)
        lengths.append(handle.num_tokens + count)
    width = max((len(handle.blocks) for handle, _ in pairs), default=0)
    table = [[*handle.blocks, *[0] * (width - len(handle.blocks))] for handle, _ in pairs]
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.positions.tolist() == positions
    assert metadata.cu_seqlens_q.tolist() == offsets
    assert metadata.seq_lens.tolist() == lengths
    assert metadata.block_table.shape == (len(pairs), width)
    assert metadata.block_table.tolist() == table
    assert metadata.max_seqlen_q == max((count for _, count in pairs), default=0)
    assert metadata.plan.max_seqlen_k == max(lengths, default=0)
    assert metadata.slot_mapping.dtype == metadata.positions.dtype == torch.int64
    assert metadata.cu_seqlens_q.dtype == metadata.seq_lens.dtype == metadata.block_table.dtype == torch.int32
    tensors = (
        metadata.slot_mapping,
        metadata.positions,
        metadata.cu_seqlens_q,
        metadata.seq_lens,
        metadata.block_table,
    )
    assert all(tensor.is_contiguous() for tensor in tensors)
    # Triton compiles a kernel anew for pointers that are not aligned to 16.
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.is_cuda)


@pytest.mark.parametrize("seed", range(20))
def test_matches_a_loop_over_tokens(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    manager = make(device)
    rng.shuffle(manager._pool._free)
    pairs = []
    for number in range(rng.randrange(1, 7)):
        held, new, spare = (rng.choice((0, 1, 3, 4, 5, 9, 13)) for _ in range(3))
        handle = manager.allocate(number, held + new + spare)
        manager.advance(handle, held)
        pairs.append((handle, new))
    assert_matches_loop(manager.build_metadata(pairs), pairs, 4)


def test_offsets_and_padding(device: torch.device) -> None:
    manager = make(device)
    pairs = [(manager.allocate(number, count), count) for number, count in enumerate([5, 1, 3])]
    metadata = manager.build_metadata(pairs)
    assert metadata.cu_seqlens_q.tolist() == [0, 5, 6, 9]
    assert (metadata.block_table[1:, 1] == 0).all()
    assert metadata.block_table[0, 1] != 0
    assert metadata.max_seqlen_q == 5


def test_nothing_to_do(device: torch.device) -> None:
    manager = make(device)
    assert_matches_loop(manager.build_metadata([]), [], 4)
    empty = manager.allocate("a")
    assert_matches_loop(manager.build_metadata([(empty, 0)]), [(empty, 0)], 4)


def test_items_name_their_sequence_or_bring_it(device: torch.device) -> None:
    manager = make(device)
    mine, theirs = manager.allocate("a", 3), manager.allocate("b", 3)
    items = [UnifiedBatchItem("a", [1, 2, 3]), UnifiedBatchItem("x", [4], kv_cache=theirs)]
    assert_matches_loop(manager.build_metadata(items), [(mine, 3), (theirs, 1)], 4)


def test_a_grown_table_is_seen(device: torch.device) -> None:
    manager = make(device)
    handle = manager.allocate("a", 4)
    manager.build_metadata([(handle, 4)])
    manager.extend(handle, 7)
    manager.truncate(handle, 2)
    manager.extend(handle, 6)
    manager.extend(handle, 1)
    assert_matches_loop(manager.build_metadata([(handle, 1)]), [(handle, 1)], 4)


def test_new_tokens_never_point_into_a_shared_block(device: torch.device) -> None:
    manager = make(device)
    parent = manager.allocate("a", 6)
    manager.advance(parent, 6)
    child = manager.fork(parent, "b")
    metadata = manager.build_metadata([(parent, 2), (child, 2)])
    assert len(set(metadata.slot_mapping.tolist())) == 4
    assert_matches_loop(metadata, [(parent, 2), (child, 2)], 4)
    manager.check_integrity()


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    manager = make(device)
    handle = manager.allocate("a", 4)
    with pytest.raises(InvalidInputError, match="no room for 5 more tokens"):
        manager.build_metadata([(handle, 5)])
    with pytest.raises(InvalidInputError, match="given twice"):
        manager.build_metadata([(handle, 1), (handle, 1)])
    with pytest.raises(InvalidInputError, match="'b' names no live sequence"):
        manager.build_metadata([UnifiedBatchItem("b", [1])])
    manager.build_metadata([(handle, 4)])
    manager.free(handle)
    with pytest.raises(StaleHandleError):
        manager.build_metadata([(handle, 0)])
