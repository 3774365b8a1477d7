"""Sequences go to host memory and come back: their data, what others share, and calls that find no room."""

import json

import pytest
import torch

from paged import (
    CacheGroup,
    PagedAttentionExecutor,
    PagedExecutorConfig,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    StaleHandleError,
)
from paged.step.batch import DecodeInput, KvSlotRequest, PrefillInput, UnifiedBatch, UnifiedBatchItem
from tests.cache.prefix_cache import Cache


@pytest.fixture
def cache(device: torch.device) -> Cache:
    return Cache(device=device, num_blocks=8, num_swap_blocks=6)


def test_data_move_and_return(cache: Cache) -> None:
    manager = cache.manager
    handle = cache.run("a", range(11))
    device_blocks = handle.blocks
    manager.swap_out(handle)
    assert handle.is_swapped
    assert handle.blocks == (0, 0, 0)
    assert (handle.num_tokens, handle.is_valid) == (11, True)
    metrics = json.loads(json.dumps(manager.metrics_snapshot()))
    assert (metrics["swapped_out_blocks"], metrics["swap_blocks_free"], metrics["pressure"]) == (3, 3, "low")
    assert metrics["published_blocks"] == metrics["cached_blocks"] == 2
    other = cache.run("b", range(100, 132))  # all eight blocks
    assert set(device_blocks) <= set(other.blocks)
    cache.check(other)
    assert manager.stats().evictions == 2, "what was published of the first is gone"
    cache.free(other)
    manager.swap_in(handle)
    assert not handle.is_swapped
    stats = manager.stats()
    assert (stats.used_blocks, stats.swap_blocks_free, stats.swapped_in_blocks) == (3, 6, 3)
    cache.check(handle)
    cache.feed(handle, [11, 12, 13])
    cache.check(handle)
    assert cache.found(range(14)) == 12, "findable again where it lies now"


def test_executors_refuse_one_that_is_out_and_serve_it_again(device: torch.device) -> None:
    sizes = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8}
    manager = Cache(device=device, num_blocks=8, num_swap_blocks=8, **sizes).manager
    executor = PagedAttentionExecutor(PagedExecutorConfig(**sizes), manager)
    handles = executor.prefill(PrefillInput(torch.tensor([range(9), range(20, 29)]))).kv_caches
    inputs = [DecodeInput(torch.tensor([[7]]), handle) for handle in handles]
    items = [UnifiedBatchItem(h.cache_id, [7], pos_offset=9) for h in handles]
    expected = executor.decode(inputs[0]).logits
    executor.truncate_kv(handles[0], 9)
    manager.swap_out(handles[0])
    for call in (
        lambda: executor.decode(inputs[0]),
        lambda: executor.batch_decode(inputs[::-1]),
        lambda: executor.forward_verify([inputs[0]]),
        lambda: executor.unified_decode(UnifiedBatch(items[::-1])),
        lambda: executor.prefill(PrefillInput(torch.tensor([[1, 2]]), kv_caches=[handles[0]])),
        lambda: executor.truncate_kv(handles[0], 5),
        lambda: manager.reserve([KvSlotRequest(handles[0].cache_id, 9)]),
        lambda: manager.build_metadata([UnifiedBatchItem(handles[0].cache_id, [])]),
    ):
        with pytest.raises(StaleHandleError, match="swapped out"):
            call()
        assert [handle.num_tokens for handle in handles] == [9, 9]
        manager.check_integrity()
    executor.decode(inputs[1])
    manager.swap_in(handles[0])
    assert torch.equal(executor.decode(inputs[0]).logits, expected)


def test_blocks_that_come_back_are_published_in_all_tables() -> None:
    """The first position stays on the device, shared; the others were evicted meanwhile."""
    groups = [CacheGroup((0,)), CacheGroup((1,), head_dim=8, v_head_dim=4), CacheGroup((2,), head_dim=4)]
    config = PagedKvCacheConfig(
        3, 1, 8, block_size=4, num_blocks=40, num_swap_blocks=30, groups=groups, dtype=torch.float32, device="cpu"
    )
    manager, prompt = PagedKvCacheManager(config), list(range(13))
    assert len(config.tables) > 1
    handle = manager.allocate("a", token_ids=prompt)
    manager.reserve([KvSlotRequest("a", 13)]).commit([prompt])
    manager.truncate(manager.fork(handle, "b"), 4)
    manager.swap_out(handle)
    manager.evict(40)
    manager.swap_in(handle)
    assert manager.allocate("c", token_ids=prompt).num_tokens == 12
    manager.check_integrity()
