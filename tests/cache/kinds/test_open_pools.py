"""A cache with entries alone, windows of latents and slots of open pools, in every call of a cache."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from paged import (
    BorderGroup,
    CacheGroup,
    Entries,
    EntriesGroup,
    InvalidInputError,
    KvCacheHandle,
    KvSlotRequest,
    OpenPart,
    OpenPoolGroup,
    OutOfBlocksError,
    OutOfStateSlotsError,
    PagedError,
    PagedKvCacheConfig,
    PagedKvCacheManager,
    UnsupportedError,
)
from paged.cache.kinds.open_pools import OpenPools, OpenSlot

BLOCK = 16
# Pools that overlap the pool before, and large ones. Layers: all entries, windows with borders and without, open rows.
OVERLAPPING, LARGE = 4, 16
ENTRIES, BORDER, WINDOW, FEW_ROWS, MANY_ROWS = range(5)
ROLLBACK = 6


def make(**changes: object) -> PagedKvCacheManager:
    """A cache as DeepSeek-V4 has it: pools of 4 that overlap, and pools as large as a block."""
    parts = (OpenPart((FEW_ROWS,), 2, 2 * OVERLAPPING - 1), OpenPart((MANY_ROWS,), 3, LARGE - 1))
    groups = [
        EntriesGroup((ENTRIES,), entries=[(OVERLAPPING, 2), (LARGE, 3)]),
        BorderGroup((BORDER,), latent=True, sliding_window=5, pool_size=BLOCK, entry_size=2 * OVERLAPPING),
        CacheGroup((WINDOW,), latent=True, sliding_window=5),
        OpenPoolGroup((), parts=parts, num_row_slots=6, num_swap_slots=2, rollback=ROLLBACK),
    ]
    sizes = {"num_layers": 5, "num_kv_heads": 1, "head_dim": 2, "block_size": BLOCK, "num_blocks": 60}
    return PagedKvCacheManager(PagedKvCacheConfig(**{**sizes, "num_swap_blocks": 30, "groups": groups, **changes}))


def row_of(layer: int, tokens: list[int], position: int, size: int) -> torch.Tensor:
    """The row of a token depends on all tokens up to it."""
    return torch.full((size,), float(hash((layer, *tokens[: position + 1])) % 1024))


class Model:
    """Writes entries from rows as a forward would, and knows from the tokens what they must be."""

    def __init__(self, manager: PagedKvCacheManager, seed: int) -> None:
        self.manager = manager
        self.random = random.Random(seed)
        self.texts: dict[KvCacheHandle, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self.trunk = [self.random.randrange(3) for _ in range(100)]

    def block(self, handle: KvCacheHandle, layer: int, position: int) -> int:
        num_tables = len(self.manager.config.tables)
        block = handle.blocks[position // BLOCK * num_tables + self.manager.table_of(layer)]
        assert block
        return block

    def run(self, handle: KvCacheHandle, tokens: list[int], *, fails: bool = False) -> None:
        """Run a step: rows of the step come from the tokens, earlier ones from the slot or the border of a block."""
        start, text = handle.num_tokens, self.texts[handle] + tokens
        reservation = self.manager.reserve([KvSlotRequest(handle.cache_id, len(text))])
        batch = self.manager.build_metadata([(handle, len(tokens))]).recurrent
        assert batch is not None
        assert batch.starts.tolist() == [start]
        (read,), (write,) = batch.read_slots.tolist(), batch.write_slots.tolist()
        for layer, size, pool in ((FEW_ROWS, 2, OVERLAPPING), (MANY_ROWS, 3, LARGE)):
            slots = self.manager.open_rows(layer)
            num_rows = slots.shape[1]
            before = slots[read].clone()  # with read < 0, nothing reads it
            borders = self.manager.entries(BORDER)
            for position in range(pool - 1 + start // pool * pool, len(text), pool):
                rows = []
                first = position - (2 if layer == FEW_ROWS else 1) * pool + 1
                for place in range(max(first, 0), position + 1):
                    if place >= start:
                        rows.append(row_of(layer, text, place, size))
                    elif place // BLOCK < (position - pool + 1) // BLOCK:
                        offset = place % OVERLAPPING
                        border = borders[self.block(handle, BORDER, place), 0]
                        rows.append(border[2 * offset : 2 * offset + 2])
                    else:
                        assert read > 0
                        rows.append(before[place % num_rows])
                index = (ENTRIES, int(layer == MANY_ROWS))
                entry = self.manager.entries(*index)[self.block(handle, ENTRIES, position), position % BLOCK // pool]
                entry[:] = torch.stack(rows).sum(0)
            if read != write and read > 0:
                slots[write] = before
            for position in range(max(start, len(text) - num_rows), len(text)):
                slots[write, position % num_rows] = row_of(layer, text, position, size)
        for position in range(start, len(text)):
            for layer in (BORDER, WINDOW):
                key = row_of(layer, text, position, 2)
                self.manager.k_cache(layer)[self.block(handle, layer, position), position % BLOCK, 0] = key
            if position % BLOCK >= BLOCK - OVERLAPPING:
                border = self.manager.entries(BORDER)[self.block(handle, BORDER, position), 0]
                offset = position % OVERLAPPING
                border[2 * offset : 2 * offset + 2] = row_of(FEW_ROWS, text, position, 2)
        if fails:
            if self.random.random() < 0.3:  # another call ends the step
                with suppress(OutOfBlocksError, OutOfStateSlotsError):
                    self.manager.swap_out(handle)
                    self.seen["swapped within a step"] += 1
            reservation.rollback()
            self.seen["failed in place"] += read == write
        else:
            reservation.commit([tokens])
            self.texts[handle] = text

    def check(self) -> None:
        self.manager.check_integrity()
        for handle, text in self.texts.items():
            assert handle.num_tokens == len(text)
            if handle.is_swapped:
                continue
            for index, (layer, pool, size) in enumerate(((FEW_ROWS, OVERLAPPING, 2), (MANY_ROWS, LARGE, 3))):
                for start in range(0, len(text) // pool * pool, pool):
                    first = max(0, start - pool * (layer == FEW_ROWS))
                    rows = [row_of(layer, text, position, size) for position in range(first, start + pool)]
                    entries = self.manager.entries(ENTRIES, index)
                    entry = entries[self.block(handle, ENTRIES, start), start % BLOCK // pool]
                    assert torch.equal(entry, torch.stack(rows).sum(0)), (layer, start, len(text))
            for position in range(max(0, len(text) - 5), len(text)):
                key = self.manager.k_cache(WINDOW)[self.block(handle, WINDOW, position), position % BLOCK, 0]
                assert torch.equal(key, row_of(WINDOW, text, position, 2))

    def begin(self) -> None:
        if len(self.texts) < 4:
            prompt = self.trunk[: self.random.randint(1, 90)] + self.tokens(9)
            if self.random.random() < 0.4:
                prompt = self.trunk[: self.random.randint(1, 5) * BLOCK]
            handle = self.manager.allocate(self.seen["begun"], token_ids=prompt)
            self.seen["begun"] += 1
            self.texts[handle] = prompt[: handle.num_tokens]
            self.seen["hits"] += handle.num_tokens > 0
            assert handle.num_tokens % BLOCK == 0
            rest = prompt[handle.num_tokens :]
            cut = self.random.randint(0, len(rest))
            for chunk in (rest[:cut], rest[cut:]):
                self.run(handle, chunk)

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(3) for _ in range(self.random.randint(1, most))]

    def handle(self, *, is_swapped: bool = False) -> KvCacheHandle:
        return self.random.choice([handle for handle in self.texts if handle.is_swapped == is_swapped])

    def step(self) -> None:
        self.run(self.handle(), self.tokens(9), fails=self.random.random() < 0.3)

    def truncate(self) -> None:
        handle = self.handle()
        length = self.random.randint(max(0, handle.num_tokens - 20), handle.num_tokens)
        if self.random.random() < 0.3:
            length = length // BLOCK * BLOCK
        try:
            self.manager.truncate(handle, length)
        except InvalidInputError as error:
            is_gone = "whose rows are gone" in str(error)
            self.seen["gone"] += is_gone
            self.seen["gone at a block"] += is_gone and length % BLOCK == 0
        else:
            del self.texts[handle][length:]
            self.seen["truncated to a block"] += length % BLOCK == 0
            self.seen["truncated within a pool"] += length % OVERLAPPING > 0

    def fork(self) -> None:
        if len(self.texts) < 4:
            source = self.handle()
            self.texts[self.manager.fork(source, f"fork {self.seen['forks']}")] = self.texts[source].copy()
            self.seen["forks"] += 1

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


def run_schedule(manager: PagedKvCacheManager, seed: int) -> Counter[str]:
    """Make 300 random calls and check everything after each; return what happened."""
    model = Model(manager, seed)
    calls = {model.begin: 8, model.step: 12, model.truncate: 6, model.fork: 2, model.swap_out: 2, model.swap_in: 2}
    calls |= {model.free: 5, model.evict: 1}
    for call in model.random.choices(list(calls), list(calls.values()), k=300):
        try:
            call()
        except (IndexError, OutOfBlocksError, OutOfStateSlotsError):
            model.seen["refused"] += 1
        model.check()
    return model.seen


@pytest.mark.parametrize(("seed", "tier_bytes"), [(0, 0), (1, 1 << 16)])
def test_entries_are_those_of_their_tokens(seed: int, tier_bytes: int) -> None:
    """Random hits, chunks, steps that fail, truncations, forks and swaps: no entry is stale."""
    manager = make(host_cache_bytes=tier_bytes)
    seen = run_schedule(manager, seed)
    events = ("hits", "failed in place", "gone", "truncated to a block", "truncated within a pool", "forks", "swapped")
    assert min(seen[event] for event in events) > 3, seen
    assert seen["gone at a block"] == 0
    assert (manager.stats().host_loaded_blocks > 0) == (tier_bytes > 0)
    for handle in manager.handles():
        manager.free(handle)
    (kind,) = [kind for kind in manager._kinds if hasattr(kind, "slots")]
    assert (kind.slots.num_free, kind.shelf.pool.num_free) == (6, 2)


def _keeps_first(cancel: Callable[..., None]) -> Callable[..., None]:
    def cancelled(self: OpenPools, states: list[Any]) -> None:
        firsts = [self.get(state).first for state in states]
        cancel(self, states)
        for state, first in zip(states, firsts, strict=True):
            self.put(state, self.get(state)._replace(first=first))

    return cancelled


def run_schedules() -> None:
    """Truncate behind a failed step, which has replaced the row of position 20; then run random schedules."""
    manager = make()
    model = Model(manager, 0)
    handle = manager.allocate("a")
    model.texts[handle] = []
    model.run(handle, model.trunk[:28])
    model.run(handle, [3] * ROLLBACK, fails=True)
    with suppress(InvalidInputError):
        manager.truncate(handle, 27)
        del model.texts[handle][27:]
    model.run(handle, [4])
    model.check()
    for seed in range(6):
        run_schedule(make(), seed)


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "rows of a wrong pool after a truncation": (
        OpenSlot,
        "reaches",
        lambda record, _: record.slot + record.host_slot > 0,
    ),
    "rows of a wrong pool after a failed step": (OpenPools, "cancel", _keeps_first(OpenPools.cancel)),
    "a shared slot is written": (OpenPools, "is_fixed", lambda *_: False),
    "a hit within a pool": (OpenPools, "usable", lambda *_: None),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_schedules_see_the_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, PagedError)):
        run_schedules()


def test_bytes_are_those_of_deepseek_v4() -> None:
    """20 layers with pools of 4 and 23 with pools of 128, in records of 584 bytes and keys of 132."""
    entries = [(4, 584), (4, 132)] * 20 + [(128, 584)] * 23
    sparse, heavy = tuple(range(1, 21)), tuple(range(21, 44))
    border = 4 * 2 * (512 + 128) * 4  # values and gates of 4 positions, float32
    parts = (OpenPart(sparse, 4 * (512 + 128), 7), OpenPart(heavy, 2 * 512, 127))
    rows = OpenPoolGroup((), parts=[part._replace(layers=tuple(44 + i for i in part.layers)) for part in parts])
    groups = [
        EntriesGroup((0,), entries=entries),
        BorderGroup(sparse, head_dim=584, latent=True, sliding_window=128, pool_size=128, entry_size=border),
        CacheGroup(heavy, head_dim=584, latent=True, sliding_window=128),
        rows,
    ]
    config = PagedKvCacheConfig(88, 1, 584, block_size=128, num_blocks=1, groups=groups)
    dtype = torch.float8_e4m3fn
    assert config.block_bytes(dtype) // 128 == 3685 == -(-(20 * (584 + 132) * 32 + 23 * 584) // 128)
    assert config.num_whole == 1
    assert len(config.tables) == 10
    assert rows.slot_bytes == 20 * 71 * 10240 + 23 * 191 * 4096


def test_what_does_not_fit_is_refused() -> None:
    manager = make()
    assert manager.entries(ENTRIES, 0).shape[1:] == (BLOCK // OVERLAPPING, 2)
    assert manager.entries(ENTRIES, 1).shape[1:] == (1, 3)
    assert manager.open_rows(MANY_ROWS).shape == (7, LARGE - 1 + ROLLBACK, 3)
    with pytest.raises(InvalidInputError, match="index: 2"):
        manager.entries(ENTRIES, 2)
    with pytest.raises(InvalidInputError, match="layer: 0 has no rows of open pools"):
        manager.open_rows(ENTRIES)
    with pytest.raises(InvalidInputError, match="block_size: 24, expected a multiple of 16"):
        make(block_size=24)
    with pytest.raises(InvalidInputError, match="expected one layer with entries"):
        EntriesGroup((0, 1), entries=[Entries(4, 2)])
    handle = manager.allocate("a")
    for call in (manager.extend, manager.advance):
        with pytest.raises(UnsupportedError, match="written by a forward"):
            call(handle, 0)
