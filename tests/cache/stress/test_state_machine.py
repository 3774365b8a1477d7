"""Random sequences of cache calls against a dictionary of what every sequence holds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from paged import InvalidInputError, StaleHandleError
from paged.batch import KvSlotRequest
from paged.cache import groups
from paged.cache.groups import CacheGroup
from paged.cache.prefix.chain_hash import ChainHash
from tests.cache.stress.modelled_cache import BLOCK_SIZE, ROLLBACK_SLACK, ModelledCache
from tests.cache.stress.sequence_model import Model, Open

SMALL = st.integers(0, 6)
# Lengths as likely as one another: lists of any length are mostly shorter than a block.
TOKENS = st.integers(0, 14).flatmap(lambda size: st.lists(st.integers(0, 1), min_size=size, max_size=size))
MOSTLY_FALSE = st.sampled_from([False, False, False, True])
NAMESPACES = st.sampled_from([None, "adapter"])


class CacheMachine(ModelledCache):
    """A rule for every call of the manager, and for what may go wrong in it."""

    seen: ClassVar[Counter[str]] = Counter()

    @precondition(ModelledCache.has_few)
    @rule(room=st.integers(0, 10), namespace=NAMESPACES)
    def allocate(self, room: int, namespace: str | None) -> None:
        seq_id = next(self.next_id)
        fits = self.manager.can_allocate(room)
        with self.attempt():
            handle = self.manager.allocate(seq_id, room, namespace=namespace)
            assert handle.capacity - room in range(BLOCK_SIZE)
            self.models[seq_id] = Model(namespace)
        assert fits == (seq_id in self.models)

    @precondition(ModelledCache.has_few)
    @rule(data=st.data(), tail=TOKENS, room=SMALL, is_moved=MOSTLY_FALSE, is_left=MOSTLY_FALSE)
    def allocate_prompt(self, data: st.DataObject, tail: list[int], room: int, is_moved: bool, is_left: bool) -> None:
        """A prompt that begins as an earlier one did, in its namespace unless `is_moved`; it may find a prefix. Unless
        `is_left`, what it has not found is computed.
        """
        namespace, earlier = data.draw(st.sampled_from(self.prompts))
        if is_moved:
            namespace = "adapter" if namespace is None else None
        if data.draw(st.booleans()):
            earlier = earlier[: data.draw(st.integers(0, len(earlier)))]
        tokens = (earlier + tail)[:20]
        if len(tokens) > BLOCK_SIZE and (namespace, tokens) not in self.prompts:
            self.prompts.append((namespace, tokens))
        seq_id = next(self.next_id)
        fits = self.manager.can_allocate(max(room, len(tokens)))
        with self.attempt():
            handle = self.manager.allocate(seq_id, room, token_ids=tokens, namespace=namespace)
            length = handle.num_tokens
            assert length == handle.num_cached_tokens <= max(0, len(tokens) - 1)
            assert (length + 1) % BLOCK_SIZE == 0 or length % BLOCK_SIZE == 0
            model = self.models[seq_id] = Model(namespace, length, length, known=length)
            model.put(0, self.of_ids(namespace, tokens[:length], 0), tokens[:length])
            # Behind a first table that sees everything, others begin with what the next token sees alone.
            self.give_back(model, 0 if self.num_tables > 1 else ROLLBACK_SLACK)
        assert not fits or seq_id in self.models
        if not is_left and seq_id in self.models:
            with self.attempt():
                count = len(tokens) - length
                metadata = self.manager.build_metadata([(handle, count)])
                numbers = self.of_ids(namespace, tokens, length)
                self.write_slots(metadata, numbers)
                model.put(length, numbers, tokens[length:])
                self.advance_by(seq_id, count)
                self.manager.append_tokens([(handle, tokens[length:])])
                model.known = len(tokens)

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data(), count=SMALL)
    def extend(self, data: st.DataObject, count: int) -> None:
        seq_id, handle, model = self.pick(data, self.ids_where())
        with self.attempt():
            self.manager.extend(handle, count)
            model.put(model.readable, [0] * (model.length + count - model.readable))
            model.length += count
            self.drop_unseen(model)
            self.settle(seq_id)

    @precondition(lambda self: self.ids_where(lambda model: model.written > model.length))
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        seq_id, _, model = self.pick(data, self.ids_where(lambda model: model.written > model.length))
        self.advance_by(seq_id, data.draw(st.integers(0, model.written - model.length)))

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data(), is_told=st.booleans())
    def forward(self, data: st.DataObject, is_told: bool) -> None:
        """One step of some sequences, written as a model writes."""
        batch = data.draw(st.lists(st.sampled_from(self.ids_where()), min_size=1, unique=True))
        handles = [self.lookup(seq_id) for seq_id in batch]
        counts = [data.draw(st.integers(0, handle.capacity - handle.num_tokens)) for handle in handles]
        with self.attempt():
            metadata = self.manager.build_metadata(zip(handles, counts, strict=True))
            starts = [handle.num_tokens for handle in handles]
            expected = [p for start, n in zip(starts, counts, strict=True) for p in range(start, start + n)]
            assert metadata.positions.tolist() == expected
            assert metadata.seq_lens.tolist() == [start + n for start, n in zip(starts, counts, strict=True)]
            for table in range(self.num_tables):
                for handle, row in zip(handles, metadata.table(table)[0].tolist(), strict=True):
                    blocks = handle.blocks[table :: self.num_tables]
                    assert tuple(row) == blocks + (0,) * (len(row) - len(blocks))
            for seq_id, count, end in zip(batch, counts, itertools.accumulate(counts), strict=True):
                model = self.models[seq_id]
                numbers, ids = self.draw_rows(data, model, model.length, count)
                self.write_slots(metadata, numbers, end - count)
                model.put(model.length, numbers, ids)
                self.advance_by(seq_id, count)
                if is_told and len(model.ids) >= model.length:
                    self.tell(seq_id, count)

    def tell(self, seq_id: int, count: int) -> None:
        model = self.models[seq_id]
        self.manager.append_tokens([(self.lookup(seq_id), model.ids[model.length - count : model.length])])
        if model.known + count == model.length:
            model.known = model.length

    @precondition(lambda self: self.ids_where(lambda model: len(model.ids) >= model.length))
    @rule(data=st.data(), is_whole=st.booleans())
    def append_tokens(self, data: st.DataObject, is_whole: bool) -> None:
        seq_id, _, model = self.pick(data, self.ids_where(lambda model: len(model.ids) >= model.length))
        missing = model.length - model.known
        self.tell(seq_id, missing if is_whole else data.draw(st.integers(0, model.length)))

    @precondition(lambda self: self.ids_where(lambda model: bool(model.ids)))
    @rule(data=st.data(), is_whole=st.booleans())
    def commit(self, data: st.DataObject, is_whole: bool) -> None:
        _, handle, model = self.pick(data, self.ids_where(lambda model: bool(model.ids)))
        count = len(model.ids) if is_whole else data.draw(st.integers(0, len(model.ids)))
        self.manager.commit(handle, model.ids[:count])
        model.known = max(model.known, min(count, model.length))

    @precondition(lambda self: self.ids_where(lambda model: model.known > 0))
    @rule(data=st.data())
    def commit_other_ids(self, data: st.DataObject) -> None:
        _, handle, model = self.pick(data, self.ids_where(lambda model: model.known > 0))
        wrong = model.ids[: model.known]
        wrong[data.draw(st.integers(0, model.known - 1))] += 1
        before = self.snapshot()
        with pytest.raises(InvalidInputError, match="was given before"):
            self.manager.commit(handle, wrong)
        assert self.snapshot() == before

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data())
    def write_kv(self, data: st.DataObject) -> None:
        seq_id, handle, model = self.pick(data, self.ids_where())
        # A rollback would undo what is written below the length meanwhile.
        is_reserved = any(seq_id in entry.targets for entry in self.open)
        position = data.draw(st.integers(model.length if is_reserved else model.first * BLOCK_SIZE, handle.capacity))
        count = data.draw(st.integers(0, handle.capacity - position))
        numbers, ids = self.draw_rows(data, model, position, count)
        with self.attempt():
            self.write_layers(handle, position, numbers)
            if position <= model.readable:
                model.written = max(model.readable, position + count)
            model.put(position, numbers, ids)
            if count:
                model.known = min(model.known, position)

    @precondition(lambda self: self.has_few() and self.ids_where())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq_id, handle, model = self.pick(data, self.ids_where())
        fork = next(self.next_id)
        self.manager.fork(handle, fork)
        self.models[fork] = model.copy(model.length)
        self.settle(seq_id)

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq_id, handle, model = self.pick(data, self.ids_where())
        length = data.draw(st.integers(0, model.length))
        kept = -(-length // BLOCK_SIZE)
        if self.window and max(0, length - self.window + 1) // BLOCK_SIZE < min(model.first, kept):
            before = self.snapshot()
            with pytest.raises(InvalidInputError, match="given back in part"):
                self.manager.truncate(handle, length)
            assert self.snapshot() == before
            return
        self.manager.truncate(handle, length)
        assert len(handle.blocks) == kept * self.num_tables
        model.cut(length)
        model.first = min(model.first, kept)
        self.settle(seq_id)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id, handle, _ = self.pick(data, sorted(self.models))
        self.manager.free(handle)
        self.manager.free(handle)
        with pytest.raises(StaleHandleError):
            self.manager.fork(handle, seq_id)
        del self.models[seq_id]
        self.settle(seq_id)

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        seq_id, handle, model = self.pick(data, self.ids_where())
        with self.attempt(on_host=True):
            self.manager.swap_out(handle)
            blocks = handle.blocks
            self.manager.swap_out(handle)
            assert handle.blocks == blocks
            assert len(blocks) == -(-model.length // BLOCK_SIZE) * self.num_tables
            model.cut(model.length)
            model.is_swapped = True
            self.settle(seq_id)

    @precondition(lambda self: self.swapped_ids())
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        _, handle, model = self.pick(data, self.swapped_ids())
        with self.attempt():
            self.manager.swap_in(handle)
            blocks = handle.blocks
            self.manager.swap_in(handle)
            assert handle.blocks == blocks
            model.is_swapped = False

    @precondition(lambda self: self.swapped_ids())
    @rule(data=st.data())
    def use_swapped(self, data: st.DataObject) -> None:
        seq_id, handle, _ = self.pick(data, self.swapped_ids())
        calls: list[Callable[[], object]] = [
            lambda: self.manager.extend(handle, 1),
            lambda: self.manager.truncate(handle, 0),
            lambda: self.manager.fork(handle, -1),
            lambda: self.manager.commit(handle, []),
            lambda: self.manager.append_tokens([(handle, [])]),
            lambda: self.manager.read_kv(handle, 0, 0, 0),
            lambda: self.manager.reserve([KvSlotRequest(seq_id, handle.num_tokens)]),
            lambda: self.manager.build_metadata([(handle, 0)]),
        ]
        before = self.snapshot()
        with pytest.raises(StaleHandleError, match="swapped out"):
            data.draw(st.sampled_from(calls))()
        assert self.snapshot() == before

    @precondition(lambda self: self.models and not self.is_armed)
    @rule(what=st.sampled_from(["arm", "arm", "evict", "clear"]), count=SMALL)
    def disturb(self, what: str, count: int) -> None:
        """The next copy will fail, or published blocks go."""
        cached = self.manager.stats().cached_blocks
        if what == "arm":
            self.is_armed = True
        elif what == "evict":
            assert self.manager.evict(count) == min(count, cached)
            left = cached - min(count, cached)
            found = self.manager.stats().cached_blocks
            assert found == left or (found < left and self.num_tables > 1)  # others are of no use without those
        else:
            self.manager.clear_prefix_cache()
            stats = self.manager.stats()
            assert (stats.cached_blocks, stats.published_blocks) == (0, 0)

    @precondition(lambda self: self.ids_where(lambda model: model.length >= BLOCK_SIZE and not model.first))
    @rule(data=st.data(), room=SMALL)
    def share_prefix_blocks(self, data: st.DataObject, room: int) -> None:
        ids = self.ids_where(lambda model: model.length >= BLOCK_SIZE and not model.first)
        _, handle, model = self.pick(data, ids)
        num_blocks = data.draw(st.integers(1, model.length // BLOCK_SIZE))
        seq_id = next(self.next_id)
        with self.attempt():
            target = self.manager.allocate(seq_id, room, namespace=model.namespace)
            self.manager.share_prefix_blocks(handle, target, num_blocks)
            self.models[seq_id] = model.copy(num_blocks * BLOCK_SIZE)
            assert target.num_cached_tokens == target.num_tokens

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data(), as_model=st.booleans(), admitted=st.none() | SMALL)
    def reserve(self, data: st.DataObject, as_model: bool, admitted: int | None) -> None:
        """Room for some sequences, which is written at once and stays open while other calls run."""
        growth = data.draw(st.dictionaries(st.sampled_from(self.ids_where()), SMALL, min_size=1))
        targets = {seq_id: self.models[seq_id].length + count for seq_id, count in growth.items()}
        before = {}
        for seq_id in growth:
            model = self.models[seq_id]
            state = replace(model, cells=model.cells.copy(), ids=model.ids.copy())
            before[seq_id] = self.lookup(seq_id).blocks, state
        reservation = None
        with self.attempt():
            reservation = self.manager.reserve(
                [KvSlotRequest(i, t, None if admitted is None else t + admitted) for i, t in targets.items()]
            )
        if reservation is None:
            return
        self.settle(*growth)
        replaced = {}
        for seq_id, count in growth.items():
            handle, model, (blocks, _) = self.lookup(seq_id), self.models[seq_id], before[seq_id]
            replaced[seq_id] = {i for i, block in enumerate(blocks) if handle.blocks[i] != block}
            numbers, ids = self.draw_rows(data, model, model.length, count)
            if as_model:
                self.write_slots(self.manager.build_metadata([(handle, count)]), numbers)
            else:
                self.write_layers(handle, model.length, numbers)
                model.written = max(model.written, model.length, targets[seq_id])
            model.put(model.length, numbers, ids)
        self.open.append(Open(reservation, targets, before, replaced))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), end=st.sampled_from(["commit", "rollback", "raise", "leave"]))
    def end_reservation(self, data: st.DataObject, end: str) -> None:
        entry = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        blocks_now = {seq_id: self.lookup(seq_id).blocks for seq_id in entry.targets}
        if end == "commit":
            entry.reservation.commit()
            for seq_id, target in entry.targets.items():
                self.models[seq_id].length = target
                self.drop_unseen(self.models[seq_id])
        elif end == "leave":
            with entry.reservation:
                pass
        else:
            if end == "rollback":
                entry.reservation.rollback()
            else:
                with pytest.raises(KeyError), entry.reservation:
                    raise KeyError
            for seq_id, target in entry.targets.items():
                if target == entry.before[seq_id][1].length:  # grows by nothing: a write behind its end may copy blocks
                    continue
                blocks, before = self.lookup(seq_id).blocks, entry.before[seq_id][0]
                assert len(blocks) == len(before)
                # A write behind the room of the reservation may have filled gaps.
                changed = [then for now, then in zip(blocks, before, strict=True) if now != then]
                assert not changed or (self.num_tables > 1 and not any(changed))
                if blocks_now[seq_id] != entry.before[seq_id][0]:
                    self.roll_back(seq_id, entry)
        assert not entry.reservation.is_open

    def roll_back(self, seq_id: int, entry: Open) -> None:
        """Blocks that copies replaced hold again what they held; the others hold what was written meanwhile."""
        model, (blocks, old) = self.models[seq_id], entry.before[seq_id]
        model.written = old.written
        cells = model.cells[: len(blocks) // self.num_tables * BLOCK_SIZE]
        for index in entry.replaced[seq_id]:
            span = slice(index // self.num_tables * BLOCK_SIZE, (index // self.num_tables + 1) * BLOCK_SIZE)
            cells[span] = old.cells[span]
        model.cells = cells
        model.ids = max((self.still_true(model, ids) for ids in (model.ids, old.ids)), key=len)

    def still_true(self, model: Model, ids: list[int]) -> list[int]:
        numbers = self.of_ids(model.namespace, ids, 0)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(numbers, model.cells, strict=False))
        return ids[: sum(1 for _ in same)]

    @precondition(lambda self: self.ids_where(lambda model: model.first > 0))
    @rule(data=st.data())
    def read_behind_window(self, data: st.DataObject) -> None:
        _, handle, model = self.pick(data, self.ids_where(lambda model: model.first > 0))
        position = data.draw(st.integers(0, model.first * BLOCK_SIZE - 1))
        layer = next(layer for layer, table in self.layers if table.sliding_window)
        with pytest.raises(InvalidInputError, match="behind its sliding window"):
            self.manager.read_kv(handle, layer, position, 1)


class CollidingMachine(CacheMachine):
    """All blocks have the same hash: only what is compared besides keeps prompts apart."""

    seen: ClassVar[Counter[str]] = Counter()

    def patch(self, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(ChainHash, "extend", lambda self, previous, blocks: [0] * len(blocks)))


class WindowMachine(CacheMachine):
    """Blocks behind a sliding window are given back; hashes are those for untrusted parties."""

    changes: ClassVar[dict[str, Any]] = {"sliding_window": 6, "prefix_hash": "sha256"}
    seen: ClassVar[Counter[str]] = Counter()

    def patch(self, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(groups, "ROLLBACK_SLACK", ROLLBACK_SLACK))


class GroupedMachine(CacheMachine):
    """Layers that see everything, of two shapes, one with a window, and one without K/V of its own."""

    changes: ClassVar[dict[str, Any]] = {
        "num_layers": 4,
        "groups": [CacheGroup((0,)), CacheGroup((1,), sliding_window=6), CacheGroup((3,), head_dim=4, v_head_dim=12)],
        "num_blocks": 29,
        "num_swap_blocks": 9,
    }
    seen: ClassVar[Counter[str]] = Counter()

    def patch(self, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(groups, "ROLLBACK_SLACK", ROLLBACK_SLACK))


MACHINES = (CacheMachine, CollidingMachine, WindowMachine, GroupedMachine)


@pytest.mark.usefixtures("torch_backend")
@pytest.mark.parametrize(("machine", "max_examples"), list(zip(MACHINES, (60, 45, 45, 60), strict=True)))
def test_cache(machine: type[CacheMachine], max_examples: int) -> None:
    """Further rounds of examples until enough was done and all met that it is about: Hypothesis also draws from the
    constants of whatever modules are loaded, so that no round is the same everywhere. The soak takes many.
    """
    machine.seen.clear()
    # Hits are rare where all hashes collide or blocks soon leave the window; test_prefix_collisions.py and
    # test_sliding_window.py provoke them.
    events = {"refused", "injected", "cow_copies", "swapped_in_blocks"}
    if machine in (CacheMachine, GroupedMachine):
        events |= {"prefix_hits", "evictions"}
    for is_first in (True, *[False] * 7):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=50,
                deadline=None,
                derandomize=is_first,
                database=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
        if machine.seen["steps"] > 1500 and events <= (+machine.seen).keys():
            break
    assert machine.seen["steps"] > 1500
    assert events <= (+machine.seen).keys(), machine.seen
