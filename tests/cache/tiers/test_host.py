"""Prefixes that the device evicts come back from host memory, with the oracle's closed form as the judge."""

import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paged.cache.tiers.host
from paged import (
    InvalidInputError,
    PagedKvCacheConfig,
    PagedKvCacheManager,
)
from paged.cache.groups import CacheGroup
from paged.errors import OutOfBlocksError
from tests.cache.prefix_cache import Cache
from tests.cache.stress.test_failed_calls import OURS
from tests.failure import CACHE_GUARD, Failure

BLOCK_BYTES = 2 * 2 * 4 * 8 * 4  # two layers, K and V, four tokens of eight float32
WINDOWS = [CacheGroup((0,)), CacheGroup((1,), sliding_window=6)]


def evict_all(cache: Cache) -> None:
    cache.manager.evict(cache.manager.config.num_blocks)


@pytest.mark.parametrize("changes", [{}, {"groups": WINDOWS}], ids=["plain", "windows"])
def test_evicted_prefixes_come_back(changes: dict[str, Any], device: torch.device) -> None:
    """`Cache.begin` compares all data, which was NaN until it came. A prompt takes what the device has, then what the
    host has."""
    cache = Cache(device=device, num_blocks=40, host_cache_bytes=80 * BLOCK_BYTES, **changes)
    for name, tokens in {"a": range(18), "b": [*range(8), *range(50, 61)]}.items():
        cache.free(cache.run(name, tokens))
    evict_all(cache)
    for layer in cache.layers:
        cache.manager.k_cache(layer).fill_(torch.nan)
        cache.manager.v_cache(layer).fill_(torch.nan)
    assert cache.found(range(18)) == 0
    handle = cache.run("c", range(18))
    assert handle.num_cached_tokens == 16
    cache.check(handle)
    other = cache.run("d", [*range(8), *range(50, 61)])  # its first blocks are on the device again
    assert other.num_cached_tokens == 16
    assert cache.manager.stats().host_hits == 2
    assert cache.run("e", range(8), namespace="other").num_cached_tokens == 0
    cache.check()


def test_budget_is_shared_with_swapped_sequences(device: torch.device) -> None:
    """Swapped blocks replace entries, entries never a swapped block; tails of prefixes go before heads."""
    cache = Cache(device=device, num_swap_blocks=4, host_cache_bytes=6 * BLOCK_BYTES)
    cache.free(cache.run("a", range(24)))
    evict_all(cache)
    assert cache.manager.stats().host_cached_blocks == 6
    swapped = cache.run("b", range(100, 116))
    cache.manager.swap_out(swapped)
    stats = cache.manager.stats()
    assert (stats.host_blocks, stats.host_cached_blocks, stats.swap_blocks_free) == (6, 2, 0)
    assert cache.run("c", range(24)).num_cached_tokens == 8
    with pytest.raises(OutOfBlocksError):
        cache.manager.swap_out(cache.manager.get_handle("c"))  # type: ignore[arg-type]
    cache.manager.evict(12)
    cache.manager.swap_in(swapped)
    cache.check()


def test_what_is_withdrawn_for_good_is_gone_here_too(device: torch.device) -> None:
    cache = Cache(device=device, host_cache_bytes=20 * BLOCK_BYTES)
    for name, namespace in (("a", None), ("b", "adapter")):
        cache.free(cache.run(name, range(12), namespace))
    evict_all(cache)
    cache.free(cache.run("c", range(12), "adapter"))
    cache.manager.forget_namespace("adapter")
    evict_all(cache)  # blocks of the forgotten generation go to the host, where nothing may find them
    assert cache.run("d", range(12), "adapter").num_cached_tokens == 0
    assert cache.run("e", range(12)).num_cached_tokens == 11
    evict_all(cache)
    cache.manager.clear_prefix_cache()
    assert cache.manager.stats().host_cached_blocks == 0
    assert cache.run("f", range(12)).num_cached_tokens == 0
    cache.check()


