"""Pooled keys beside a layer's own, and in memory of a kind that the cache does not know, in every call of a cache."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch

from paged import (
    CacheGroup,
    InvalidInputError,
    KvCacheHandle,
    KvSlotRequest,
    OutOfBlocksError,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    UnsupportedError,
)
from paged.cache.kinds.pools import PooledTable
from paged.cache.pooled_groups import PooledGroup
from tests.cache.kinds.own_pooled import POOL, OwnPooled, OwnPooledGroup
from tests.cache.stress.test_failed_calls import OURS
from tests.failure import CACHE_GUARD, Failure

BLOCK = 16
WIDTH = 8
# Layers with pooled keys beside their own, with the rows of open pools, and with both in memory of their own.
POOLED, OPEN, OWN = 2, 3, (4, 5)


def make(**changes: object) -> PagedKvCacheManager:
    """A cache of one layer that sees all tokens, one of latents with a window, and layers of pooled keys."""
    window = CacheGroup((1,), sliding_window=5, latent=True)
    pooled = PooledGroup((POOLED,), latent=True, pool_size=POOL, entry_size=WIDTH)
    rows = CacheGroup((OPEN,), sliding_window=1, latent=True)
    groups = [CacheGroup((0,)), window, pooled, rows, OwnPooledGroup(OWN)]
    sizes = {"num_layers": 6, "num_kv_heads": 1, "head_dim": WIDTH, "block_size": BLOCK, "num_blocks": 60}
    return PagedKvCacheManager(PagedKvCacheConfig(**{**sizes, "num_swap_blocks": 20, "groups": groups, **changes}))


def key_of(layer: int, tokens: list[int], position: int) -> torch.Tensor:
    """The raw key of a token depends on all tokens up to it."""
    return torch.full((WIDTH,), float(hash((layer, *tokens[: position + 1])) % 1024))


class PooledModel:
    """Writes pools as a model would, entry by entry from the raw rows, and knows what they must be."""

    def __init__(self, manager: PagedKvCacheManager, seed: int) -> None:
        self.manager = manager
        self.random = random.Random(seed)
        self.texts: dict[KvCacheHandle, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self.trunk = [self.random.randrange(3) for _ in range(100)]
        (self.own,) = [kind for kind in manager._kinds if isinstance(kind, OwnPooled)]
        self.num_tables = len(manager.config.tables)

    def block(self, handle: KvCacheHandle, layer: int, position: int) -> int:
        block = handle.blocks[position // BLOCK * self.num_tables + self.manager.table_of(layer)]
        assert block
        return block

    def raw(self, handle: KvCacheHandle, layer: int, position: int) -> torch.Tensor:
        """The row of a position in its pool."""
        if layer in OWN:
            return self.own.rows(handle._state, layer, position)[position % POOL - POOL]
        row: torch.Tensor = self.manager.k_cache(OPEN)[self.block(handle, OPEN, position), position % BLOCK, 0]
        return row

    def entry(self, handle: KvCacheHandle, layer: int, position: int) -> torch.Tensor:
        """The entry of the pool of a position."""
        if layer in OWN:
            return self.own.rows(handle._state, layer, position)[position % BLOCK // POOL]
        return self.manager.entries(POOLED)[self.block(handle, POOLED, position), position % BLOCK // POOL]

    def write(self, handle: KvCacheHandle, tokens: list[int], start: int) -> None:
        for layer in (POOLED, *OWN):
            for position in range(start, len(tokens)):
                self.raw(handle, layer, position)[:] = key_of(layer, tokens, position)
                if position % POOL == POOL - 1:
                    rows = [self.raw(handle, layer, position - before) for before in range(POOL)]
                    self.entry(handle, layer, position)[:] = torch.stack(rows).sum(0)

    def run(self, handle: KvCacheHandle, tokens: list[int], *, fails: bool = False) -> None:
        text = self.texts[handle] + tokens
        reservation = self.manager.reserve([KvSlotRequest(handle.cache_id, len(text))])
        self.manager.build_metadata([(handle, len(tokens))])
        self.write(handle, text, handle.num_tokens)
        if fails:
            if self.random.random() < 0.5:  # another call ends the step
                with suppress(OutOfBlocksError):
                    self.manager.swap_out(handle)
                    self.seen["swapped within a step"] += 1
            reservation.rollback()
            self.seen["failed"] += 1
        else:
            reservation.commit([tokens])
            self.texts[handle] = text

    def check(self) -> None:
        self.manager.check_integrity()
        for handle, text in self.texts.items():
            assert handle.num_tokens == len(text)
            if handle.is_swapped:
                continue
            for layer in (POOLED, *OWN):
                keys = [key_of(layer, text, position) for position in range(len(text))]
                for start in range(0, len(text) // POOL * POOL, POOL):
                    entry = self.entry(handle, layer, start)
                    assert torch.equal(entry, torch.stack(keys[start : start + POOL]).sum(0))
                for position in range(len(text) // POOL * POOL, len(text)):
                    assert torch.equal(self.raw(handle, layer, position), keys[position])

    def begin(self) -> None:
        if len(self.texts) < 4:
            prompt = self.trunk[: self.random.randint(1, 90)] + self.tokens(9)
            if self.random.random() < 0.4:
                prompt = self.trunk[: self.random.randint(1, 5) * BLOCK]  # a hit ends one token before its end
            handle = self.manager.allocate(self.seen["begun"], token_ids=prompt)
            self.seen["begun"] += 1
            self.texts[handle] = prompt[: handle.num_tokens]
            self.seen["hits"] += handle.num_tokens > 0
            self.seen["hits within a pool"] += handle.num_tokens % POOL > 0
            self.run(handle, prompt[handle.num_tokens :])

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(3) for _ in range(self.random.randint(1, most))]

    def handle(self, *, is_swapped: bool = False) -> KvCacheHandle:
        return self.random.choice([handle for handle in self.texts if handle.is_swapped == is_swapped])

    def step(self) -> None:
        self.run(self.handle(), self.tokens(11), fails=self.random.random() < 0.4)

    def truncate(self) -> None:
        handle = self.handle()
        length = self.random.randint(max(0, handle.num_tokens - 20), handle.num_tokens)
        try:
            self.manager.truncate(handle, length)
        except InvalidInputError as error:
            self.seen["gone"] += "within a pool" in str(error)
            self.seen["behind the window"] += "sliding window" in str(error)
        else:
            del self.texts[handle][length:]
            self.seen["truncated within a pool"] += length % POOL > 0

    def fork(self) -> None:
        if len(self.texts) < 4:
            source = self.handle()
            self.texts[self.manager.fork(source, f"fork {self.seen['forks']}")] = self.texts[source].copy()
            self.seen["forks"] += 1

    def share(self) -> None:
        source = self.handle()
        count = source.num_tokens // BLOCK
        seen = (count * BLOCK - 4) // BLOCK * self.num_tables + self.manager.table_of(1)
        if len(self.texts) < 4 and count and source.blocks[seen]:  # else it lies behind the window
            target = self.manager.allocate(f"share {self.seen['shared']}")
            self.manager.share_prefix_blocks(source, target, count)
            self.texts[target] = self.texts[source][: target.num_tokens]
            self.seen["shared"] += 1

    def swap_out(self) -> None:
        self.manager.swap_out(self.handle())

    def swap_in(self) -> None:
        self.manager.swap_in(self.handle(is_swapped=True))
        self.seen["swapped"] += 1

    def free(self) -> None:
        handle = self.random.choice(list(self.texts))
        self.manager.free(handle)
        del self.texts[handle]

    def evict(self) -> None:
        self.manager.evict(self.random.randint(1, 30))


@pytest.mark.parametrize(("seed", "tier_bytes"), [(0, 0), (1, 1 << 16)])
def test_pooled_keys_are_those_of_their_tokens(seed: int, tier_bytes: int) -> None:
    """Random hits, steps that fail, truncations, forks and swaps: every entry and every open pool is right."""
    manager = make(host_cache_bytes=tier_bytes)
    model = PooledModel(manager, seed)
    calls = {model.begin: 8, model.step: 10, model.truncate: 6, model.fork: 2, model.share: 3, model.swap_out: 2}
    calls |= {model.swap_in: 2, model.free: 6, model.evict: 1}
    for call in model.random.choices(list(calls), list(calls.values()), k=300):
        try:
            call()
        except (IndexError, OutOfBlocksError):
            model.seen["refused"] += 1
        model.check()
    events = (
        "hits within a pool",
        "failed",
        "gone",
        "truncated within a pool",
        "forks",
        "shared",
        "swapped",
        "swapped within a step",
    )
    assert min(model.seen[event] for event in events) > 3, model.seen
    assert (manager.stats().host_loaded_blocks > 0) == (tier_bytes > 0)
    assert (model.own.num_loaded > 0) == (tier_bytes > 0)
    for handle in manager.handles():
        manager.free(handle)
    assert model.own.slots.num_free == OwnPooledGroup.num_blocks
    assert model.own.shelf.num_free == OwnPooledGroup.num_swap_blocks


CALLS: dict[str, Callable[[PagedKvCacheManager, KvCacheHandle], object]] = {
    "reserve": lambda manager, _: manager.reserve([KvSlotRequest("a", 40), KvSlotRequest("b", 30)]),
    "truncate": lambda manager, handle: manager.truncate(handle, 4),
    "fork": lambda manager, handle: manager.fork(handle, "c"),
    "swap_out": lambda manager, handle: manager.swap_out(handle),
    "free": lambda manager, handle: manager.free(handle),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_failure_anywhere_keeps_records_and_rows(name: str) -> None:
    """Without a line of the kinds about it."""
    count, is_hit = 0, True
    while is_hit:
        manager = make()
        model = PooledModel(manager, 0)
        handle = manager.allocate("a")
        model.texts[handle] = []
        model.run(handle, [1] * 22)
        model.texts[manager.fork(handle, "b")] = model.texts[handle].copy()
        records = [model.own.get(each._state) for each in manager.handles()]
        is_hit = Failure(count, OURS, MemoryError(), skip=CACHE_GUARD).hits(partial(CALLS[name], manager, handle))
        if is_hit:
            model.check()
            assert [model.own.get(each._state) for each in manager.handles()] == records
        count += 7
    assert count > 30


def test_a_kind_answers_for_its_own_tables() -> None:
    manager = make()
    assert manager.k_cache(POOLED).shape[1:] == (BLOCK, 1, WIDTH)
    assert manager.entries(POOLED).shape[1:] == (BLOCK // POOL, WIDTH)
    assert manager.k_cache(POOLED).stride(0) == 16 * WIDTH + 4 * WIDTH
    with pytest.raises(InvalidInputError, match="layer: 3 has no pooled keys"):
        manager.entries(OPEN)
    with pytest.raises(InvalidInputError, match="block_size: 6, expected a multiple of pool_size 4"):
        make(block_size=6)
    with pytest.raises(InvalidInputError, match="sliding_window: 8, expected None beside pooled keys"):
        PooledGroup((0,), sliding_window=8)
    with pytest.raises(InvalidInputError, match="layer: 4 has no K/V of its own"):
        manager.k_cache(4)
    handle = manager.allocate("a")
    before = manager.stats()
    for call in (manager.extend, manager.advance):
        with pytest.raises(UnsupportedError, match="pooled keys are written by a forward"):
            call(handle, 0)
    assert manager.stats() == before


def test_a_kind_may_cut_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked because it has the method, without a further word about it."""
    plain = make()
    monkeypatch.setattr(PooledTable, "chunk_end", lambda self, state, limit, total, **_: limit // POOL * POOL)
    cutting = make()
    assert plain.chunk_end(plain.allocate("a"), 10, 20) == 10
    assert cutting.chunk_end(cutting.allocate("a"), 10, 20) == 8
