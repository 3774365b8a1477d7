"""Room, lengths, sharing and data of the cache manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged import InvalidInputError, OutOfBlocksError, PagedError, SequenceTooLongError, StaleHandleError
from paged import kv_cache_tensors as tensors_module
from paged.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.kv_cache_manager import PagedKvCacheManager

CONFIG = PagedKvCacheConfig(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, num_blocks=6, dtype=torch.float32)


@pytest.fixture
def manager(device: torch.device) -> PagedKvCacheManager:
    return make(device=device)


def make(**changes: Any) -> PagedKvCacheManager:
    return PagedKvCacheManager(replace(CONFIG, **changes))


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 2, 8), torch.randn(count, 2, 8)


def grow(manager: PagedKvCacheManager, handle: KvCacheHandle, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Append `count` random tokens to `handle` in every layer and return what layer 0 got."""
    start = handle.num_tokens
    manager.extend(handle, count)
    key, value = rows(count)
    for layer in range(CONFIG.num_layers):
        manager.write_kv(handle, layer, start, key + layer, value + layer)
    return key, value


def assert_holds(
    manager: PagedKvCacheManager, handle: KvCacheHandle, key: torch.Tensor, value: torch.Tensor, start: int = 0
) -> None:
    for layer in range(CONFIG.num_layers):
        got_key, got_value = manager.read_kv(handle, layer, start, len(key))
        assert torch.equal(got_key.cpu(), key + layer)
        assert torch.equal(got_value.cpu(), value + layer)


def snapshot(manager: PagedKvCacheManager) -> object:
    """All that a failed call must leave alone."""
    manager.check_integrity()
    handles = [(h.cache_id, h.blocks, h.num_tokens, h.num_cached_tokens, h.stats()) for h in manager.handles()]
    stats = replace(manager.stats(), allocation_failures=0, cow_copies=0)
    return handles, stats, manager._tensors.storage.clone().tolist()


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_blocks_for_a_length(num_tokens: int, blocks: int) -> None:
    manager = make(block_size=16)
    handle = manager.allocate("a", num_tokens)
    assert len(handle.blocks) == blocks
    assert (handle.num_tokens, handle.capacity) == (0, 16 * blocks)
    assert manager.stats().used_blocks == blocks


def test_room_for_token_ids(manager: PagedKvCacheManager) -> None:
    assert manager.allocate("a", token_ids=range(5)).capacity == 8
    assert manager.allocate("b", 2, token_ids=range(5)).capacity == 8
    assert manager.allocate("c", 5, token_ids=[1]).capacity == 8


def test_a_handle_tells_what_it_is(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 5, namespace=("model", "adapter"))
    assert (handle.cache_id, handle.request_id, handle.namespace) == ("a", "a", ("model", "adapter"))
    assert handle.is_valid
    assert not handle.is_swapped
    assert manager.get_handle("a") is handle
    assert manager.get_handle("b") is None
    assert manager.handles() == (handle,)
    with pytest.raises(AttributeError):
        handle.num_tokens = 3  # type: ignore[misc]


def test_six_tokens_read_back_across_two_blocks(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 6)
    key, value = rows(6)
    for position in range(6):
        manager.write_kv(handle, 1, position, key[position], value[position])
    manager.advance(handle, 6)
    got_key, got_value = manager.read_kv(handle, 1, 0, 6)
    assert torch.equal(got_key.cpu(), key)
    assert torch.equal(got_value.cpu(), value)
    assert torch.equal(manager.read_kv(handle, 1, 3, 2)[0].cpu(), key[3:5])
    block, offset = handle.blocks[1], 1
    assert torch.equal(manager.k_cache(1)[block, offset].cpu(), key[5])
    assert torch.equal(manager.v_cache(1)[block, offset].cpu(), value[5])
    assert not manager.read_kv(handle, 0, 0, 6)[0].any()


def test_requests_never_see_each_others_data(manager: PagedKvCacheManager) -> None:
    a, b = manager.allocate("a"), manager.allocate("b")
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"a": [], "b": []}
    for count in (1, 3, 2, 4):
        for handle in (a, b):
            parts[str(handle.cache_id)].append(grow(manager, handle, count))
    for handle in (a, b):
        keys, values = zip(*parts[str(handle.cache_id)], strict=True)
        assert_holds(manager, handle, torch.cat(keys), torch.cat(values))
    assert not set(a.blocks) & set(b.blocks)


