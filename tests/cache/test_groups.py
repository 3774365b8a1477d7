"""Layers of several shapes and windows over one pool: who holds what, and what a prompt may begin with."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from paged import CacheGroup, InvalidInputError, KvSlotRequest, OutOfBlocksError, PagedKvCacheConfig
from paged.cache.groups import ROLLBACK_SLACK, split_evenly
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from tests.cache.prefix_cache import BLOCK, Cache

WINDOW = 6
# Layers 0 and 2 see everything, 1 and 3 do not, 4 reads another's K/V.
GROUPS = [CacheGroup((0, 2)), CacheGroup((1, 3), sliding_window=WINDOW)]
NUM_LAYERS = 5
KIB = 1024

pytestmark = pytest.mark.usefixtures("torch_backend")


class GroupedCache(Cache):
    def __init__(self, device: torch.device, **changes: object) -> None:
        given = {"num_layers": NUM_LAYERS, "groups": GROUPS, "num_blocks": 200, "num_swap_blocks": 100}
        super().__init__(device=device, **given | changes)


@pytest.fixture
def cache(device: torch.device) -> GroupedCache:
    return GroupedCache(device)


def of_table(handle: KvCacheHandle, table: int) -> tuple[int, ...]:
    return handle.blocks[table::2]


def every_sixth(num_layers: int, window: int) -> list[CacheGroup]:
    """Gemma 3's layers."""
    local = tuple(layer for layer in range(num_layers) if layer % 6 != 5)
    return [CacheGroup(tuple(range(5, num_layers, 6))), CacheGroup(local, sliding_window=window)]


def gpt_oss_20b(**sizes: object) -> PagedKvCacheConfig:
    local = CacheGroup(tuple(range(0, 24, 2)), sliding_window=128)
    return PagedKvCacheConfig(24, 8, 64, groups=[CacheGroup(tuple(range(1, 24, 2))), local], **sizes)


def blocks_kept(config: PagedKvCacheConfig, num_tokens: int) -> int:
    return sum(table.blocks_kept(num_tokens, config.block_size) for table in config.tables)


def fill(manager: PagedKvCacheManager, length: int, chunk: int) -> None:
    """Run sequences of this length, until there is no room."""
    for name in itertools.count():
        manager.allocate(name)
        for end in range(chunk, length + 1, chunk):
            manager.reserve([KvSlotRequest(name, end)]).commit()


