"""A cache beside what is believed of it: what every call of the state machine is compared with, and what it draws."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from paged import AttentionMetadata, BlockRemoved, BlocksStored, CacheCleared, MemoryPressure, OutOfBlocksError
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from tests.cache.stress.sequence_model import Model, Open

BLOCK_SIZE = 4
NUM_BLOCKS = 11
NUM_SWAP_BLOCKS = 4
# In place of 64, so that sequences of a few blocks have some behind their window.
ROLLBACK_SLACK = 2


def of_layer(layer: int, numbers: Sequence[int | None]) -> torch.Tensor:
    """The K of a token in a layer, [len(numbers)]: no two layers have the same."""
    return torch.tensor(numbers, dtype=torch.float32) * (layer + 1)


class InjectedError(Exception):
    """Stands for a copy that fails on the device."""


class ModelledCache(RuleBasedStateMachine):
    """The K/V of a token are, as in a real model, a function of its namespace and of all ids up to and including its
    own; tokens without known ids get numbers of their own. So a prefix that serves another prompt's K/V is seen.
    """

    changes: ClassVar[dict[str, Any]] = {}
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        config = PagedKvCacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_swap_blocks=NUM_SWAP_BLOCKS,
            dtype=torch.float32,
            device="cpu",
        )
        self.stack = ExitStack()
        self.patch(self.stack)
        self.manager = PagedKvCacheManager(replace(config, **self.changes))
        self.models: dict[int, Model] = {}
        self.open: list[Open] = []
        self.prompts: list[tuple[str | None, list[int]]] = [(None, [])]
        self.next_id = itertools.count()
        self.next_number = itertools.count(1)
        self.numbers: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.steps = -1  # the invariants are checked once before the first step
        self.is_armed = False
        self.num_tables = len(self.manager.config.tables)
        self.layers = [(layer, table) for table in self.manager.config.tables for layer in table.layers]
        self.window = next((table.sliding_window for _, table in self.layers if table.sliding_window), None)
        tensors = self.manager._tensors
        for owner, name in (
            (tensors, "copy"),
            (tensors.host_blocks[0], "swap_out"),
            (tensors.host_blocks[0], "swap_in"),
        ):
            setattr(owner, name, self.failing(getattr(owner, name)))
        self.found: set[int | bytes] = set()
        self.manager.subscribe(self.note_event)
        self.level = MemoryPressure.LOW
        self.manager.on_pressure(lambda level: setattr(self, "level", level))

    def patch(self, stack: ExitStack) -> None:
        """What a variant changes of the code under test while its machine runs."""

    def failing(self, function: Callable[..., None]) -> Callable[..., None]:
        """`function`, but once after `is_armed` was set it fails in the middle of its work."""

        def copy(pairs: Sequence[tuple[int, int]]) -> None:
            if pairs and self.is_armed:
                self.is_armed = False
                function(pairs[: len(pairs) // 2])
                raise InjectedError
            function(pairs)

        return copy

    def note_event(self, event: BlocksStored | BlockRemoved | CacheCleared) -> None:
        if isinstance(event, BlocksStored):
            self.found |= set(event.hashes)
        elif isinstance(event, BlockRemoved):
            # Where all hashes collide, blocks of one publication displace one another before it is told.
            self.found.discard(event.hash)
        else:
            self.found.clear()

    def lookup(self, seq_id: int) -> KvCacheHandle:
        handle = self.manager.get_handle(seq_id)
        assert handle is not None
        return handle

    def ids_where(self, condition: Callable[[Model], bool] = lambda model: True) -> list[int]:
        return sorted(i for i, model in self.models.items() if not model.is_swapped and condition(model))

    def swapped_ids(self) -> list[int]:
        return sorted(i for i, model in self.models.items() if model.is_swapped)

    def has_few(self) -> bool:
        return len(self.models) < 6

    def pick(self, data: st.DataObject, ids: Sequence[int]) -> tuple[int, KvCacheHandle, Model]:
        seq_id = data.draw(st.sampled_from(ids))
        return seq_id, self.lookup(seq_id), self.models[seq_id]

    def of_ids(self, namespace: str | None, ids: Sequence[int], start: int) -> list[int]:
        """The numbers of `ids` from `start` on."""
        keys = [(namespace, tuple(ids[: i + 1])) for i in range(start, len(ids))]
        return [self.numbers[key] if key in self.numbers else self.new_number(key) for key in keys]

    def new_number(self, key: tuple[str | None, tuple[int, ...]]) -> int:
        self.numbers[key] = next(self.next_number)
        return self.numbers[key]

    def draw_rows(self, data: st.DataObject, model: Model, position: int, count: int) -> tuple[list[int], list[int]]:
        """What to write at `position`: numbers, and the ids they are of (or none)."""
        ids: list[int] = []
        if position <= len(model.ids) and data.draw(st.booleans()):
            ids = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
            numbers = self.of_ids(model.namespace, model.ids[:position] + ids, position)
        else:
            numbers = list(itertools.islice(self.next_number, count))
        return numbers, ids

    def write_layers(self, handle: KvCacheHandle, position: int, numbers: list[int]) -> None:
        for layer, table in self.layers:
            key = of_layer(layer, numbers).view(-1, 1, 1)
            width, v_width = table.sizes
            self.manager.write_kv(handle, layer, position, key.expand(-1, 1, width), -key.expand(-1, 1, v_width))

    def settle(self, *seq_ids: int) -> None:
        for entry in self.open:
            for seq_id in seq_ids:
                entry.targets.pop(seq_id, None)

    def drop_unseen(self, model: Model) -> None:
        self.give_back(model, ROLLBACK_SLACK)

    def give_back(self, model: Model, slack: int) -> None:
        if self.window is not None:
            model.first = max(model.first, max(0, model.length - slack - self.window + 1) // BLOCK_SIZE)

    def published(self) -> dict[int, int | bytes]:
        index = self.manager._prefixes.index
        return {block: index.hash_of(block) for block in index.published}

    def snapshot(self) -> Any:
        handles = [
            (h.cache_id, h.blocks, h.num_tokens, h.num_cached_tokens, h.is_swapped) for h in self.manager.handles()
        ]
        pools = [
            [pool.ref_count(block) for block in range(1, pool.num_blocks + 1)]
            for pool in (self.manager._pool, self.manager._swap.pool)
        ]
        return handles, pools, self.published(), replace(self.manager.stats(), allocation_failures=0)

    @contextmanager
    def attempt(self, *, on_host: bool = False) -> Iterator[None]:
        """A call that finds no blocks changes nothing, and there were indeed too few; nor does one whose copy fails,
        but cached blocks whose room it took are gone.
        """
        handles, pools, published, stats = self.snapshot()
        refused = None
        try:
            yield
        except OutOfBlocksError as error:
            refused = error
        except InjectedError:
            handles_now, pools_now, published_now, stats_now = self.snapshot()
            assert (handles_now, pools_now) == (handles, pools)
            assert published_now.items() <= published.items()
            lost = stats.cached_blocks - stats_now.cached_blocks
            withdrawn = len(published) - len(published_now)  # with what others hold, but is of no use without the lost
            assert withdrawn == lost or (withdrawn > lost and self.num_tables > 1)
            assert stats_now == replace(
                stats,
                cached_blocks=stats.cached_blocks - lost,
                published_blocks=stats.published_blocks - withdrawn,
                evictions=stats.evictions + lost,
            )
            self.seen["injected"] += 1
        if refused is not None:
            assert refused.needed > refused.free == (stats.swap_blocks_free if on_host else stats.free_blocks)
            assert self.snapshot() == (handles, pools, published, stats)
            self.seen["refused"] += 1

    def write_slots(self, metadata: AttentionMetadata, numbers: list[int], start: int = 0) -> None:
        """As a model's layers do, at the slots from `start` on."""
        for layer, _ in self.layers:
            _, slots = metadata.table(self.manager.table_of(layer))
            slots = slots[start : start + len(numbers)]
            where, key = (slots // BLOCK_SIZE, slots % BLOCK_SIZE), of_layer(layer, numbers).view(-1, 1, 1)
            self.manager.k_cache(layer)[where] = key
            self.manager.v_cache(layer)[where] = -key

    def advance_by(self, seq_id: int, count: int) -> None:
        self.manager.advance(self.lookup(seq_id), count)
        self.models[seq_id].length += count
        self.drop_unseen(self.models[seq_id])
        self.settle(seq_id)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.steps += 1
        self.manager.check_integrity()
        assert {handle.cache_id for handle in self.manager.handles()} == set(self.models)
        assert self.level is self.manager.pressure
        assert self.found == set(self.published().values())
        for seq_id, model in self.models.items():
            handle = self.lookup(seq_id)
            assert (handle.num_tokens, handle.is_swapped) == (model.length, model.is_swapped)
            if not model.is_swapped:
                self.check_layers(handle, model)

    def check_layers(self, handle: KvCacheHandle, model: Model) -> None:
        for layer, table in self.layers:
            first = model.first if table.sliding_window else 0
            start = first * BLOCK_SIZE
            key, value = self.manager.read_kv(handle, layer, start, model.readable - start)
            expected = of_layer(layer, model.cells[start : model.readable])
            for rows in (key[:, 0, 0], key[:, 0, -1], -value[:, 0, 0], -value[:, 0, -1]):
                assert torch.equal(rows, expected)
            blocks = handle.blocks[self.manager.table_of(layer) :: self.num_tables]
            assert not any(blocks[:first])
            assert 0 not in blocks[first : -(-model.length // BLOCK_SIZE)]

    def teardown(self) -> None:
        for handle in self.manager.handles():
            self.manager.free(handle)
        self.manager.check_integrity()
        stats = self.manager.stats()
        config = self.manager.config
        assert (stats.free_blocks, stats.swap_blocks_free) == (config.num_blocks, config.num_swap_blocks)
        assert self.level is MemoryPressure.LOW
        self.seen.update(
            steps=self.steps,
            prefix_hits=stats.prefix_hits,
            evictions=stats.evictions,
            cow_copies=stats.cow_copies,
            swapped_in_blocks=stats.swapped_in_blocks,
        )
        self.stack.close()