def test_growing_keeps_what_was_there(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a")
    key, value = grow(manager, handle, 4)
    grow(manager, handle, 4)
    assert_holds(manager, handle, key, value)


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


def test_freeing_twice_is_harmless(manager: PagedKvCacheManager) -> None:
    stale = manager.allocate("a", 5)
    manager.free(stale)
    manager.free(stale)
    live = manager.allocate("a", 5)
    manager.free(stale)
    assert live.is_valid
    assert not stale.is_valid
    assert (stale.blocks, stale.capacity, stale.num_tokens) == ((), 0, 0)
    assert manager.stats().used_blocks == 2
    manager.check_integrity()


CALLS: dict[str, Callable[[PagedKvCacheManager, KvCacheHandle, KvCacheHandle], object]] = {
    "extend": lambda manager, handle, _: manager.extend(handle, 1),
    "advance": lambda manager, handle, _: manager.advance(handle, 0),
    "truncate": lambda manager, handle, _: manager.truncate(handle, 0),
    "fork": lambda manager, handle, _: manager.fork(handle, "fork"),
    "share_from": lambda manager, handle, other: manager.share_prefix_blocks(handle, other, 0),
    "share_to": lambda manager, handle, other: manager.share_prefix_blocks(other, handle, 0),
    "build_metadata": lambda manager, handle, _: manager.build_metadata([(handle, 0)]),
    "write_kv": lambda manager, handle, _: manager.write_kv(handle, 0, 0, *rows(1)),
    "read_kv": lambda manager, handle, _: manager.read_kv(handle, 0, 0, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_stale_and_foreign_handles_are_refused(name: str, manager: PagedKvCacheManager) -> None:
    stale = manager.allocate("a", 4)
    manager.free(stale)
    live, other = manager.allocate("a", 4), manager.allocate("b")
    before = snapshot(manager)
    with pytest.raises(StaleHandleError, match="'a' has been freed"):
        CALLS[name](manager, stale, other)
    with pytest.raises(InvalidInputError, match="another manager"):
        CALLS[name](manager, make().allocate("a", 4), other)
    assert snapshot(manager) == before
    CALLS[name](manager, live, other)


def test_free_refuses_a_foreign_handle(manager: PagedKvCacheManager) -> None:
    foreign = make().allocate("a")
    with pytest.raises(InvalidInputError, match="another manager"):
        manager.free(foreign)
    assert foreign.is_valid


def test_a_recycled_block_shows_nothing_of_its_last_owner() -> None:
    manager = make(num_blocks=2)
    first = manager.allocate("a")
    grow(manager, first, 8)
    manager.free(first)
    second = manager.allocate("b", 4)
    with pytest.raises(InvalidInputError, match=r"positions 0\.\.1, expected within the 0 written"):
        manager.read_kv(second, 0, 0, 1)
    manager.extend(second, 8)
    for layer in range(2):
        assert not torch.stack(manager.read_kv(second, layer, 0, 8)).any()


def test_reads_stop_at_what_was_written_without_a_gap(manager: PagedKvCacheManager) -> None:
    handle = manager.allocate("a", 8)
    key, value = rows(8)
    manager.write_kv(handle, 0, 0, key[:3], value[:3])
    manager.write_kv(handle, 0, 5, key[5:6], value[5:6])
    assert torch.equal(manager.read_kv(handle, 0, 0, 3)[0].cpu(), key[:3])
    with pytest.raises(InvalidInputError, match="expected within the 3 written"):
        manager.read_kv(handle, 0, 5, 1)
    manager.write_kv(handle, 0, 3, key[3:], value[3:])
    assert torch.equal(manager.read_kv(handle, 0, 0, 8)[1].cpu(), value)
    manager.advance(handle, 2)
    manager.truncate(handle, 1)
    with pytest.raises(InvalidInputError, match="expected within the 1 written"):
        manager.read_kv(handle, 0, 1, 1)


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
    new_key, new_value = rows(2)
    for layer in range(2):
        manager.write_kv(child, layer, 3, new_key + layer, new_value + layer)
    assert manager.stats().cow_copies == 2
    assert_holds(manager, parent, key, value)
    assert_holds(manager, child, torch.cat([key[:3], new_key, key[5:]]), torch.cat([value[:3], new_value, value[5:]]))
    before = snapshot(manager)
    manager.allocate("c", 4)
    with pytest.raises(OutOfBlocksError):
        manager.write_kv(child, 0, 8, *rows(1))
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
        patch.setattr(tensors_module, "copy_blocks", fail)
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


def test_longest_length() -> None:
    manager = make(max_seq_len=6)
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
    key, value = rows(1)
    with pytest.raises(InvalidInputError, match=r"key: shape"):
        manager.write_kv(handle, 0, 0, key[..., :4], value)
    with pytest.raises(InvalidInputError, match=r"value: shape"):
        manager.write_kv(handle, 0, 0, key, torch.cat([value, value]))
    with pytest.raises(InvalidInputError, match=r"position: 4\.\.5, expected within the capacity 4"):
        manager.write_kv(handle, 0, 4, key, value)
    manager.write_kv(handle, 0, 3, key, value)
    assert manager.handles() == (handle,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("head_dim", 0),
        ("block_size", 0),
        ("num_blocks", 0),
        ("num_swap_blocks", -1),
        ("max_seq_len", 0),
        ("low_watermark", 0.05),
        ("high_watermark", -0.1),
    ],
)
def test_config_is_checked(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=field):
        replace(CONFIG, **{field: value})  # type: ignore[arg-type]


def test_tensors_follow_the_config(device: torch.device) -> None:
    manager = make(dtype=torch.float16, device=device)
    assert manager.k_cache(1).shape == manager.v_cache(0).shape == (7, 4, 2, 8)
    assert manager.k_cache(0).dtype == torch.float16
    assert manager.device.type == device.type
    assert manager.stats().bytes_per_block == 2 * 2 * 4 * 2 * 8 * 2
    assert make(dtype=None).k_cache(0).dtype == torch.get_default_dtype()
    with pytest.raises(InvalidInputError, match="dtype"):
        make(dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_slow_access_converts_to_the_cache_dtype(dtype: torch.dtype, device: torch.device) -> None:
    manager = make(dtype=dtype, device=device)
    handle = manager.allocate("a", 6)
    key, value = rows(6)
    manager.write_kv(handle, 0, 0, key, value)
    manager.extend(manager.fork(handle, "b"), 1)
    got_key, got_value = manager.read_kv(handle, 0, 0, 6)
    assert torch.equal(got_key.cpu().float(), key.to(dtype).float())
    assert torch.equal(got_value.cpu().float(), value.to(dtype).float())


@pytest.mark.usefixtures("backend")
def test_an_8_bit_cache_moves_its_bytes(device: torch.device) -> None:
    """Saturated, cleared, shared, copied before a write, swapped out and back: half the bytes of 16 bits."""
    manager = make(dtype=torch.float8_e4m3fn, device=device, num_swap_blocks=6)
    assert manager.stats().bytes_per_block == 2 * 2 * 4 * 2 * 8
    parent = manager.allocate("a", 6)
    key, value = (400 * torch.randn(6, 2, 8) for _ in range(2))
    key[0, 0, :3] = torch.tensor([torch.inf, -1e6, torch.nan])
    manager.advance(parent, 6)
    for layer in range(2):
        manager.write_kv(parent, layer, 0, key, value)
    child = manager.fork(parent, "b")
    manager.extend(child, 1)
    assert manager.stats().cow_copies == 1
    manager.swap_out(parent)
    manager.swap_in(parent)
    for handle, layer in ((parent, 0), (parent, 1), (child, 0), (child, 1)):
        stored = manager.read_kv(handle, layer, 0, 6)
        for got, rows in zip(stored, (key, value), strict=True):
            assert got.dtype == torch.float8_e4m3fn
            want = rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()
            torch.testing.assert_close(got.float().cpu(), want, rtol=0, atol=0, equal_nan=True)
    new_key, _ = manager.read_kv(child, 1, 6, 1)
    assert not new_key.float().any()


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
