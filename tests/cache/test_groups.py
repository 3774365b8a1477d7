"""Layers of several shapes and windows over one pool: who holds what, and what a prompt may begin with."""

import contextlib
import itertools
import random
from collections.abc import Mapping

import pytest
import torch

from paged import (
    CacheGroup,
    InvalidInputError,
    KvSlotRequest,
    OutOfBlocksError,
    PagedKvCacheConfig,
    PagedKvCacheManager,
)
from paged.cache.groups import split_evenly
from tests.cache.prefix_cache import BLOCK, Cache

WINDOW = 6
# Layers 0 and 2 see everything, 1 and 3 do not, 4 reads another's K/V.
GROUPS = [CacheGroup((0, 2)), CacheGroup((1, 3), sliding_window=WINDOW)]
NUM_LAYERS = 5


@pytest.fixture
def cache(device: torch.device) -> Cache:
    return Cache(device=device, num_layers=NUM_LAYERS, groups=GROUPS, num_blocks=200)


@pytest.mark.parametrize(
    ("num_layers", "window", "most", "num_local"),
    [(26, 512, 4, 6), (34, 1024, 5, 6), (48, 1024, 8, 5), (62, 1024, 10, 6)],
)
def test_gemma_3_in_tables_of_one_size(num_layers: int, window: int, most: int, num_local: int) -> None:
    local = tuple(layer for layer in range(num_layers) if layer % 6 != 5)
    groups = [CacheGroup(tuple(range(5, num_layers, 6))), CacheGroup(local, sliding_window=window)]
    config = PagedKvCacheConfig(num_layers, 8, 64, groups=groups)
    assert [table.sliding_window for table in config.tables] == [None] + [window] * num_local
    assert max(len(table.layers) for table in config.tables) == most
    assert sorted(layer for table in config.tables for layer in table.layers) == list(range(num_layers))
    assert config.block_bytes(torch.float8_e4m3fn) == 2 * most * 16 * 8 * 64


def test_larger_heads_make_tables_of_fewer_layers() -> None:
    groups = [CacheGroup(tuple(range(12)), 1, 256, sliding_window=512), CacheGroup((12, 13, 14), 1, 512)]
    config = PagedKvCacheConfig(15, 1, 256, groups=groups)
    assert [(len(table.layers), table.head_dim) for table in config.tables] == [(3, 512), (6, 256), (6, 256)]
    assert config.block_bytes(torch.float8_e4m3fn) == 16 * 2 * 3 * 512  # nothing is lost
    assert split_evenly(config.tables) == config.tables


