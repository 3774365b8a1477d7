"""Random sequences of cache calls against a dictionary of what every sequence holds.

SOAK=1 makes 1,000,000 of them."""

import itertools
import os
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from paged import InvalidInputError, StaleHandleError
from paged.cache import groups
from paged.cache.groups import CacheGroup
from paged.step.batch import KvSlotRequest
from tests.cache.stress.modelled_cache import (
    BLOCK_SIZE,
    ROLLBACK_SLACK,
    Model,
    ModelledCache,
    Open,
    rule_of_a_sequence,
)

SMALL = st.integers(0, 6)
# Lengths as likely as one another: lists of any length are mostly shorter than a block.
TOKENS = st.integers(0, 14).flatmap(lambda size: st.lists(st.integers(0, 1), min_size=size, max_size=size))
MOSTLY_FALSE = st.sampled_from([False, False, False, True])


class CacheMachine(ModelledCache):
    """A rule for every call of the manager. test_failed_calls.py has the exceptions within one."""

    seen: ClassVar[Counter[str]] = Counter()

    @precondition(ModelledCache.has_few)
    @rule(room=st.integers(0, 10), namespace=st.sampled_from([None, "adapter"]))
    def allocate(self, room: int, namespace: str | None) -> None:
        seq_id = next(self.next_id)
        fits = self.manager.can_allocate(room)
        with self.attempt():
            handle = self.manager.allocate(seq_id, room, namespace=namespace)
            assert handle.capacity - room in range(BLOCK_SIZE)
            self.models[seq_id] = Model(handle, namespace)
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
            model = self.models[seq_id] = Model(handle, namespace, length, length, known=length)
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
                self.advance_by(model, count)
                self.manager.append_tokens([(handle, tokens[length:])])
                model.known = len(tokens)

    @rule_of_a_sequence(count=SMALL)
    def extend(self, data: st.DataObject, model: Model, count: int) -> None:
        with self.attempt():
            self.manager.extend(model.handle, count)
            model.put(model.readable, [0] * (model.length + count - model.readable))
            model.length += count
            self.give_back(model)
            self.settle(model)

    @rule_of_a_sequence(lambda model: model.written > model.length)
    def advance(self, data: st.DataObject, model: Model) -> None:
        self.advance_by(model, data.draw(st.integers(0, model.written - model.length)))

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data(), is_told=st.booleans())
    def forward(self, data: st.DataObject, is_told: bool) -> None:
        """One step of some sequences, written as a model writes."""
        ids = data.draw(st.lists(st.sampled_from(self.ids_where()), min_size=1, unique=True))
        batch = [self.models[seq_id] for seq_id in ids]
        handles = [model.handle for model in batch]
        counts = [data.draw(st.integers(0, handle.capacity - handle.num_tokens)) for handle in handles]
        with self.attempt():
            metadata = self.manager.build_metadata(zip(handles, counts, strict=True))
            spans = [range(h.num_tokens, h.num_tokens + n) for h, n in zip(handles, counts, strict=True)]
            assert metadata.positions.tolist() == list(itertools.chain(*spans))
            assert metadata.seq_lens.tolist() == [span.stop for span in spans]
            for table in range(self.num_tables):
                for handle, row in zip(handles, metadata.table(table)[0].tolist(), strict=True):
                    blocks = handle.blocks[table :: self.num_tables]
                    assert tuple(row) == blocks + (0,) * (len(row) - len(blocks))
            for model, count, end in zip(batch, counts, itertools.accumulate(counts), strict=True):
                numbers, ids = self.draw_rows(data, model, model.length, count)
                self.write_slots(metadata, numbers, end - count)
                model.put(model.length, numbers, ids)
                self.advance_by(model, count)
                if is_told and len(model.ids) >= model.length:
                    self.tell(model, count)

    def tell(self, model: Model, count: int) -> None:
        self.manager.append_tokens([(model.handle, model.ids[model.length - count : model.length])])
        if model.known + count == model.length:
            model.known = model.length

    @rule_of_a_sequence(lambda model: len(model.ids) >= model.length, is_whole=st.booleans())
    def append_tokens(self, data: st.DataObject, model: Model, is_whole: bool) -> None:
        self.tell(model, model.length - model.known if is_whole else data.draw(st.integers(0, model.length)))

    @rule_of_a_sequence(lambda model: bool(model.ids), is_whole=st.booleans())
    def commit(self, data: st.DataObject, model: Model, is_whole: bool) -> None:
        count = len(model.ids) if is_whole else data.draw(st.integers(0, len(model.ids)))
        self.manager.commit(model.handle, model.ids[:count])
        model.known = max(model.known, min(count, model.length))

    @rule_of_a_sequence(lambda model: model.known > 0)
    def commit_other_ids(self, data: st.DataObject, model: Model) -> None:
        wrong = model.ids[: model.known]
        wrong[data.draw(st.integers(0, model.known - 1))] += 1
        with self.refusal(InvalidInputError, "differ from the ids given before"):
            self.manager.commit(model.handle, wrong)

    @rule_of_a_sequence()
    def write_kv(self, data: st.DataObject, model: Model) -> None:
        # A rollback would undo what is written below the length meanwhile.
        is_reserved = any(model.handle.cache_id in entry.targets for entry in self.open)
        capacity = model.handle.capacity
        position = data.draw(st.integers(model.length if is_reserved else model.first * BLOCK_SIZE, capacity))
        count = data.draw(st.integers(0, capacity - position))
        numbers, ids = self.draw_rows(data, model, position, count)
        with self.attempt():
            self.write_layers(model.handle, position, numbers)
            if position <= model.readable:
                model.written = max(model.readable, position + count)
            model.put(position, numbers, ids)
            if count:
                model.known = min(model.known, position)

    @rule_of_a_sequence(may_add=True)
    def fork(self, data: st.DataObject, model: Model) -> None:
        seq_id = next(self.next_id)
        self.models[seq_id] = model.forked(self.manager.fork(model.handle, seq_id), model.length)
        self.settle(model)

    @rule_of_a_sequence()
    def truncate(self, data: st.DataObject, model: Model) -> None:
        length = data.draw(st.integers(0, model.length))
        kept = -(-length // BLOCK_SIZE)
        if self.window and max(0, length - self.window + 1) // BLOCK_SIZE < min(model.first, kept):
            with self.refusal(InvalidInputError, "part of its sliding window has been freed"):
                self.manager.truncate(model.handle, length)
            return
        self.manager.truncate(model.handle, length)
        assert len(model.handle.blocks) == kept * self.num_tables
        model.cut(length)
        model.first = min(model.first, kept)
        self.settle(model)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        model = self.models.pop(data.draw(st.sampled_from(list(self.models))))
        self.manager.free(model.handle)
        self.manager.free(model.handle)
        with pytest.raises(StaleHandleError):
            self.manager.fork(model.handle, -1)
        self.settle(model)

    @rule_of_a_sequence()
    def swap_out(self, data: st.DataObject, model: Model) -> None:
        with self.attempt(on_host=True):
            self.manager.swap_out(model.handle)
            blocks = model.handle.blocks
            self.manager.swap_out(model.handle)
            assert model.handle.blocks == blocks
            assert len(blocks) == -(-model.length // BLOCK_SIZE) * self.num_tables
            model.cut(model.length)
            model.is_swapped = True
            self.settle(model)

    @rule_of_a_sequence(is_swapped=True)
    def swap_in(self, data: st.DataObject, model: Model) -> None:
        with self.attempt():
            self.manager.swap_in(model.handle)
            blocks = model.handle.blocks
            self.manager.swap_in(model.handle)
            assert model.handle.blocks == blocks
            model.is_swapped = False

    @precondition(lambda self: self.models)
    @rule(num_blocks=SMALL)
    def evict(self, num_blocks: int) -> None:
        cached = self.manager.stats().cached_blocks
        assert self.manager.evict(num_blocks) == min(num_blocks, cached)
        remaining = cached - min(num_blocks, cached)
        cached = self.manager.stats().cached_blocks
        assert cached == remaining or (cached < remaining and self.num_tables > 1)  # others are of no use without those

    @precondition(lambda self: self.models)
    @rule()
    def clear(self) -> None:
        self.manager.clear_prefix_cache()
        stats = self.manager.stats()
        assert (stats.cached_blocks, stats.published_blocks) == (0, 0)

    @rule_of_a_sequence(lambda model: model.length >= BLOCK_SIZE and not model.first, room=SMALL)
    def share_prefix_blocks(self, data: st.DataObject, model: Model, room: int) -> None:
        num_blocks = data.draw(st.integers(1, model.length // BLOCK_SIZE))
        seq_id = next(self.next_id)
        with self.attempt():
            target = self.manager.allocate(seq_id, room, namespace=model.namespace)
            self.manager.share_prefix_blocks(model.handle, target, num_blocks)
            self.models[seq_id] = model.forked(target, num_blocks * BLOCK_SIZE)
            assert target.num_cached_tokens == target.num_tokens

    @precondition(lambda self: self.ids_where())
    @rule(data=st.data(), as_model=st.booleans(), admitted=st.none() | SMALL)
    def reserve(self, data: st.DataObject, as_model: bool, admitted: int | None) -> None:
        """Room for some sequences, which is written at once and stays open while other calls run."""
        growth = data.draw(st.dictionaries(st.sampled_from(self.ids_where()), SMALL, min_size=1))
        models = {seq_id: self.models[seq_id] for seq_id in growth}
        targets = {seq_id: model.length + growth[seq_id] for seq_id, model in models.items()}
        before = {seq_id: (model.handle.blocks, model.copy()) for seq_id, model in models.items()}
        reservation = None
        with self.attempt():
            reservation = self.manager.reserve(
                [KvSlotRequest(i, t, None if admitted is None else t + admitted) for i, t in targets.items()]
            )
        if reservation is None:
            return
        self.settle(*models.values())
        replaced = {}
        for seq_id, model in models.items():
            handle, blocks = model.handle, before[seq_id][0]
            replaced[seq_id] = {i for i, block in enumerate(blocks) if handle.blocks[i] != block}
            numbers, ids = self.draw_rows(data, model, model.length, growth[seq_id])
            if as_model:
                self.write_slots(self.manager.build_metadata([(handle, growth[seq_id])]), numbers)
            else:
                self.write_layers(handle, model.length, numbers)
                model.written = max(model.written, model.length, targets[seq_id])
            model.put(model.length, numbers, ids)
        self.open.append(Open(reservation, targets, before, replaced))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), end=st.sampled_from(["commit", "rollback", "raise", "leave"]))
    def end_reservation(self, data: st.DataObject, end: str) -> None:
        entry = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        models = {seq_id: self.models[seq_id] for seq_id in entry.targets}
        blocks_now = {seq_id: model.handle.blocks for seq_id, model in models.items()}
        match end:
            case "commit":
                entry.reservation.commit()
                for seq_id, model in models.items():
                    model.length = entry.targets[seq_id]
                    self.give_back(model)
            case "leave":
                with warnings.catch_warnings(action="ignore"), entry.reservation:
                    pass
            case "rollback":
                entry.reservation.rollback()
            case "raise":
                with pytest.raises(KeyError), entry.reservation:
                    raise KeyError
        assert not entry.reservation.is_open
        for seq_id, model in models.items() if end in ("rollback", "raise") else ():
            before, old = entry.before[seq_id]
            if entry.targets[seq_id] == old.length:  # grows by nothing: a write behind its end may copy blocks
                continue
            assert len(model.handle.blocks) == len(before)
            # A write behind the room of the reservation may have filled gaps.
            changed = [then for now, then in zip(model.handle.blocks, before, strict=True) if now != then]
            assert not changed or (self.num_tables > 1 and not any(changed))
            if blocks_now[seq_id] != before:
                self.roll_back(model, old, len(before), entry.replaced[seq_id])

    def roll_back(self, model: Model, old: Model, num_blocks: int, replaced: set[int]) -> None:
        """Blocks that copies replaced hold again what they held; the others hold what was written meanwhile."""
        model.written = old.written
        cells = model.cells[: num_blocks // self.num_tables * BLOCK_SIZE]
        for index in {index // self.num_tables for index in replaced}:
            span = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            cells[span] = old.cells[span]
        model.cells = cells
        model.ids = max((self.still_true(model, ids) for ids in (model.ids, old.ids)), key=len)

    def still_true(self, model: Model, ids: list[int]) -> list[int]:
        numbers = self.of_ids(model.namespace, ids, 0)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(numbers, model.cells, strict=False))
        return ids[: sum(1 for _ in same)]

    @rule_of_a_sequence(lambda model: model.first > 0)
    def read_behind_window(self, data: st.DataObject, model: Model) -> None:
        position = data.draw(st.integers(0, model.first * BLOCK_SIZE - 1))
        layer = next(layer for layer, table in self.layers if table.sliding_window)
        with pytest.raises(InvalidInputError, match="behind its sliding window"):
            self.manager.read_kv(model.handle, layer, position, 1)


class WindowMachine(CacheMachine):
    """Blocks behind a sliding window are given back; hashes are those for untrusted parties."""

    changes: ClassVar[dict[str, Any]] = {"sliding_window": 6, "prefix_hash": "sha256"}
    seen: ClassVar[Counter[str]] = Counter()

    def patch(self, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(groups, "ROLLBACK_SLACK", ROLLBACK_SLACK))


class GroupedMachine(WindowMachine):
    """Layers that see everything, of two shapes, one with a window, and one without K/V of its own."""

    changes: ClassVar[dict[str, Any]] = {
        "num_layers": 4,
        "groups": [CacheGroup((0,)), CacheGroup((1,), sliding_window=6), CacheGroup((3,), head_dim=4, v_head_dim=12)],
        "num_blocks": 29,
        "num_swap_blocks": 9,
    }
    seen: ClassVar[Counter[str]] = Counter()


class TieredMachine(CacheMachine):
    """What the device evicts goes to the host, beside swapped sequences, and comes back for prompts."""

    changes: ClassVar[dict[str, Any]] = {"num_swap_blocks": 4, "host_cache_bytes": 9 * 4 * 2 * 8 * 4}
    seen: ClassVar[Counter[str]] = Counter()


class TieredGroupsMachine(GroupedMachine):
    """The same with several tables and a window."""

    changes: ClassVar[dict[str, Any]] = GroupedMachine.changes | {"host_cache_bytes": 30 * 4 * 2 * 8 * 4}
    seen: ClassVar[Counter[str]] = Counter()


MACHINES = (CacheMachine, WindowMachine, GroupedMachine, TieredMachine, TieredGroupsMachine)
# The machine with a tier makes the calls of GroupedMachine too; tiers/test_random_calls.py those of TieredMachine.
QUICK_MACHINES = [machine for machine in MACHINES if machine not in (GroupedMachine, TieredMachine)]


NUM_SOAK_STEPS = 1_000_000 if "SOAK" in os.environ else 0


@pytest.mark.parametrize(
    ("machine", "max_examples"),
    [(machine, 8) for machine in QUICK_MACHINES]
    + [pytest.param(machine, 30, marks=pytest.mark.thorough) for machine in MACHINES],
)
def test_cache(machine: type[CacheMachine], max_examples: int) -> None:
    """Further rounds of examples until enough was done and all met that it is about: Hypothesis also draws from the
    constants of whatever modules are loaded, so that no round is the same everywhere.
    """
    machine.seen.clear()
    # Hits are rare where blocks soon leave the window; test_sliding_window.py provokes them.
    events = {"refused", "cow_copies", "swapped_in_blocks"}
    if machine is not WindowMachine:
        events |= {"prefix_hits", "evictions"}
    if "host_cache_bytes" in machine.changes:
        events |= {"host_stored_blocks"}  # loads are rare: 186 in 103,000 steps; tiers/test_host.py provokes them
    num_steps = max(25 * max_examples, NUM_SOAK_STEPS // len(MACHINES))
    # A round of an example has 50 calls at most. Hypothesis keeps the examples of a round in memory.
    for number in range(8 + NUM_SOAK_STEPS // max_examples):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=50,
                deadline=None,
                derandomize=number == 0,
                database=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
        if machine.seen["steps"] > num_steps and events <= (+machine.seen).keys():
            break
    assert machine.seen["steps"] > num_steps
    assert events <= (+machine.seen).keys(), machine.seen
    assert not machine.seen["unknown"]
