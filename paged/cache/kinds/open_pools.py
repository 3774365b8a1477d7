"""Rows of open pools: one slot for each sequence, with the rows of its newest positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache.kinds.kind import Match
from paged.cache.kinds.slots import SlotKind
from paged.errors import InvalidInputError, OutOfStateSlotsError, PagedError, UnsupportedError

if TYPE_CHECKING:
    from paged.cache.slot_reservation import SequenceState
    from paged.step.step import Step


class OpenSlot(NamedTuple):
    """Record of a sequence. Its length lies between `first` and `end`, if it has a slot.

    Attributes:
        slot, host_slot: device and host slot with its rows; 0 for none.
        first, end: the slot has the rows that a step needs behind each length from `first` to `end`.
        fresh: slot that an open step writes in place of `slot`; 0 if it writes to `slot`.
        target: length after the open step; 0 without one.
    """

    slot: int = 0
    host_slot: int = 0
    first: int = 0
    end: int = 0
    fresh: int = 0
    target: int = 0

    def reaches(self, num_tokens: int) -> bool:
        """Return whether the slot has the rows behind this length."""
        return (self.slot > 0 or self.host_slot > 0) and self.first <= num_tokens <= self.end


class OpenPools(SlotKind):
    """Rows of the newest positions of all sequences. Row p % num_rows of a slot belongs to position p.

    A slot has `rollback` rows more than a pool needs. So a step of up to `rollback` tokens is appended in place, and a
    failed one leaves the rows that the sequence needs. A longer step, or one of a sequence whose slot another sequence
    shares, writes a fresh slot, to which the forward copies the rows that it keeps. Pools begin anew with each block,
    so a sequence whose length is a multiple of the block size needs no rows, and no slot is kept for hits.
    """

    empty = OpenSlot()

    def __init__(self, group: Any, columns: range, parts: Any) -> None:
        super().__init__(group, columns, parts)
        self._rollback_rows: int = group.rollback

    def get(self, state: SequenceState) -> OpenSlot:
        """Return the record of a sequence."""
        record: OpenSlot = state.parts.get(self, self.empty)
        return record

    # Steps.

    def require(self, states: Sequence[SequenceState], targets: Sequence[int]) -> list[bool | None]:
        """Return for each sequence whether its step needs a fresh slot; None for no step."""
        plan: list[bool | None] = []
        num_returned = 0
        for state, target in zip(states, targets, strict=True):
            record, start = self.get(state), state.num_tokens
            num_returned += record.fresh > 0
            if target <= start:
                plan.append(None)
                continue
            if not self._holds(record, start):
                raise InvalidInputError(
                    f"{state.seq_id!r}: rows after {start} tokens are unknown; free it and begin anew"
                )
            is_appended = bool(record.slot) and target - start <= self._rollback_rows and not self.is_fixed(record.slot)
            plan.append(not is_appended)
        num_needed = plan.count(True)
        if num_needed > self.slots.num_free + num_returned:
            raise OutOfStateSlotsError(num_needed, self.slots.num_free + num_returned)
        return plan

    def _holds(self, record: OpenSlot, num_tokens: int) -> bool:
        """Return whether a sequence can go on behind `num_tokens`."""
        return num_tokens % self._block_size == 0 or record.reaches(num_tokens)

    def reserve(self, states: Sequence[SequenceState], targets: Sequence[int], plan: Sequence[bool | None]) -> None:
        """Note the step of every sequence, with a fresh slot where it needs one."""
        fresh = self.slots.allocate(plan.count(True))
        for state, target, needs_slot in zip(states, targets, plan, strict=True):
            if needs_slot is None:
                continue
            record = self.get(state)
            if not record.slot:  # the sequence begins with a block
                record = record._replace(first=state.num_tokens, end=state.num_tokens)
            slot = fresh.pop() if needs_slot else 0
            self.put(state, record._replace(fresh=slot, target=target))

    def check_step(self, states: Sequence[SequenceState], targets: Sequence[int]) -> None:
        """Raise InvalidInputError unless every sequence has an open reservation up to its target."""
        for state, target in zip(states, targets, strict=True):
            if target > state.num_tokens and self.get(state).target != target:
                raise InvalidInputError(f"items: {state.seq_id!r} has no open reservation of {target} tokens")

    def fill(self, step: Step, states: Sequence[SequenceState]) -> None:
        """Fill in the columns of `RecurrentBatch`: starts, slots to read and to write; the others are empty."""
        rows: list[tuple[int, ...]] = []
        for state, target in zip(states, step.seq_lens.tolist(), strict=True):
            record, start = self.get(state), state.num_tokens
            if target == start:
                rows.append((target, 0, 0, 0, -1, 0))  # no new token
                continue
            rows.append((start, record.slot or -1, record.fresh or record.slot, 0, -1, 0))
        step.states = tuple(np.array(rows, np.int32).reshape(-1, 6).T.copy())

    def commit(self, states: Sequence[SequenceState]) -> None:
        """Give every sequence the slot that its step has written."""
        for state in states:
            record = self.get(state)
            if record.target:
                end = state.num_tokens
                first = max(record.first, end - self._rollback_rows)
                self.put(state, OpenSlot(record.fresh or record.slot, 0, first, end))
                if record.fresh:
                    self.slots.release([record.slot])

    def cancel(self, states: Sequence[SequenceState]) -> None:
        """Release the slots that open steps would have written.

        A step that was appended in place may have replaced the oldest rows.
        """
        for state in states:
            record = self.get(state)
            if not record.target:
                continue
            first = record.first
            if not record.fresh:
                first = max(first, record.target - self._rollback_rows)
            self.put(state, record._replace(first=first, fresh=0, target=0))
            self.slots.release([record.fresh])

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Raise UnsupportedError."""
        raise UnsupportedError(f"{call}: rows of open pools are written by a forward; use reserve")

    # Prefix hits.

    def usable(self, match: Match) -> NDArray[np.bool_] | None:
        """A hit may end at a block, whose pools need no earlier row."""
        is_usable: NDArray[np.bool_] = np.array(match.lengths(self._block_size)) % self._block_size == 0
        return is_usable

    def fetch(self, match: Match, count: int) -> bool:
        """Load nothing: hits need no slot."""
        return True

    # Other calls of the cache.

    def fork(self, source: SequenceState, target: SequenceState) -> None:
        """Share the slot with a new sequence; the sequence that runs first writes a fresh one."""
        record = self.get(source)
        if record.slot and record.reaches(target.num_tokens):
            self.slots.share([record.slot])
            self.put(target, OpenSlot(record.slot, 0, record.first, target.num_tokens))

    def check_truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError unless the sequence can go on behind `num_tokens`."""
        record = self.get(state)
        if not self._holds(record, num_tokens):
            raise InvalidInputError(
                f"num_tokens: {num_tokens} lies within a pool whose rows are gone, expected {record.first} to "
                f"{record.end} or a multiple of {self._block_size}"
            )

    def truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Forget the rows behind `num_tokens`; drop the slot if it lacks the rows before."""
        record = self.get(state)
        if record.reaches(num_tokens):
            self.put(state, record._replace(end=num_tokens))
        elif num_tokens != state.num_tokens:
            self.release(state)

    def release(self, state: SequenceState) -> None:
        """Release the slots of a sequence."""
        record = self.get(state)
        self.put(state, self.empty)
        self.slots.release([record.slot, record.fresh])
        self.shelf.pool.release([record.host_slot])

    def check_swap_out(self, state: SequenceState) -> None:
        """Raise OutOfStateSlotsError unless a host slot is free, if the sequence needs one."""
        slot = self.get(state).slot
        if slot and not self.is_fixed(slot) and self.shelf.num_free < 1:
            raise OutOfStateSlotsError(1, self.shelf.num_free)

    def swap_out(self, state: SequenceState) -> None:
        """Move a sequence's slot to the host unless others hold it too."""
        record = self.get(state)
        if record.slot and not self.is_fixed(record.slot):
            (host,) = self.shelf.swap_out([record.slot])
            self.put(state, record._replace(slot=0, host_slot=host))
            self.slots.release([record.slot])

    def check_swap_in(self, state: SequenceState) -> None:
        """Raise OutOfStateSlotsError unless a slot is free, if the rows are on the host."""
        if self.get(state).host_slot and self.slots.num_free < 1:
            raise OutOfStateSlotsError(1, self.slots.num_free)

    def swap_in(self, state: SequenceState) -> None:
        """Move a sequence's rows back to the device."""
        record = self.get(state)
        if record.host_slot:
            (slot,) = self.take_written(1)
            self.put(state, record._replace(slot=slot, host_slot=0))
            self.shelf.swap_in([record.host_slot], [slot])

    # Counts.

    def check(self, states: Sequence[SequenceState]) -> None:
        """Recount every reference and compare lengths; raise PagedError for the first error."""
        super().check(states)
        for state in states:
            record = self.get(state)
            if not self._holds(record, state.num_tokens):
                raise PagedError(f"{state.seq_id!r} has {state.num_tokens} tokens, its rows are those behind {record}")

    def held(self, states: Iterable[SequenceState]) -> tuple[Counter[int], Counter[int]]:
        """Count the references of sequences and open steps to device slots and to host slots."""
        on_device, on_host = Counter[int](), Counter[int]()
        for state in states:
            record = self.get(state)
            on_device.update([record.slot, record.fresh])
            on_host[record.host_slot] += 1
        del on_device[0], on_host[0]
        return on_device, on_host
