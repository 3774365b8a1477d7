"""One forward as a transaction, and the checks before it."""

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.step.batch import UnifiedBatchItem
from paged.step.batch_step import step_of, validate_items


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
    with step_of(manager, items) as step:
        assert step.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert step.input_ids.dtype == step.sample_rows.dtype == torch.int64
        assert step.sample_rows.tolist() == [4, 7]
        assert step.metadata.cu_seqlens_q.tolist() == [0, 5, 7, 8]
        assert step.metadata.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
        assert [handle.num_tokens for handle in step.handles] == [0, 0, 2]
        assert [handle.cache_id for handle in step.handles] == ["new", "chunk", "mine"]
    assert [handle.num_tokens for handle in step.handles] == [5, 2, 3]
    with step_of(manager, [UnifiedBatchItem("new", [9], pos_offset=5)]) as step:
        assert step.metadata.seq_lens.tolist() == [6]
    assert manager.stats().num_tokens == 11
    manager.check_integrity()
    with step_of(manager, []) as step:
        assert step.input_ids.shape == step.sample_rows.shape == (0,)
        assert step.metadata.cu_seqlens_q.tolist() == [0]


def test_tokens_that_only_the_device_knows(manager: PagedKvCacheManager) -> None:
    """They run in place of the placeholders; their block is published once the cache learns them."""
    with step_of(manager, [UnifiedBatchItem("a", [1, 2, 3]), UnifiedBatchItem("b", [4])]) as step:
        pass
    a, b = step.handles
    ids = torch.tensor([7, -1], device=manager.device)
    items = [UnifiedBatchItem("a", [0], pos_offset=3), UnifiedBatchItem("b", [0], pos_offset=1)]
    with step_of(manager, [*items, UnifiedBatchItem("c", [9, 8, 7, 6])], device_ids=ids) as step:
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


def test_a_batch_that_cannot_be_reserved_leaves_nothing(manager: PagedKvCacheManager) -> None:
    items = [UnifiedBatchItem("new", [1, 2, 3]), UnifiedBatchItem("large", range(18))]
    with pytest.raises(OutOfBlocksError), step_of(manager, [*items, UnifiedBatchItem("b", [1])]):
        pytest.fail("ran")
    assert manager.handles() == ()


def test_validate_items(manager: PagedKvCacheManager) -> None:
    """Whatever holds their ids; test_executor_contract.py has most that are refused."""
    handle = manager.allocate("h", 6)
    manager.advance(handle, 6)
    limits = {"vocab_size": 10, "max_seq_len": 8}
    validate_items([], [], **limits)
    validate_items(
        [UnifiedBatchItem("a", [0, 9]), UnifiedBatchItem("b", [1, 2], pos_offset=6)], [None, handle], **limits
    )
    validate_items([UnifiedBatchItem("a", torch.tensor([3, 4]))], [None], **limits)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="item 'h': its cache_id is given twice"):
        validate_items([UnifiedBatchItem(i, [1], pos_offset=6) for i in (1, 2)], [handle, handle], **limits)
