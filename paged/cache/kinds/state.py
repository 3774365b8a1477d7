"""States of recurrent layers: slots that steps read and write, snapshots for the prefix cache, swap.

`state_positions` decides where snapshots are kept and where chunks end.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache.kinds.slots import KeptSlot, SlotKind
from paged.cache.kinds.state_positions import SCAN_CHUNK, SlotPositions, chunk_end, snapshot_positions
from paged.errors import InvalidInputError, OutOfStateSlotsError, PagedError, UnsupportedError

if TYPE_CHECKING:
    from paged.cache.kinds.kind import CacheParts, Match
    from paged.cache.slot_reservation import SequenceState
    from paged.step.step import Step


class StateStep(NamedTuple):
    """Step of a sequence with recurrent layers, from its reservation to its commit.

    Attributes:
        start, num_tokens: position of the step's first token, and number of its tokens.
        read: slot with the state at `start`; -1 if the sequence has none yet.
        write: slot for the state after the step; equal to `read` if the tokens are appended to its ring.
        cursor: number of ring tokens in `read` before `start`.
        snapshot, snapshot_len: slot for a snapshot and its position in the sequence; -1 for none.
    """

    start: int
    num_tokens: int
    read: int
    write: int
    cursor: int
    snapshot: int
    snapshot_len: int

    @property
    def own_slots(self) -> list[int]:
        """Slots that the step holds besides the sequence's own: the written slot and the snapshot's."""
        slots = [] if self.read == self.write else [self.write]
        if self.snapshot > 0:
            slots.append(self.snapshot)
        return slots


class Marks(NamedTuple):
    """Positions of a sequence that decide where its snapshots are kept.

    Attributes:
        prompt_len: number of tokens of the prompt; 0 if unknown.
        junction: position where the prompt leaves published blocks without a snapshot; 0 for none.
        passed: last block boundary at which a snapshot was or could have been taken.
        rolling: block boundary behind the prompt whose snapshot is dropped when the next one is kept; 0 for none.
    """

    prompt_len: int = 0
    junction: int = 0
    passed: int = 0
    rolling: int = 0


class SequenceSlots(NamedTuple):
    """What a sequence has of its states.

    Attributes:
        slot, host_slot: device and host slot with the state after `num_tokens`; 0 for none. `host_slot` is set while
            swapped out, unless `slot` has other holders and stays on the device.
    """

    slot: int = 0
    host_slot: int = 0
    marks: Marks = Marks()


PlannedStep = tuple["SequenceState", int, int, int, bool]
"""Step to reserve: sequence, target length, slot of the sequence, number of ring tokens before the step, whether the
step writes to a different slot than it reads."""


class States(SlotKind):
    """States of all sequences in slots, and snapshots of them, which are the kept slots.

    A step reads one slot and writes one. A slot that one sequence alone holds takes further tokens in its ring. Slots
    of several sequences and slots with a snapshot are never written, so snapshots and forks need no copy. No held
    state changes before `commit`.

    steps: steps in open reservations. positions, host_positions: what slots hold on the device and on the host.
    """

    empty = SequenceSlots()
    needs_all = False
    header = struct.Struct("<QQQ")  # position of the snapshot, first and last position that the slot holds

    def __init__(self, group: None, columns: range, parts: CacheParts) -> None:
        super().__init__(group, columns, parts)
        spec, rollback = parts.config.recurrent, parts.guard.rollback
        assert spec is not None
        interval = spec.snapshot_interval
        if interval is not None and interval % self._block_size:
            expected = f"a multiple of block_size {self._block_size}"
            raise InvalidInputError(f"snapshot_interval: {interval}, expected {expected}")
        self.spec = spec
        self.steps: dict[SequenceState, StateStep] = {}
        self._taken: list[tuple[SequenceState, KeptSlot]] = []  # snapshots within chunks, from `commit` to `keep`
        self.positions = SlotPositions(spec.num_slots, rollback)
        self.host_positions = SlotPositions(self.shelf.pool.num_blocks, rollback)
        # Fill freed slots with NaN, to expose reads of a freed state.
        self._poisons = os.environ.get("PAGED_CHECK") == "1"

    def get(self, state: SequenceState) -> SequenceSlots:
        """Return the record of a sequence."""
        record: SequenceSlots = state.parts.get(self, self.empty)
        return record

    # Steps.

    def require(self, states: Sequence[SequenceState], targets: Sequence[int]) -> list[PlannedStep]:
        """Raise an error unless every sequence has its state and there is a slot for each step that needs one."""
        max_append, ring = self.spec.max_append, self.spec.ring
        shared, published = self.slots.shared, self._blocks_of
        plan: list[PlannedStep] = []
        num_needed = 0
        for state, target, record in zip(states, targets, self.get_all(states), strict=True):
            slot, start = record.slot, state.num_tokens
            if target <= start:
                continue
            cursor, needs_slot = 0, True
            if slot:
                cursor = self.positions.cursor(slot, start)
                is_too_long = target - start > max_append or cursor + target - start > ring
                needs_slot = is_too_long or slot in shared or slot in published
            elif start:
                raise InvalidInputError(
                    f"{state.seq_id!r}: its state after {start} tokens is unknown; free it and begin anew"
                )
            num_needed += needs_slot
            plan.append((state, target, slot, cursor, needs_slot))
        num_returned = 0
        for step in self._open_steps(states).values():
            num_returned += len(step.own_slots)
        self._require(num_needed, num_returned)
        return plan

    def _require(self, count: int, num_returned: int = 0) -> None:
        """Raise OutOfStateSlotsError unless `count` slots can be handed out after `num_returned` were released."""
        num_free = self.slots.num_free + num_returned
        if count > num_free:
            raise OutOfStateSlotsError(count, num_free)

    def reserve(self, states: Sequence[SequenceState], targets: Sequence[int], plan: Sequence[PlannedStep]) -> None:
        """Make the step of every sequence up to its target."""
        pool, max_append = self.slots, self.spec.max_append
        if self._poisons:
            self.memory.poison(pool.free)
        taken = pool.allocate(len([True for *_, needs_slot in plan if needs_slot]))
        steps: dict[SequenceState, StateStep] = {}
        for state, target, slot, cursor, needs_slot in plan:
            start = state.num_tokens
            count = target - start
            write = taken.pop() if needs_slot else slot
            snapshot, position = -1, 0
            if count > max_append and pool.num_free:  # a snapshot is optional
                position = self._kept_inside(state, target)
            if position:
                snapshot = pool.allocate(1)[0]
            steps[state] = StateStep(start, count, slot or -1, write, cursor, snapshot, position)
        self._rollback.keep_absence(self.steps, steps)
        self.steps.update(steps)

    def check_step(self, states: Sequence[SequenceState], targets: Sequence[int]) -> None:
        """Raise InvalidInputError unless every sequence has an open reservation up to its target."""
        for state, target in zip(states, targets, strict=True):
            step, count = self.steps.get(state), target - state.num_tokens
            if count and (step is None or (step.start, step.num_tokens) != (state.num_tokens, count)):
                raise InvalidInputError(
                    f"items: {state.seq_id!r} has no open reservation of {count} tokens, which its recurrent layers "
                    "need"
                )

    def fill(self, step: Step, states: Sequence[SequenceState]) -> None:
        """Fill in the columns of `RecurrentBatch`, from `starts` to `snapshot_lens`."""
        rows = []
        for state, target, record in zip(states, step.seq_lens.tolist(), self.get_all(states), strict=True):
            if target == state.num_tokens:
                rows.append((target, 0, 0, 0, -1, 0))  # no new token, so the step does not touch its state
                continue
            if record.slot:
                self.positions.cursor(record.slot, state.num_tokens)
            state_step = self.steps[state]
            rows.append((state_step.start, *state_step[2:]))
        step.states = tuple(np.array(rows, np.int32).reshape(-1, 6).T.copy())
        step.max_append = self.spec.max_append

    def commit(self, states: Sequence[SequenceState]) -> None:
        """Give every sequence the slot that its step has written; its length is the target now."""
        positions, max_append = self.positions, self.spec.max_append
        for state, step in self._end_steps(states).items():
            base, end = step.start, step.start + step.num_tokens
            is_in_place = step.read == step.write
            if step.num_tokens > max_append:  # a scan keeps only the state at its end
                base = end
            elif is_in_place:
                base = positions.starts[step.write]
            positions.place(step.write, base, end)
            if step.snapshot > 0:
                positions.place(step.snapshot, step.snapshot_len, step.snapshot_len)
                self._taken.append((state, KeptSlot(step.snapshot, step.snapshot_len)))
            if not is_in_place:
                record = self.get(state)
                self.put(state, SequenceSlots(step.write, record.host_slot, record.marks))
                self.slots.release([record.slot])

    def cancel(self, states: Sequence[SequenceState]) -> None:
        """Release the slots that open steps would have written. Sequences keep their own slots."""
        for step in self._end_steps(states).values():
            self.slots.release(step.own_slots)

    def _open_steps(self, states: Sequence[SequenceState]) -> dict[SequenceState, StateStep]:
        if not self.steps:
            return {}
        return {state: self.steps[state] for state in states if state in self.steps}

    def _end_steps(self, states: Sequence[SequenceState]) -> dict[SequenceState, StateStep]:
        """Remove and return the open steps of these sequences."""
        ended = self._open_steps(states)
        self._rollback.append((self.steps.update, ended))
        for state in ended:
            del self.steps[state]
        return ended

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Raise UnsupportedError."""
        raise UnsupportedError(f"{call}: recurrent layers have a state that only a forward advances; use reserve")

    def _kept_inside(self, state: SequenceState, target: int) -> int:
        """Return the position within a chunk at which to take a snapshot, or 0."""
        last = 0
        for position in self._positions(state, state.num_tokens, target):
            if position < target and position % SCAN_CHUNK == 0:
                last = position
        return last

    # Snapshots for the prefix cache.

    def _positions(self, state: SequenceState, start: int, end: int) -> list[int]:
        """Return `snapshot_positions` of the sequence in (start, end]."""
        if not self._config.enable_prefix_cache:
            return []
        marks = self.get(state).marks
        return snapshot_positions(
            start,
            end,
            block_size=self._block_size,
            prompt_len=marks.prompt_len,
            junction=marks.junction,
            interval=self.spec.snapshot_interval,
        )

    def chunk_end(self, state: SequenceState, limit: int, total: int, *, may_leave_grid: bool) -> int:
        """Return where the sequence's next prompt chunk ends, see the function `chunk_end`."""
        start, max_append = state.num_tokens, self.spec.max_append
        kept = self._positions(state, start, limit)
        return chunk_end(start, limit, total, kept, max_append=max_append, may_leave_grid=may_leave_grid)

    def usable(self, match: Match) -> NDArray[np.bool_] | None:
        """A hit may end behind a block with a snapshot, but not within the block."""
        is_usable = super().usable(match)
        assert is_usable is not None
        is_usable[match.longest // self._block_size + 1 :] = False
        return is_usable

    def begin(self, state: SequenceState, matched: Sequence[int], prompt_len: int) -> None:
        """Give a new sequence the snapshot at its length, and note where its prompt leaves the published blocks."""
        length, size = state.num_tokens, self._block_size
        slot = 0
        if length:
            slot, position = self.kept[matched[length // size - 1]]
            self.positions.cursor(slot, length)
            assert position == length
            self.slots.share([slot])
            self._counts.add("state_hits", 1)
        junction = min(len(matched), max(prompt_len - 1, 0) // size) * size
        if junction <= length:
            junction = 0
        self.put(state, SequenceSlots(slot, marks=Marks(prompt_len, junction, length)))

    def check_share(self, giver: SequenceState, num_tokens: int) -> None:
        """Raise UnsupportedError."""
        raise UnsupportedError("share_prefix_blocks: recurrent layers also need a state; fork, or let prefixes match")

    def keep(self, states: Sequence[SequenceState]) -> None:
        """Keep snapshots of the last chunks and of states at block boundaries, behind published blocks."""
        size, positions = self._block_size, self.positions
        taken, self._taken = self._taken, []
        for state, snapshot in taken:
            self.keep_slot(state, snapshot)
            self.slots.release([snapshot.slot])
        for state, record in zip(states, self.get_all(states), strict=True):
            slot, marks = record.slot, record.marks
            position = min(state.num_tokens, positions.ends[slot]) // size * size
            if not slot or position <= marks.passed or position < positions.starts[slot]:
                continue
            if self._index.block_of(state.chain, position // size) is None:  # not published yet
                continue
            rolling = marks.rolling
            is_kept = self._positions(state, position - 1, position)
            if is_kept and self.keep_slot(state, KeptSlot(slot, position)):
                before = self._index.block_of(state.chain, rolling // size)
                if before is not None and not self._is_held(before):
                    self.withdrawn([before])
                interval = self.spec.snapshot_interval
                is_rolling = position >= marks.prompt_len and (interval is None or position % interval != 0)
                rolling = position if is_rolling else 0
            marks = Marks(marks.prompt_len, marks.junction, position, rolling)
            self.put(state, SequenceSlots(slot, record.host_slot, marks))

    def _is_held(self, block: int) -> bool:
        """Return whether a sequence or a pin holds the slot that is kept behind a block."""
        return block in self.kept and self.kept[block].slot not in self.slots.cached

    def numbers_of(self, kept: KeptSlot) -> tuple[int, ...]:
        """Return the numbers of `header`."""
        return kept.position, self.positions.starts[kept.slot], self.positions.ends[kept.slot]

    def loaded(self, slot: int, numbers: tuple[int, ...]) -> None:
        """Note the positions of a state loaded from the tier."""
        _, start, end = numbers
        self.positions.place(slot, start, end)
        self._counts.add("host_loaded_states", 1)

    def _evict(self, slots: list[int]) -> None:
        for slot in slots:
            self._counts.add("state_evictions", len(self._blocks_of[slot]))
        super()._evict(slots)

    # Other calls of the cache.

    def fork(self, source: SequenceState, target: SequenceState) -> None:
        """Share the slot with a new sequence; the sequence that runs first writes to another slot."""
        record = self.get(source)
        if record.slot:
            self.positions.cursor(record.slot, source.num_tokens)
            self.slots.share([record.slot])
        marks = Marks(record.marks.prompt_len, passed=record.marks.passed)
        self.put(target, SequenceSlots(record.slot, marks=marks))

    def release(self, state: SequenceState) -> None:
        """Release the slots of a sequence."""
        record = self.get(state)
        self.put(state, self.empty)
        self.slots.release([record.slot])
        self.shelf.pool.release([record.host_slot])

    def check_truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError unless the slot or a snapshot holds the state after `num_tokens`."""
        slot = self.get(state).slot
        start = self.positions.starts[slot]
        if slot and 0 < num_tokens < start and self._snapshot_at(state, num_tokens) is None:
            raise InvalidInputError(
                f"num_tokens: {num_tokens}, but the state of {state.seq_id!r} is kept at positions "
                f"{start} to {state.num_tokens} and at snapshots only"
            )

    def truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Roll a sequence's state back to `num_tokens`, before its chain is cut."""
        record, positions = self.get(state), self.positions
        slot = record.slot
        if not slot or num_tokens == state.num_tokens:
            return
        if num_tokens == 0:
            slot = 0
        elif num_tokens < positions.starts[slot]:
            snapshot = self._snapshot_at(state, num_tokens)
            assert snapshot is not None
            positions.cursor(*snapshot)
            self.slots.share([snapshot.slot])
            slot = snapshot.slot
        elif not self.is_fixed(slot):  # later steps may overwrite the ring tokens behind `num_tokens`
            positions.place(slot, positions.starts[slot], num_tokens)
        marks = record.marks._replace(passed=min(record.marks.passed, num_tokens))
        if marks.rolling > num_tokens:
            marks = marks._replace(rolling=0)
        self.put(state, record._replace(slot=slot, marks=marks))
        if slot != record.slot:
            self.slots.release([record.slot])

    def _snapshot_at(self, state: SequenceState, num_tokens: int) -> KeptSlot | None:
        count, num_behind = divmod(num_tokens, self._block_size)
        block = self._index.block_of(state.chain, count)
        if num_behind or block is None:
            return None
        return self.kept.get(block)

    def check_swap_out(self, state: SequenceState) -> None:
        """Raise OutOfStateSlotsError unless a host slot is free, if the sequence needs one."""
        slot = self.get(state).slot
        if slot and not self.is_fixed(slot):
            self.positions.cursor(slot, state.num_tokens)
            if self.shelf.num_free < 1:
                raise OutOfStateSlotsError(1, self.shelf.num_free)

    def swap_out(self, state: SequenceState) -> None:
        """Move a sequence's slot to the host unless others hold it too."""
        record = self.get(state)
        slot = record.slot
        if slot and not self.is_fixed(slot):
            (host,) = self.shelf.swap_out([slot])
            self.host_positions.place(host, self.positions.starts[slot], self.positions.ends[slot])
            self.put(state, record._replace(slot=0, host_slot=host))
            self.slots.release([slot])

    def check_swap_in(self, state: SequenceState) -> None:
        """Raise OutOfStateSlotsError unless a slot is free, if the state is on the host."""
        host = self.get(state).host_slot
        if host:
            self.host_positions.cursor(host, state.num_tokens)
            self._require(1)

    def swap_in(self, state: SequenceState) -> None:
        """Move a sequence's state back to the device."""
        record = self.get(state)
        host = record.host_slot
        if host:
            (slot,) = self.take_written(1)
            self.positions.place(slot, self.host_positions.starts[host], self.host_positions.ends[host])
            self.put(state, record._replace(slot=slot, host_slot=0))
            self.shelf.swap_in([host], [slot])

    # Counts.

    def stats(self) -> dict[str, int]:
        """Return the counts of slots and snapshots."""
        return {
            "num_state_slots": self.spec.num_slots,
            "free_state_slots": self.slots.num_free,
            "state_snapshots": len(self.kept),
            "bytes_per_state": self.memory.bytes_per_slot,
            "host_states": len(self.shelf.entries),
        }

    def recount(self, states: Sequence[SequenceState]) -> None:
        """Derive the reference counts from the restored sequences and snapshots, after a rollback."""
        self._taken = []
        super().recount(states)

    def check(self, states: Sequence[SequenceState]) -> None:
        """Recount every reference and compare positions; raise PagedError for the first error."""
        super().check(states)
        for state in states:
            record = self.get(state)
            if record.slot:
                self.positions.cursor(record.slot, state.num_tokens)
            elif record.host_slot:
                self.host_positions.cursor(record.host_slot, state.num_tokens)
        for snapshot in self.kept.values():
            self.positions.cursor(*snapshot)
        for state in self.steps:
            if state.reservation is None:
                raise PagedError(f"{state.seq_id!r} has an open step without a reservation")

    def held(self, states: Iterable[SequenceState]) -> tuple[Counter[int], Counter[int]]:
        """Count the references of sequences and open steps to device slots and to host slots."""
        on_device, on_host = Counter[int](), Counter[int]()
        for state in states:
            record = self.get(state)
            on_device[record.slot] += 1
            on_host[record.host_slot] += 1
        for step in self.steps.values():
            on_device.update(step.own_slots)
        del on_device[0], on_host[0]
        return on_device, on_host
