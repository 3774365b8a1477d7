"""Sequences go to host memory and come back: their data, what others share, and calls that find no room."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from paged import (
    DecodeInput,
    KvCacheHandle,
    OutOfBlocksError,
    PagedAttentionExecutor,
    PagedExecutorConfig,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    PrefillInput,
    StaleHandleError,
    UnifiedBatch,
    UnifiedBatchItem,
)
from paged.batch import KvSlotRequest
from tests.cache.prefix_cache import BLOCK, Cache
from tests.cache.snapshot import snapshot

pytestmark = pytest.mark.usefixtures("torch_backend")


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
    stats = manager.stats()
    assert (stats.free_blocks, stats.swap_blocks_free, stats.swapped_out_blocks) == (8, 3, 3)
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


def test_several_are_out_at_the_same_time(cache: Cache) -> None:
    handles = [cache.run(i, range(100 * i, 100 * i + 7)) for i in range(4)]
    for handle in handles[:3]:
        cache.manager.swap_out(handle)
    cache.free(handles[3])
    other = cache.run("other", range(500, 524))
    cache.free(handles[0])
    assert cache.manager.stats().swap_blocks_free == 2
    cache.manager.swap_in(handles[2])
    with pytest.raises(OutOfBlocksError):
        cache.manager.swap_in(handles[1])
    cache.free(other)
    cache.manager.swap_in(handles[1])
    cache.check()


def test_swapped_twice(cache: Cache) -> None:
    handle = cache.run("a", range(7))
    cache.manager.swap_in(handle)
    for _ in range(2):
        cache.manager.swap_out(handle)
    assert cache.manager.stats().swapped_out_blocks == 2
    for _ in range(2):
        cache.manager.swap_in(handle)
    assert cache.manager.stats().swapped_in_blocks == 2
    cache.check()


def test_room_beyond_the_length_is_given_back(cache: Cache) -> None:
    handle = cache.manager.allocate("a", 20)
    cache.tokens[handle] = []
    cache.feed(handle, range(5))
    cache.manager.swap_out(handle)
    assert cache.manager.stats().swap_blocks_free == 4
    cache.manager.swap_in(handle)
    assert handle.capacity == 8
    empty = cache.manager.allocate("b", 4)
    cache.manager.swap_out(empty)
    assert empty.is_swapped
    cache.manager.swap_in(empty)
    assert (empty.capacity, empty.is_swapped) == (0, False)
    cache.check(handle)


def test_blocks_that_another_needs_stay(cache: Cache) -> None:
    first = cache.run("a", range(10))
    second = cache.run("b", [*range(8), 50])
    shared = first.blocks[:2]
    cache.manager.swap_out(first)
    assert first.blocks == (*shared, 0)
    assert cache.manager.stats().swapped_out_blocks == 1
    cache.check(second)
    cache.free(second)
    assert cache.manager.stats().used_blocks == 2, "kept for the one that is out"
    cache.free(cache.run("other", range(100, 124)))
    cache.manager.swap_in(first)
    assert first.blocks[:2] == shared
    cache.check()


def test_published_blocks_stay_findable_while_out(cache: Cache) -> None:
    first = cache.run("a", range(9))
    cache.manager.swap_out(first)
    second = cache.run("b", range(9))
    assert second.num_cached_tokens == 8
    cache.manager.swap_in(first)
    assert not set(first.blocks) & set(second.blocks)
    cache.check()


CALLS: list[Callable[[PagedKvCacheManager, KvCacheHandle, KvCacheHandle], object]] = [
    lambda m, h, _: m.extend(h, 0),
    lambda m, h, _: m.advance(h, 0),
    lambda m, h, _: m.commit(h, []),
    lambda m, h, _: m.append_tokens([(h, [])]),
    lambda m, h, _: m.truncate(h, 0),
    lambda m, h, _: m.fork(h, f"fork {m.stats().num_sequences}"),
    lambda m, h, _: m.reserve([KvSlotRequest(h.cache_id, h.num_tokens)]),
    lambda m, h, _: m.build_metadata([(h, 0)]),
    lambda m, h, _: m.build_metadata([UnifiedBatchItem(h.cache_id, [])]),
    lambda m, h, _: m.write_kv(h, 0, 0, torch.zeros(0, 1, 8), torch.zeros(0, 1, 8)),
    lambda m, h, _: m.read_kv(h, 0, 0, 0),
    lambda m, h, other: m.share_prefix_blocks(h, other, 0),
    lambda m, h, other: m.share_prefix_blocks(other, h, 0),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_no_other_call_takes_one_that_is_out(cache: Cache, number: int) -> None:
    handle, other = cache.manager.allocate("a", 6), cache.manager.allocate("b")
    CALLS[number](cache.manager, handle, other)
    cache.free(cache.run("c", range(5)))
    cache.manager.swap_out(handle)
    before = snapshot(cache.manager)
    with pytest.raises(StaleHandleError, match="swapped out"):
        CALLS[number](cache.manager, handle, other)
    assert snapshot(cache.manager) == before
    cache.manager.swap_in(handle)
    CALLS[number](cache.manager, handle, cache.manager.allocate("empty"))


def test_executors_refuse_one_that_is_out_and_serve_it_again(device: torch.device) -> None:
    sizes = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 8}
    manager = PagedKvCacheManager(
        PagedKvCacheConfig(**sizes, block_size=BLOCK, num_blocks=8, num_swap_blocks=8, device=device)
    )
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
    ):
        with pytest.raises(StaleHandleError, match="swapped out"):
            call()
        assert [handle.num_tokens for handle in handles] == [9, 9]
        manager.check_integrity()
    executor.decode(inputs[1])
    manager.swap_in(handles[0])
    assert torch.equal(executor.decode(inputs[0]).logits, expected)


def test_host_pool_too_small(cache: Cache) -> None:
    first, second = cache.run("a", range(16)), cache.run("b", range(50, 62))
    cache.manager.swap_out(first)
    before = snapshot(cache.manager)
    with pytest.raises(OutOfBlocksError) as caught:
        cache.manager.swap_out(second)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert snapshot(cache.manager) == before
    assert not second.is_swapped
    assert cache.manager.stats().allocation_failures == 1
    cache.truncate(second, 8)
    cache.manager.swap_out(second)
    assert cache.manager.stats().swap_blocks_free == 0


def test_device_pool_too_small(cache: Cache) -> None:
    handle = cache.run("a", range(16))
    cache.manager.swap_out(handle)
    other = cache.run("b", range(50, 75))
    before = snapshot(cache.manager)
    with pytest.raises(OutOfBlocksError) as caught:
        cache.manager.swap_in(handle)
    assert (caught.value.needed, caught.value.free) == (4, 1)
    assert snapshot(cache.manager) == before
    assert handle.is_swapped
    cache.check(other)
    cache.truncate(other, 16)
    cache.manager.swap_in(handle)
    cache.check()


@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
def test_failing_copy_changes_nothing(cache: Cache, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = cache.run("a", range(11))
    cache.run("b", [*range(4), 60])
    manager, copy = cache.manager, getattr(cache.manager._tensors.host_blocks[0], direction)
    if direction == "swap_in":
        manager.swap_out(handle)

    def fail(pairs: list[tuple[int, int]]) -> None:
        copy(pairs[:1])
        raise RuntimeError("the copy broke")

    before = snapshot(cache.manager)
    with monkeypatch.context() as patch:
        patch.setattr(manager._tensors.host_blocks[0], direction, fail)
        with pytest.raises(RuntimeError, match="the copy broke"):
            getattr(manager, direction)(handle)
    if direction == "swap_out":
        assert snapshot(cache.manager) == before
        cache.check()
    assert handle.is_swapped == (direction == "swap_in")
    manager.check_integrity()
    assert (manager.stats().used_blocks, manager.stats().swap_blocks_free) == ((4, 6), (2, 4))[handle.is_swapped]
    manager.swap_out(handle)
    manager.swap_in(handle)
    cache.check()


def test_free_while_out(cache: Cache) -> None:
    handle = cache.run("a", range(11))
    cache.run("b", [*range(8), 60])
    cache.manager.swap_out(handle)
    cache.free(handle)
    assert not handle.is_valid
    assert not handle.is_swapped
    stats = cache.manager.stats()
    assert (stats.swap_blocks_free, stats.used_blocks) == (6, 3)
    with pytest.raises(StaleHandleError, match="freed"):
        cache.manager.swap_in(handle)
    cache.check()


def test_metrics_are_ready_for_json(cache: Cache) -> None:
    handle = cache.run("a", range(11))
    cache.manager.swap_out(handle)
    metrics = json.loads(json.dumps(cache.manager.metrics_snapshot()))
    assert (metrics["swapped_out_blocks"], metrics["swap_blocks_free"], metrics["pressure"]) == (3, 3, "low")
    assert metrics["published_blocks"] == metrics["cached_blocks"] == 2