@pytest.mark.parametrize("seed", range(20))
def test_no_kind_has_more_tables_than_its_layers_need(seed: int) -> None:
    """Heads of several sizes leave gaps in slots, so that more layers may fit than there are bytes for."""
    draw = random.Random(seed)
    bounds = sorted(draw.sample(range(1, 40), draw.randint(1, 3)))
    groups = [
        CacheGroup(tuple(range(start, end)), draw.choice((1, 2, 8)), draw.choice((64, 128, 256)), sliding_window=window)
        for window, (start, end) in enumerate(itertools.pairwise((0, *bounds)), 1)
    ]
    config = PagedKvCacheConfig(40, 1, 64, groups=groups)
    _, num_slots, width, *_ = config.storage_shapes(torch.float32)[0]
    assert sorted(layer for table in config.tables for layer in table.layers) == list(range(bounds[-1]))
    for group in groups:
        tables = [table for table in config.tables if set(table.layers) <= set(group.layers)]
        assert all(table.num_slots(width, len(table.layers)) <= num_slots for table in tables)
        if fewer := len(tables) - 1:
            assert tables[0].num_slots(width, -(-len(group.layers) // fewer)) > num_slots


def test_an_evicted_block_never_leaves_half_a_prefix(cache: Cache) -> None:
    """Of every single block: a hit then ends where each window is whole, and what is computed again mends it."""
    prompt = list(range(40))
    for table in (0, 1):
        for index in range(10):
            cache.manager.clear_prefix_cache()
            first = cache.run(f"{table} {index}", prompt)
            block = first.blocks[table::2][index]
            cache.free(first)
            cache.manager._prefixes._forget_evicted([block])
            cache.manager.check_integrity()
            second = cache.run("again", [*prompt, 7])
            # A hit of n blocks needs those of the window that holds its last WINDOW - 1 tokens.
            usable = [n for n in range(11) if index not in range(max(0, 4 * n - WINDOW + 1) // BLOCK, n)]
            assert second.num_cached_tokens == BLOCK * (index if table == 0 else usable[-1])
            cache.free(second)
            third = cache.run("mended", [*prompt, 8])
            assert third.num_cached_tokens == 40
            cache.free(third)


def test_room_is_not_there_before_it_is_asked_for(cache: Cache) -> None:
    handle = cache.manager.allocate("a", 20)
    with pytest.raises(InvalidInputError, match="not all blocks before it are allocated"):
        cache.manager.advance(handle, 20)
    cache.manager.build_metadata([(handle, 20)])
    cache.manager.advance(handle, 20)
    assert handle.num_tokens == 20


def random_groups(draw: random.Random, num_layers: int) -> list[CacheGroup]:
    """All layers, in groups with and without windows."""
    layers, groups = draw.sample(range(num_layers), num_layers), []
    while layers:
        count = draw.randint(1, len(layers))
        groups.append(CacheGroup(tuple(layers[:count]), sliding_window=draw.choice((None, 1, 2, 5, 16, 17, 40, 100))))
        layers = layers[count:]
    return groups


def write_alone(config: PagedKvCacheConfig, num_tokens: int, chunks: Mapping[int, int] | None = None) -> bool:
    """Whether a sequence with capacity for so many tokens from the start writes them all, one by one; or with them the
    chunks that begin and end at these positions."""
    manager, start = PagedKvCacheManager(config), 0
    try:
        handle = manager.allocate("a", num_tokens)
        while start < num_tokens:
            end = (chunks or {}).get(start, start + 1)
            reservation, _ = manager.reserve_step([handle], [end - start])
            reservation.commit()
            start = end
    except OutOfBlocksError:
        return False
    manager.check_integrity()
    return True


@pytest.mark.parametrize("seed", range(30))
def test_capacity_is_what_a_sequence_can_have_alone(seed: int, device: torch.device) -> None:
    """And not a block less; also if parts of it have to be written in one step."""
    draw = random.Random(seed)
    size, num_layers = draw.choice((1, 2, 4, 8, 16)), draw.randint(1, 6)
    groups, num_blocks = random_groups(draw, num_layers), draw.randint(1, 60)
    options = {"block_size": size, "num_blocks": num_blocks, "groups": groups, "device": device}
    config = PagedKvCacheConfig(num_layers, 1, 8, **options)
    capacity = config.capacity_tokens
    assert write_alone(config, capacity)
    assert not write_alone(config, capacity + 1)
    bounds = sorted(draw.sample(range(capacity + 1), min(capacity + 1, 6)))
    chunks = dict(zip(bounds[::2], bounds[1::2], strict=False))
    # Only where the first part is written in the longest sequence that is said to fit.
    longest = config.longest_with(chunks.items())
    if longest >= max(chunks.values(), default=0):
        assert write_alone(config, longest, chunks)
        assert not write_alone(config, longest + 1, chunks)


@pytest.mark.parametrize("seed", range(20))
def test_no_sequence_is_longer_than_the_longest(seed: int, device: torch.device) -> None:
    """Not even one that begins with a cached prefix, which holds less of every window."""
    draw = random.Random(seed)
    size, num_layers, num_blocks = draw.choice((1, 2, 4, 8)), draw.randint(2, 6), draw.randint(10, 60)
    groups = [CacheGroup((0,)), *(CacheGroup((layer,), sliding_window=5) for layer in range(1, num_layers))]
    options = {"block_size": size, "num_blocks": num_blocks, "groups": groups, "device": device}
    manager = PagedKvCacheManager(PagedKvCacheConfig(num_layers, 1, 8, **options))
    longest = manager.config.longest_sequence
    assert longest >= manager.config.capacity_tokens
    reached = 0
    with contextlib.suppress(OutOfBlocksError):
        for length in range(size, longest + 2 * size, size):
            handle = manager.allocate("a", token_ids=[1] * length)
            while (start := handle.num_tokens) < length:
                reservation, _ = manager.reserve_step([handle], [1])
                reservation.commit([[1]])
                reached = max(reached, start + 1)
            manager.free(handle)
    assert manager.config.capacity_tokens <= reached <= longest


def test_groups_that_are_none() -> None:
    for groups, message in (
        ([], "distinct layers below 5"),
        ([CacheGroup((0, 5))], "distinct layers below 5"),
        ([CacheGroup((0, 1)), CacheGroup((1,), sliding_window=4)], "distinct layers"),
        ([(0, 1)], "expected CacheGroups"),
        (7, "expected CacheGroups"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            PagedKvCacheConfig(5, 1, 8, groups=groups)
    with pytest.raises(InvalidInputError, match="expected None beside groups"):
        PagedKvCacheConfig(5, 1, 8, groups=GROUPS, sliding_window=4)
    for layers in ((), (0, 0), (-1,), 3, (0.5,)):
        with pytest.raises(InvalidInputError, match="layers: "):
            CacheGroup(layers)
    for name in ("num_kv_heads", "head_dim", "v_head_dim", "sliding_window"):
        with pytest.raises(InvalidInputError, match=f"{name}: 0"):
            CacheGroup((0,), **{name: 0})


def test_an_open_reservation_has_not_seen_to_what_lies_behind_it(cache: Cache) -> None:
    handle = cache.manager.allocate("a", 8)
    cache.manager.reserve([KvSlotRequest("a", 2)])
    cache.manager.extend(handle, 7)
    assert 0 not in handle.blocks
