"""The configuration, and handles: what they tell, and which of them a manager takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paged import InvalidInputError, StaleHandleError
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from tests.cache.random_kv import CONFIG, make_manager, random_rows
from tests.cache.snapshot import snapshot


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
    "write_kv": lambda manager, handle, _: manager.write_kv(handle, 0, 0, *random_rows(1)),
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
        CALLS[name](manager, make_manager().allocate("a", 4), other)
    assert snapshot(manager) == before
    CALLS[name](manager, live, other)


def test_free_refuses_a_foreign_handle(manager: PagedKvCacheManager) -> None:
    foreign = make_manager().allocate("a")
    with pytest.raises(InvalidInputError, match="another manager"):
        manager.free(foreign)
    assert foreign.is_valid
