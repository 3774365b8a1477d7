"""A cache beside what is believed of it: what every call of the state machine is compared with, and what it draws."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged import AttentionMetadata, MemoryPressure, OutOfBlocksError
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.cache.slot_reservation import KvSlotReservation
from tests.cache.prefix_cache import Mirror
from tests.cache.snapshot import published_hashes

BLOCK_SIZE = 4
# In place of 64, so that sequences of a few blocks have some behind their window.
ROLLBACK_SLACK = 2


@dataclass
class Model:
    """One sequence, in plain lists. `cells` are the numbers that fill the K of positions 0.. (V has the negatives), as
    far as written; below `length`, and below `written`, they can be read.

    `ids`: token ids of the positions from 0 whose cell is the number of (namespace, ids up to and including it).
    `known`: how many of them the manager has been told. `first`: blocks behind the sliding window.
    """

    handle: KvCacheHandle
    namespace: str | None
    length: int = 0
    written: int = 0
    cells: list[int | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    known: int = 0
    first: int = 0
    is_swapped: bool = False

    @property
    def readable(self) -> int:
        return max(self.length, self.written)

    def put(self, position: int, numbers: Sequence[int], ids: Sequence[int] = ()) -> None:
        """`numbers` stand at `position`..; with `ids`, they are those of these ids after the ones before."""
        if numbers:
            end = position + len(numbers)
            self.cells += [None] * (end - len(self.cells))
            self.cells[position:end] = numbers
            self.ids[position:] = ids

    def cut(self, length: int) -> None:
        self.length = self.written = length
        self.known = min(self.known, length)
        del self.cells[length:], self.ids[length:]

    def copy(self, **changes: Any) -> Model:
        return replace(self, cells=self.cells.copy(), ids=self.ids.copy(), **changes)

    def forked(self, handle: KvCacheHandle, length: int) -> Model:
        copied = self.copy(handle=handle)
        copied.cut(length)
        return copied


@dataclass
class Open:
    """A reservation that has not ended: the length each sequence would commit to, and what a rollback goes back to."""

    reservation: KvSlotReservation
    targets: dict[int, int]
    before: dict[int, tuple[tuple[int, ...], Model]]
    replaced: dict[int, set[int]]


def of_layer(layer: int, numbers: Sequence[int | None]) -> torch.Tensor:
    """The K of a token in a layer, [len(numbers)]: no two layers have the same."""
    return torch.tensor(numbers, dtype=torch.float32) * (layer + 1)


def rule_of_a_sequence(
    condition: Callable[[Model], bool] = lambda model: True,
    *,
    is_swapped: bool = False,
    may_add: bool = False,
    **drawn: Any,
) -> Callable[[Callable[..., None]], Any]:
    """A rule that is given one of the sequences, here or swapped out, of which `condition` holds, and `data`.

    may_add: only while there are few, as it adds one.
    """

    def is_possible(cache: ModelledCache) -> bool:
        return bool(cache.ids_where(condition, is_swapped)) and (cache.has_few() or not may_add)

    def decorate(function: Callable[..., None]) -> Any:
        def run(self: ModelledCache, data: st.DataObject, **given: Any) -> None:
            seq_id = data.draw(st.sampled_from(self.ids_where(condition, is_swapped)))
            function(self, data, self.models[seq_id], **given)

        run.__name__ = function.__name__
        return precondition(is_possible)(rule(data=st.data(), **drawn)(run))

    return decorate


class ModelledCache(RuleBasedStateMachine):
    """The K/V of a token are, as in a real model, a function of its namespace and of all ids up to and including its
    own; tokens without known ids get numbers of their own. So a prefix that serves another prompt's K/V is seen.
    """

    changes: ClassVar[dict[str, Any]] = {}
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        config = PagedKvCacheConfig(1, 1, 8, BLOCK_SIZE, 11, num_swap_blocks=4, dtype=torch.float32, device="cpu")
        self.stack = ExitStack()
        self.patch(self.stack)
        self.manager = PagedKvCacheManager(replace(config, **self.changes))
        self.models: dict[int, Model] = {}
        self.open: list[Open] = []
        self.prompts: list[tuple[str | None, list[int]]] = [(None, [])]
        self.next_id = itertools.count()
        self.next_number = itertools.count(1)
        self.numbers: defaultdict[Any, int] = defaultdict(lambda: next(self.next_number))
        self.steps = -1  # the invariants are checked once before the first step
        self.num_tables = len(self.manager.config.tables)
        self.layers = [(layer, table) for table in self.manager.config.tables for layer in table.layers]
        self.window = next((table.sliding_window for _, table in self.layers if table.sliding_window), None)
        self.mirror = Mirror(self.manager)
        self.level = MemoryPressure.LOW
        self.manager.on_pressure(lambda level: setattr(self, "level", level))

    def patch(self, stack: ExitStack) -> None:
        """What a variant changes of the code under test while its machine runs."""

    def ids_where(self, condition: Callable[[Model], bool] = lambda model: True, is_swapped: bool = False) -> list[int]:
        return [i for i, model in self.models.items() if model.is_swapped == is_swapped and condition(model)]

    def has_few(self) -> bool:
        return len(self.models) < 6

    def of_ids(self, namespace: str | None, ids: Sequence[int], start: int) -> list[int]:
        """The numbers of `ids` from `start` on."""
        return [self.numbers[namespace, tuple(ids[: i + 1])] for i in range(start, len(ids))]

    def draw_rows(self, data: st.DataObject, model: Model, position: int, count: int) -> tuple[list[int], list[int]]:
        """What to write at `position`: numbers, and the ids they are of (or none)."""
        if position > len(model.ids) or not data.draw(st.booleans()):
            return list(itertools.islice(self.next_number, count)), []
        ids = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
        return self.of_ids(model.namespace, model.ids[:position] + ids, position), ids

    def write_layers(self, handle: KvCacheHandle, position: int, numbers: list[int]) -> None:
        for layer, table in self.layers:
            key = of_layer(layer, numbers).view(-1, 1, 1)
            width, v_width = table.sizes
            self.manager.write_kv(handle, layer, position, key.expand(-1, 1, width), -key.expand(-1, 1, v_width))

    def write_slots(self, metadata: AttentionMetadata, numbers: list[int], start: int = 0) -> None:
        """As a model's layers do, at the slots from `start` on."""
        for layer, _ in self.layers:
            _, slots = metadata.table(self.manager.table_of(layer))
            slots = slots[start : start + len(numbers)]
            where, key = (slots // BLOCK_SIZE, slots % BLOCK_SIZE), of_layer(layer, numbers).view(-1, 1, 1)
            self.manager.k_cache(layer)[where] = key
            self.manager.v_cache(layer)[where] = -key

    def settle(self, *models: Model) -> None:
        for entry, model in itertools.product(self.open, models):
            entry.targets.pop(model.handle.cache_id, None)

    def give_back(self, model: Model, slack: int = ROLLBACK_SLACK) -> None:
        """What is behind the window of every token that may come."""
        if self.window is not None:
            model.first = max(model.first, max(0, model.length - slack - self.window + 1) // BLOCK_SIZE)

    def advance_by(self, model: Model, count: int) -> None:
        self.manager.advance(model.handle, count)
        model.length += count
        self.give_back(model)
        self.settle(model)

    def published(self) -> dict[int, int | bytes]:
        return published_hashes(self.manager)

    def snapshot(self) -> Any:
        handles = [
            (h.cache_id, h.blocks, h.num_tokens, h.num_cached_tokens, h.is_swapped) for h in self.manager.handles()
        ]
        pools = [
            ({*pool._free, *pool.cached}, dict(pool._extra_references))
            for pool in (self.manager._pool, self.manager._swap.shelf.pool)
        ]
        return handles, pools, self.published(), replace(self.manager.stats(), allocation_failures=0)

    @contextmanager
    def attempt(self, *, on_host: bool = False) -> Iterator[None]:
        """A call that finds no blocks changes nothing, and there were indeed too few."""
        before = self.snapshot()
        refused = None
        try:
            yield
        except OutOfBlocksError as error:
            refused = error
        if refused is not None:
            stats = before[-1]
            assert refused.needed > refused.free == (stats.swap_blocks_free if on_host else stats.free_blocks)
            assert self.snapshot() == before
            self.seen["refused"] += 1

    @contextmanager
    def refusal(self, error: type[Exception], match: str) -> Iterator[None]:
        """A call that is not allowed says so, and changes nothing."""
        before = self.snapshot()
        with pytest.raises(error, match=match):
            yield
        assert self.snapshot() == before

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.steps += 1
        self.manager.check_integrity()
        assert {one.cache_id: one for one in self.manager.handles()} == {i: m.handle for i, m in self.models.items()}
        assert self.level is self.manager.pressure
        assert self.mirror.hashes == set(self.published().values())
        for model in self.models.values():
            assert (model.handle.num_tokens, model.handle.is_swapped) == (model.length, model.is_swapped)
            if not model.is_swapped:
                self.check_layers(model)

    def check_layers(self, model: Model) -> None:
        for layer, table in self.layers:
            first = model.first if table.sliding_window else 0
            start = first * BLOCK_SIZE
            key, value = self.manager.read_kv(model.handle, layer, start, model.readable - start)
            expected = of_layer(layer, model.cells[start : model.readable])
            for rows in (key[:, 0, 0], key[:, 0, -1], -value[:, 0, 0], -value[:, 0, -1]):
                assert torch.equal(rows, expected)
            blocks = model.handle.blocks[self.manager.table_of(layer) :: self.num_tables]
            assert not any(blocks[:first])
            assert 0 not in blocks[first : -(-model.length // BLOCK_SIZE)]

    def teardown(self) -> None:
        for handle in self.manager.handles():
            self.manager.free(handle)
        self.manager.check_integrity()
        stats, config = self.manager.stats(), self.manager.config
        assert (stats.free_blocks, stats.swap_blocks_free) == (config.num_blocks, config.num_swap_blocks)
        assert self.level is MemoryPressure.LOW
        names = ("prefix_hits", "evictions", "cow_copies", "swapped_in_blocks", "host_stored_blocks")
        self.seen.update(
            steps=self.steps, unknown=len(self.mirror.unknown), **{name: getattr(stats, name) for name in names}
        )
        self.stack.close()
