"""The configuration, and handles: what they tell, and which of them a manager takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged import InvalidInputError, StaleHandleError
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from tests.cache.random_kv import CONFIG, make_manager, random_rows
from tests.cache.snapshot import snapshot

INVALID: dict[str, list[Any]] = {
    "num_layers": [0, True],
    "num_kv_heads": [-1],
    "head_dim": [0],
    "block_size": [0],
    "num_blocks": [0, 1 << 31, 4.0],
    "num_swap_blocks": [-1],
    "max_seq_len": [0, False],
    "sliding_window": [0],
    "low_watermark": [0.05, 1.1, float("nan"), True, 10**400],  # the first is below high_watermark
    "high_watermark": [-0.1, 0.4, "0.1"],
    "max_pinned_fraction": [-0.1, 1.0, 1.1, "0.1"],
    "enable_prefix_cache": [1],
    "prefix_hash": [[]],
}


@pytest.mark.parametrize("field", INVALID)
def test_config_is_checked(field: str) -> None:
    for value in INVALID[field]:
        with pytest.raises(InvalidInputError, match=field):
            replace(CONFIG, **{field: value})
    assert type(replace(CONFIG, num_layers=np.int8(1)).num_layers) is int


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
    foreign = make_manager().allocate("a")
    with pytest.raises(InvalidInputError, match="another manager"):
        manager.free(foreign)
    assert foreign.is_valid
    manager.check_integrity()


CALLS: dict[str, Callable[[PagedKvCacheManager, KvCacheHandle, KvCacheHandle], object]] = {
    "extend": lambda manager, handle, _: manager.extend(handle, 0),
    "advance": lambda manager, handle, _: manager.advance(handle, 0),
    "commit": lambda manager, handle, _: manager.commit(handle, []),
    "append_tokens": lambda manager, handle, _: manager.append_tokens([(handle, [])]),
    "truncate": lambda manager, handle, _: manager.truncate(handle, 0),
    "fork": lambda manager, handle, _: manager.fork(handle, f"fork {manager.stats().num_sequences}"),
    "share_from": lambda manager, handle, other: manager.share_prefix_blocks(handle, other, 0),
    "share_to": lambda manager, handle, other: manager.share_prefix_blocks(other, handle, 0),
    "build_metadata": lambda manager, handle, _: manager.build_metadata([(handle, 0)]),
    "reserve_step": lambda manager, handle, _: manager.reserve_step([handle], [0])[0].rollback(),
    "write_kv": lambda manager, handle, _: manager.write_kv(handle, 0, 0, *random_rows(0)),
    "read_kv": lambda manager, handle, _: manager.read_kv(handle, 0, 0, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_stale_foreign_and_swapped_handles_are_refused(name: str) -> None:
    manager, call = make_manager(num_swap_blocks=2), CALLS[name]
    stale = manager.allocate("a", 4)
    manager.free(stale)
    live, other = manager.allocate("a", 4), manager.allocate("b")
    call(manager, live, other)
    manager.swap_out(live)
    before = snapshot(manager)
    for handle, error, message in (
        (stale, StaleHandleError, "'a' has been freed"),
        (make_manager().allocate("a", 4), InvalidInputError, "another manager"),
        (live, StaleHandleError, "swapped out"),
    ):
        with pytest.raises(error, match=message):
            call(manager, handle, other)
        assert snapshot(manager) == before
    manager.swap_in(live)
    call(manager, live, manager.allocate("empty"))