def test_rows_of_embeddings_are_told_apart(device: torch.device) -> None:
    """Ids of two rows that share their last 31 bits, which is all that the index packs of them."""
    cache = Cache(device=device, host_cache_bytes=20 * BLOCK_BYTES)
    manager, first = cache.manager, -(1 << 128)
    prompts = [[first - row, 1, 2, 3, 4, 5, 6, 7, 8] for row in (5, 5 + (1 << 40))]
    for number, prompt in enumerate(prompts):
        handle = manager.allocate(number, len(prompt))
        manager.advance(handle, len(prompt))
        manager.append_tokens([(handle, prompt)])
        manager.free(handle)
        manager.evict(12)
    assert manager.stats().host_cached_blocks == 4
    for number, prompt in enumerate(prompts):
        assert manager.allocate(f"again {number}", token_ids=prompt).num_cached_tokens == 8
    mixed = [prompts[0][0] - (1 << 50), *prompts[0][1:]]
    assert manager.allocate("mixed", token_ids=mixed).num_cached_tokens == 0
    manager.check_integrity()


def test_no_load_takes_capacity_that_was_promised(device: torch.device) -> None:
    cache = Cache(device=device, num_blocks=6, host_cache_bytes=20 * BLOCK_BYTES)
    cache.free(cache.run("a", range(21)))
    evict_all(cache)
    other = cache.run("b", range(100, 108))
    assert not cache.manager.can_allocate(21)
    with pytest.raises(OutOfBlocksError):
        cache.manager.allocate("c", token_ids=range(21))
    assert cache.manager.stats().host_loaded_blocks == 0
    cache.free(other)
    assert cache.run("d", range(21)).num_cached_tokens == 20
    cache.check()


def test_memory_is_that_of_the_budget() -> None:
    """All of it is used, and copies need no memory beside it."""
    budget = 24 << 20
    sizes = {"num_layers": 8, "num_kv_heads": 4, "head_dim": 64, "num_blocks": 128, "block_size": 16}
    manager = PagedKvCacheManager(
        PagedKvCacheConfig(**sizes, device="cpu", dtype=torch.float32, host_cache_bytes=budget)
    )
    before = resident()
    handle = manager.allocate("a", 2000)
    manager.advance(handle, 2000)
    manager.commit(handle, [7] * 2000)
    manager.free(handle)
    while manager.evict(20):
        pass
    stats = manager.stats()
    assert stats.host_cached_blocks == stats.host_blocks == budget // stats.bytes_per_block
    assert resident() - before < 1.05 * budget + manager.config.num_blocks * stats.bytes_per_block


CALLS: dict[str, Callable[[PagedKvCacheManager], object]] = {
    "load": lambda manager: manager.allocate("new", token_ids=range(21)),
    "load more": lambda manager: manager.allocate("new", token_ids=range(40, 61)),
    "store": lambda manager: manager.evict(9),
    "swap": lambda manager: manager.swap_out(manager.handles()[0]),
    "extend": lambda manager: manager.extend(manager.handles()[0], 24),
}


@pytest.mark.parametrize(
    ("groups", "stride"),
    [(None, 11), pytest.param(WINDOWS, 3, marks=pytest.mark.thorough)],
    ids=["plain", "windows"],
)
@pytest.mark.parametrize("name", CALLS)
def test_failure_anywhere_leaves_no_wrong_data(
    name: str, groups: list[CacheGroup] | None, stride: int, device: torch.device
) -> None:
    """Sequences are as they were, and whatever is found afterwards, on the device or the host, is right."""
    if device.type != "cpu":
        pytest.skip("it is the bookkeeping that fails here")
    count, num_tables = 0, 1 if groups is None else len(groups)
    folders = OURS | {Path(paged.cache.tiers.host.__file__).parent}
    while True:
        budget = 11 * num_tables * BLOCK_BYTES
        cache = Cache(num_blocks=13 * num_tables, num_swap_blocks=8, host_cache_bytes=budget, groups=groups)
        manager = cache.manager
        for start in (0, 40, 80):
            cache.free(cache.run("gone", range(start, start + 21)))
        manager.evict(4)
        cache.run("live", range(200, 214))
        if not Failure(count, folders, MemoryError(), skip=CACHE_GUARD).hits(partial(CALLS[name], manager)):
            break
        assert len(manager.handles()) == 1
        cache.check()
        for start in (0, 40, 80):
            cache.free(cache.run("again", range(start, start + 21)))
        cache.check()
        count += stride
    assert count > 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("host_cache_bytes", [1, 3 * BLOCK_BYTES - 1, -1, 1.5, True])
def test_refuses_budgets(host_cache_bytes: Any) -> None:
    with pytest.raises(InvalidInputError, match="host_cache_bytes"):
        Cache(num_swap_blocks=3, host_cache_bytes=host_cache_bytes)
