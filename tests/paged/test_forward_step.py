"""One forward as a transaction, and the checks before it."""

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError, SequenceTooLongError, StaleHandleError
from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.forward_step import forward_step, validate_items
from tests.cache.snapshot import snapshot


@pytest.fixture
def manager(device: torch.device) -> PagedKvCacheManager:
    return PagedKvCacheManager(PagedKvCacheConfig(1, 1, 8, block_size=4, num_blocks=6, device=device, max_seq_len=20))


def test_a_step_moves_every_sequence_on(manager: PagedKvCacheManager) -> None:
    mine = manager.allocate("mine", 2)
    manager.advance(mine, 2)
    items = [
        UnifiedBatchItem("new", [1, 2, 3, 4, 5]),
        UnifiedBatchItem("chunk", [6, 7], is_final_chunk=False),
        UnifiedBatchItem("theirs", [8], kv_cache=mine, pos_offset=2),
    ]
    with forward_step(manager, UnifiedBatch(items)) as step:
        assert step.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert step.input_ids.dtype == step.sample_rows.dtype == torch.int64
        assert step.sample_rows.tolist() == [4, 7]
        assert step.metadata.cu_seqlens_q.tolist() == [0, 5, 7, 8]
        assert step.metadata.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
        assert [handle.num_tokens for handle in step.handles] == [0, 0, 2]
        assert [handle.cache_id for handle in step.handles] == ["new", "chunk", "mine"]
    assert [handle.num_tokens for handle in step.handles] == [5, 2, 3]
    with forward_step(manager, UnifiedBatch([UnifiedBatchItem("new", [9], pos_offset=5)])) as step:
        assert step.metadata.seq_lens.tolist() == [6]
    assert manager.stats().num_tokens == 11
    manager.check_integrity()
    with forward_step(manager, UnifiedBatch([])) as step:
        assert step.input_ids.shape == step.sample_rows.shape == (0,)
        assert step.metadata.cu_seqlens_q.tolist() == [0]


def test_tokens_that_only_the_device_knows(manager: PagedKvCacheManager) -> None:
    """They run in place of the placeholders; their block is published once the cache learns them."""
    with forward_step(manager, UnifiedBatch([UnifiedBatchItem("a", [1, 2, 3]), UnifiedBatchItem("b", [4])])) as step:
        pass
    a, b = step.handles
    ids = torch.tensor([7, -1], device=manager.device)
    items = [UnifiedBatchItem("a", [0], pos_offset=3), UnifiedBatchItem("b", [0], pos_offset=1)]
    with forward_step(manager, UnifiedBatch([*items, UnifiedBatchItem("c", [9, 8, 7, 6])], ids)) as step:
        assert step.input_ids.tolist() == [7, 0, 9, 8, 7, 6], "-1 is no token"
    assert [handle.num_tokens for handle in step.handles] == [4, 2, 4]

    def num_cached(*token_ids: int) -> int:
        handle = manager.allocate("prompt", token_ids=token_ids)
        found = handle.num_cached_tokens
        manager.free(handle)
        return found

    assert (num_cached(1, 2, 3, 7, 0), num_cached(9, 8, 7, 6, 0)) == (0, 4)
    manager.append_tokens([(a, [7]), (b, [5])])
    assert num_cached(1, 2, 3, 7, 0) == 4
    manager.check_integrity()


def test_a_batch_that_cannot_be_reserved_does_not_run(manager: PagedKvCacheManager) -> None:
    stale = manager.allocate("stale")
    manager.free(stale)
    manager.allocate("stale")
    foreign = PagedKvCacheManager(manager.config).allocate("a")
    mine = manager.allocate("a", 4)
    before = snapshot(manager)["handles"]
    first = UnifiedBatchItem("new", [1, 2, 3])
    for items, error in (
        ([UnifiedBatchItem("b", range(17))], OutOfBlocksError),
        ([UnifiedBatchItem("b", range(21))], SequenceTooLongError),
        ([UnifiedBatchItem("b", [1], kv_cache=stale)], StaleHandleError),
        ([UnifiedBatchItem("b", [1], kv_cache=foreign)], InvalidInputError),
        ([UnifiedBatchItem("a", [1]), UnifiedBatchItem("b", [1], kv_cache=mine)], InvalidInputError),
    ):
        with pytest.raises(error), forward_step(manager, UnifiedBatch([first, *items])):
            pytest.fail("ran")
        assert snapshot(manager)["handles"] == before
        assert manager.stats().used_blocks == 1
    with forward_step(manager, UnifiedBatch([first, UnifiedBatchItem("b", range(16))])):
        assert manager.stats().free_blocks == 0


def validate(*items: UnifiedBatchItem) -> None:
    validate_items(items, [item.kv_cache for item in items], vocab_size=10, max_seq_len=8)


def test_validate_items(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("h", 6)
    manager.advance(handle, 6)
    validate()
    validate(UnifiedBatchItem("a", [0, 9]), UnifiedBatchItem("b", [1, 2], kv_cache=handle, pos_offset=6))
    validate(UnifiedBatchItem("a", torch.tensor([3, 4])))  # type: ignore[arg-type]
    twice = [UnifiedBatchItem(i, [1], kv_cache=handle, pos_offset=6) for i in (1, 2)]
    for items, message in (
        (twice, "item .h.: its cache_id is given twice"),
        ([UnifiedBatchItem("a", [1], kv_cache=handle)], "pos_offset 0, expected 6"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            validate(*items)
    with pytest.raises(SequenceTooLongError, match="would reach 9 tokens, expected at most 8"):
        validate(UnifiedBatchItem("a", [1, 2, 3], kv_cache=handle, pos_offset=6))