@pytest.mark.parametrize(
    ("num_layers", "window", "sizes"),
    [(26, 512, (4, 6)), (34, 1024, (5, 6)), (48, 1024, (8, 5)), (62, 1024, (10, 6))],
)
def test_gemma_3_in_tables_of_one_size(num_layers: int, window: int, sizes: tuple[int, int]) -> None:
    config = PagedKvCacheConfig(num_layers, 8, 64, groups=every_sixth(num_layers, window))
    most, num_local = sizes
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
    num_slots, width = config.slots
    assert sorted(layer for table in config.tables for layer in table.layers) == list(range(bounds[-1]))
    for group in groups:
        tables = [table for table in config.tables if set(table.layers) <= set(group.layers)]
        assert all(table.num_slots(width, len(table.layers)) <= num_slots for table in tables)
        if fewer := len(tables) - 1:
            assert tables[0].num_slots(width, -(-len(group.layers) // fewer)) > num_slots


def test_one_kind_of_layers_is_one_table() -> None:
    plain = PagedKvCacheConfig(4, 2, 8)
    for groups in ([CacheGroup((0, 1, 2, 3))], [CacheGroup((layer,)) for layer in range(4)]):
        assert PagedKvCacheConfig(4, 2, 8, groups=groups).tables == plain.tables
    assert len(plain.tables) == 1


def test_long_sequences_of_gpt_oss_take_half_the_bytes() -> None:
    plain, grouped = PagedKvCacheConfig(24, 8, 64), gpt_oss_20b()
    length = 128 * KIB
    plain_bytes = blocks_kept(plain, length) * plain.block_bytes(torch.float8_e4m3fn)
    grouped_bytes = blocks_kept(grouped, length) * grouped.block_bytes(torch.float8_e4m3fn)
    assert grouped_bytes <= 0.55 * plain_bytes
    num_blocks = 4 * blocks_kept(plain, length)
    assert PagedKvCacheConfig(24, 8, 64, num_blocks=num_blocks).capacity_tokens == 4 * length
    assert gpt_oss_20b(num_blocks=2 * num_blocks).capacity_tokens > 7.9 * length  # of half the bytes each


def test_as_many_more_sequences_fit() -> None:
    """Run in chunks until the pool is full, with the layers of gpt-oss-20b and one element a head."""
    length, chunk, num_blocks = 8 * KIB, 512, 2 * 4 * 8 * KIB // 16
    windows = [CacheGroup((1,)), CacheGroup((0,), sliding_window=128)]
    fitting = []
    for groups, count in ((None, num_blocks // 2), (windows, num_blocks)):  # of equal bytes
        manager = PagedKvCacheManager(PagedKvCacheConfig(2, 1, 1, num_blocks=count, device="cpu", groups=groups))
        with pytest.raises(OutOfBlocksError):
            fill(manager, length, chunk)
        manager.check_integrity()
        fitting.append(sum(handle.num_tokens == length for handle in manager.handles()))
    assert fitting == [4, 7]


@pytest.mark.parametrize("window", [1, 6, 16])
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_each_table_holds_exactly_what_later_tokens_see(window: int, chunk: int, device: torch.device) -> None:
    cache = GroupedCache(device, groups=[GROUPS[0], CacheGroup((1, 3), sliding_window=window)])
    handle = cache.begin("a", range(150))
    assert not any(of_table(handle, 1))  # a long prompt's blocks come with its chunks
    for start in range(0, 150, chunk):
        cache.feed(handle, range(start, min(start + chunk, 150)))
        length = handle.num_tokens
        gone = max(0, length - ROLLBACK_SLACK - window + 1) // BLOCK
        held = -(-length // BLOCK)
        assert [bool(block) for block in of_table(handle, 1)[:held]] == [index >= gone for index in range(held)]
        assert 0 not in of_table(handle, 0)
        cache.check(handle)
    assert cache.manager.stats().used_blocks == blocks_kept(cache.manager.config, 150)
    with pytest.raises(InvalidInputError, match="behind its sliding window"):
        cache.manager.read_kv(handle, 1, gone * BLOCK - 1, 2)
    assert cache.manager.read_kv(handle, 0, 0, 150)[0].shape == (150, 1, 8)


def test_rollback_as_far_as_windows_go(cache: GroupedCache) -> None:
    handle = cache.run("a", range(150))
    before = cache.manager.stats()
    with pytest.raises(InvalidInputError, match="given back in part"):
        cache.manager.truncate(handle, 50)
    assert cache.manager.stats() == before
    cache.truncate(handle, 150 - ROLLBACK_SLACK)
    cache.feed(handle, range(500, 540))
    cache.check(handle)
    cache.truncate(handle, 0)
    assert cache.manager.stats().used_blocks == 0


def test_a_hit_takes_only_what_windows_see(cache: GroupedCache) -> None:
    first = cache.run("a", range(100))
    cache.free(first)
    second = cache.begin("b", [*range(100), 7])
    assert second.num_cached_tokens == 100
    assert 0 not in of_table(second, 0)
    seen = (100 - WINDOW + 1) // BLOCK
    assert [bool(block) for block in of_table(second, 1)] == [index in range(seen, 25) for index in range(26)]
    cache.feed(second, [7])
    whole = cache.run("c", range(100))
    assert whole.num_cached_tokens == 99
    cache.check()


def test_a_prefix_takes_no_more_room_than_was_promised(device: torch.device) -> None:
    """Windows' blocks come with a hit, and with a new sequence only once they are written."""
    cache, hits = GroupedCache(device, num_blocks=30), []
    for num_free in range(31):
        cache.free(cache.run("first", range(40)))
        filler = cache.manager.allocate("filler", (30 - num_free) * BLOCK)
        is_promised = cache.manager.can_allocate(41)
        try:
            handle = cache.begin("second", [*range(40), 7])
        except OutOfBlocksError:
            assert not is_promised
        else:
            hits.append(handle.num_cached_tokens)
            cache.free(handle)
        cache.manager.free(filler)
        cache.manager.check_integrity()
        cache.manager.clear_prefix_cache()
    assert min(hits) == 0
    assert max(hits) == 40


def test_an_evicted_block_never_leaves_half_a_prefix(cache: GroupedCache) -> None:
    """Of every single block: a hit then ends where each window is whole, and what is computed again mends it."""
    prompt = list(range(40))
    for table in (0, 1):
        for index in range(10):
            cache.manager.clear_prefix_cache()
            first = cache.run(f"{table} {index}", prompt)
            block = of_table(first, table)[index]
            cache.free(first)
            cache.manager._prefixes._forget_evicted([block])
            cache.manager._pool.unpublished(block)
            cache.manager.check_integrity()
            second = cache.run("again", [*prompt, 7])
            # A hit of n blocks needs those of the window that holds its last WINDOW - 1 tokens.
            usable = [n for n in range(11) if index not in range(max(0, 4 * n - WINDOW + 1) // BLOCK, n)]
            assert second.num_cached_tokens == BLOCK * (index if table == 0 else usable[-1])
            cache.free(second)
            third = cache.run("mended", [*prompt, 8])
            assert third.num_cached_tokens == 40
            cache.free(third)


def test_fork_swap_and_share(cache: GroupedCache) -> None:
    handle = cache.run("a", range(150))
    copy = cache.manager.fork(handle, "b")
    cache.tokens[copy] = list(range(150))
    cache.feed(copy, [7, 8, 9])
    assert cache.manager.stats().cow_copies == 2  # the tail of each table
    target = cache.manager.allocate("c", 200)
    with pytest.raises(InvalidInputError, match="behind its sliding window"):
        cache.manager.share_prefix_blocks(handle, target, 10)
    cache.manager.share_prefix_blocks(handle, target, 37)
    cache.tokens[target] = list(range(148))
    cache.feed(target, range(300, 330))
    cache.check()
    used = cache.manager.stats().used_blocks
    cache.manager.swap_out(handle)
    cache.manager.swap_out(copy)
    other = cache.run("d", range(600, 700))
    cache.manager.swap_in(copy)
    cache.manager.swap_in(handle)
    cache.check()
    cache.free(other)
    assert cache.manager.stats().used_blocks == used
    for each in (handle, copy, target):
        cache.free(each)
    assert cache.manager.stats().used_blocks == 0
    cache.manager.check_integrity()


def test_blocks_of_different_tables_have_no_byte_in_common(device: torch.device) -> None:
    """Every cache is filled in one block, and reads back though all others were filled after it."""
    groups = [CacheGroup((0, 1, 2), 2, 4, 12), CacheGroup((3, 4), 1, 8, sliding_window=6), CacheGroup((5,), 4, 8)]
    manager = PagedKvCacheManager(PagedKvCacheConfig(7, 1, 8, block_size=4, num_blocks=9, device=device, groups=groups))
    blocks = {}
    for layer in range(6):
        block = 1 + manager.table_of(layer)
        for number, cache in enumerate((manager.k_cache(layer), manager.v_cache(layer))):
            cache[block] = 2 * layer + number
            blocks[layer, number] = cache[block]
    for (layer, number), rows in blocks.items():
        assert rows.shape == (4, *([2, 4 + 8 * number] if layer < 3 else [1, 8] if layer < 5 else [4, 8]))
        assert (rows == 2 * layer + number).all()
    assert manager.stats().bytes_per_block == manager.config.block_bytes(torch.float32)
    with pytest.raises(InvalidInputError, match="layer: 6 has no K/V of its own"):
        manager.k_cache(6)


def test_metadata_of_every_table(cache: GroupedCache) -> None:
    handles = [cache.run(seq_id, range(100 * seq_id, 100 * seq_id + 90 + seq_id)) for seq_id in range(3)]
    counts = [1, 6, 1]
    cache.manager.reserve([KvSlotRequest(h.cache_id, h.num_tokens + n) for h, n in zip(handles, counts, strict=True)])
    metadata = cache.manager.build_metadata(zip(handles, counts, strict=True))
    assert len(metadata.others) == 1
    for table in (0, 1):
        block_table, slot_mapping = metadata.table(table)
        slots = []
        for handle, count, row in zip(handles, counts, block_table.tolist(), strict=True):
            blocks = of_table(handle, table)
            assert row[: len(blocks)] == list(blocks)
            positions = range(handle.num_tokens, handle.num_tokens + count)
            slots += [blocks[position // BLOCK] * BLOCK + position % BLOCK for position in positions]
        assert slot_mapping.tolist() == slots


def test_room_is_not_there_before_it_is_asked_for(cache: GroupedCache) -> None:
    handle = cache.manager.allocate("a", 20)
    with pytest.raises(InvalidInputError, match="not all blocks before it were written to"):
        cache.manager.advance(handle, 20)
    cache.manager.build_metadata([(handle, 20)])
    cache.manager.advance(handle, 20)
    assert handle.num_tokens == 20


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "expected some of 5"),
        ([CacheGroup((0, 5))], "expected some of 5"),
        ([CacheGroup((0, 1)), CacheGroup((1,), sliding_window=4)], "each of them once"),
        ([(0, 1)], "expected CacheGroups"),
        (7, "expected CacheGroups"),
    ],
)
def test_groups_that_are_none(groups: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        PagedKvCacheConfig(5, 1, 8, groups=groups)


def test_a_group_that_is_none() -> None:
    for layers in ((), (0, 0), (-1,), 3, (0.5,)):
        with pytest.raises(InvalidInputError, match="layers: "):
            CacheGroup(layers)
    for name in ("num_kv_heads", "head_dim", "v_head_dim", "sliding_window"):
        with pytest.raises(InvalidInputError, match=f"{name}: 0"):
            CacheGroup((0,), **{name: 0})
    with pytest.raises(InvalidInputError, match="where groups have their own"):
        PagedKvCacheConfig(5, 1, 8, groups=GROUPS, sliding_window=4)


def test_an_open_reservation_has_not_seen_to_what_lies_behind_it(cache: GroupedCache) -> None:
    handle = cache.manager.allocate("a", 8)
    cache.manager.reserve([KvSlotRequest("a", 2)])
    cache.manager.extend(handle, 7)
    assert 0 not in handle.blocks
