"""States of sequences with recurrent layers: what a step reads and writes, snapshots for the prefix cache, swap."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache.guard import CacheGuard, Rollback
from paged.cache.pool import BlockPool
from paged.cache.prefix_index import PrefixIndex
from paged.cache.slot_reservation import StateStep
from paged.cache.tiers.states import HostState, StateTier
from paged.errors import InvalidInputError, OutOfStateSlotsError, PagedError

if TYPE_CHECKING:
    from paged.cache.kv_cache import PagedKvCacheConfig
    from paged.cache.slot_reservation import SequenceState
    from paged.cache.tensors import StateTensors
    from paged.cache.token_chain import Hash

# Chunks of the scan start at multiples of this position, whatever a step's tokens are.
SCAN_CHUNK = 64


def snapshot_positions(
    start: int, end: int, *, block_size: int, prompt_len: int, junction: int, interval: int | None
) -> list[int]:
    """Return the positions in (start, end] at which a sequence keeps its state, ascending; all are block boundaries.

    In a prompt: where earlier prompts part from it (`junction`, 0 for none), its last boundary that leaves a token to
    compute, and every `interval`. Behind these, the last boundary that is passed.
    """
    last = max(prompt_len - 1, 0) // block_size * block_size
    positions = {junction, last}
    if interval is not None:
        positions.update(range(interval, end + 1, interval))
    passed = end // block_size * block_size
    if passed > last:
        positions.add(passed)
    return sorted(position for position in positions if start < position <= end)


def chunk_end(start: int, limit: int, total: int, kept: list[int], *, max_append: int, may_leave_grid: bool) -> int:
    """Return where a prompt chunk from `start` ends, at most `limit`; `start` if it had better wait for the next step.

    Chunks end at multiples of SCAN_CHUNK, so that a prompt's numbers do not depend on the requests beside it. A last
    piece that is short enough to be appended is always a chunk of its own, for the same reason.

    Args:
        total: tokens of the prompt.
        kept: `snapshot_positions` of (start, limit]. One inside a chunk has to be a multiple of SCAN_CHUNK; a chunk
            ends at others, and at a second one.
        may_leave_grid: whether a chunk may end elsewhere if it does not reach a multiple.
    """
    inside = [position for position in kept if position < limit]
    for index, position in enumerate(inside):
        if index or position % SCAN_CHUNK:
            return position
    aligned = limit // SCAN_CHUNK * SCAN_CHUNK
    is_cut = limit < total or 0 < total - aligned <= max_append
    if not is_cut or aligned == limit:
        return limit
    if aligned > start:
        return aligned
    if limit == total or may_leave_grid:
        return limit
    return start


class StateSlots(BlockPool):
    """Slots 1..num_slots with reference counts; padding rows point at slot 0.

    A slot holds the state at every position from `starts[slot]`, its base, to `ends[slot]`, its newest ring token.
    """

    def __init__(self, num_slots: int, rollback: Rollback) -> None:
        super().__init__(num_slots, rollback=rollback)
        self.starts = [0] * (num_slots + 1)
        self.ends = [-1] * (num_slots + 1)

    def take(self) -> int:
        """Return a free slot with one reference; the caller has made sure that there is one."""
        return self.allocate(1)[0]

    def place(self, slot: int, start: int, end: int) -> None:
        """Record that a slot holds the state at the positions from `start` to `end`."""
        self._rollback.append((self._place, slot, self.starts[slot], self.ends[slot]))
        self._place(slot, start, end)

    def cursor(self, slot: int, position: int) -> int:
        """Return the ring tokens before `position` in a slot.

        Raises:
            PagedError: the slot does not hold the state at that position.
        """
        if not self.starts[slot] <= position <= self.ends[slot]:
            raise PagedError(
                f"state slot {slot} holds positions {self.starts[slot]}..{self.ends[slot]}, expected {position}"
            )
        return position - self.starts[slot]

    def _place(self, slot: int, start: int, end: int) -> None:
        self.starts[slot], self.ends[slot] = start, end


class Snapshot(NamedTuple):
    """A kept state: the slot that holds it, and its position."""

    slot: int
    position: int


class RecurrentStates:
    """States of all sequences and snapshots. The caller holds the cache's lock; errors are rolled back.

    A step reads one slot and writes one. A slot that only its sequence holds takes further tokens in its ring; a shared
    one is never written, so snapshots and forks cost no copy. Nothing that is held changes before `commit`.

    snapshots: by the published block before their position, least recently used first; gone with its publication.
    tier: where snapshots go whose slot or block is given to others, if there is one.
    """

    def __init__(
        self, config: PagedKvCacheConfig, tensors: StateTensors, guard: CacheGuard, index: PrefixIndex
    ) -> None:
        spec, block_size = config.recurrent, config.block_size
        assert spec is not None
        interval = spec.snapshot_interval
        if interval is not None and interval % block_size:
            raise InvalidInputError(f"snapshot_interval: {interval}, expected a multiple of block_size {block_size}")
        self.spec = spec
        self.tensors = tensors
        self.slots = StateSlots(spec.num_slots, guard.rollback)
        self.host_slots = StateSlots(spec.num_swap_slots, guard.rollback)
        self.snapshots: OrderedDict[int, Snapshot] = OrderedDict()
        self._block_size = block_size
        self._index, self._is_caching = index, config.enable_prefix_cache
        self._rollback, self._counts = guard.rollback, guard.counts
        self.tier: StateTier | None = None
        if config.has_tier:
            self.tier = StateTier(tensors, spec.num_swap_slots, len(config.tables), guard)
        self._poisons = os.environ.get("PAGED_CHECK") == "1"  # then a read of a freed state shows
        index.on_forget = self._forget

    @property
    def num_free(self) -> int:
        """Number of slots that can be handed out, those of snapshots alone included."""
        return self.slots.num_free + len(self._evictable())

    # What steps read and write.

    def reserve(self, states: Sequence[SequenceState], targets: Sequence[int]) -> None:
        """Plan the step of every sequence up to its target: for all of them or for none."""
        if self._poisons:
            self.tensors.poison(self.slots.free)
        grown: list[tuple[SequenceState, int]] = []
        cursors: list[int] = []
        needs_slot: list[bool] = []
        for state, target in zip(states, targets, strict=True):
            if target > state.num_tokens:
                grown.append((state, target))
                cursors.append(self._cursor(state))
                needs_slot.append(self._needs_slot(state, target))
        self._require(sum(needs_slot))
        self._record([state for state, _ in grown])
        writes: list[int] = []
        for (state, _), is_needed in zip(grown, needs_slot, strict=True):
            writes.append(self._allocate() if is_needed else state.slot)
        for (state, target), write, cursor in zip(grown, writes, cursors, strict=True):
            position = self._kept_inside(state, target)
            snapshot = self._allocate() if position and self.num_free else 0  # never worth a refusal
            state.step = StateStep(
                start=state.num_tokens,
                num_tokens=target - state.num_tokens,
                read=state.slot or -1,
                write=write,
                cursor=cursor,
                snapshot=snapshot or -1,
                snapshot_len=position if snapshot else 0,
            )

    def arrays(self, states: Sequence[SequenceState], targets: Sequence[int]) -> tuple[NDArray[np.int32], ...]:
        """Return the planned steps as `RecurrentBatch` takes them, from `starts` to `snapshot_lens`.

        Raises:
            InvalidInputError: a sequence has no open reservation up to its target.
        """
        rows = []
        for state, target in zip(states, targets, strict=True):
            step = state.step
            if target == state.num_tokens:
                rows.append((target, 0, 0, 0, -1, 0))  # no token: the step does not touch its state
                continue
            if step is None or (step.start, step.start + step.num_tokens) != (state.num_tokens, target):
                raise InvalidInputError(
                    f"items: {state.request_id!r} has no open reservation of {target - state.num_tokens} tokens, which "
                    "its recurrent layers need"
                )
            if state.slot:
                self.slots.cursor(state.slot, state.num_tokens)
            rows.append((step.start, *step[2:]))
        return tuple(np.array(rows, np.int32).reshape(-1, 6).T.copy())

    def commit(self, states: Sequence[SequenceState]) -> list[tuple[SequenceState, Snapshot]]:
        """Give every sequence, whose length is its target now, the slot that its step has written.

        Returns:
            States within chunks that were asked for, whose references `keep` takes over.
        """
        self._record(states)
        inside = []
        for state in states:
            step = state.step
            if step is None:
                continue
            base, end = step.start, step.start + step.num_tokens
            if step.num_tokens > self.spec.max_append:  # scanned
                base = end
            elif step.is_in_place:
                base = self.slots.starts[state.slot]
            self.slots.place(step.write, base, end)
            if not step.is_in_place:
                self.slots.release([state.slot])
                state.slot = step.write
            if step.snapshot > 0:
                self.slots.place(step.snapshot, step.snapshot_len, step.snapshot_len)
                inside.append((state, Snapshot(step.snapshot, step.snapshot_len)))
            state.step = None
        return inside

    def drop_steps(self, states: Iterable[SequenceState]) -> None:
        """Give back the slots that planned steps would have written; what sequences hold is as before them."""
        states = list(states)
        self._record(states)
        for state in states:
            if state.step is not None:
                for slot in state.step.own_slots:
                    self.slots.release([slot])
                state.step = None

    def _record(self, states: Iterable[SequenceState]) -> None:
        """Let a rollback restore the slots and planned steps of these sequences."""
        self._rollback.append((_restore, [(state, state.slot, state.step) for state in states]))

    def _cursor(self, state: SequenceState) -> int:
        if state.slot:
            return self.slots.cursor(state.slot, state.num_tokens)
        if state.num_tokens:
            raise InvalidInputError(
                f"{state.request_id!r}: its state after {state.num_tokens} tokens is unknown; free it and begin anew"
            )
        return 0

    def _needs_slot(self, state: SequenceState, target: int) -> bool:
        """Return whether a step writes another slot than it reads."""
        count, slot = target - state.num_tokens, state.slot
        return (
            not slot
            or count > self.spec.max_append
            or slot in self.slots.shared
            or target - self.slots.starts[slot] > self.spec.ring
        )

    def _kept_inside(self, state: SequenceState, target: int) -> int:
        """Return the position within a chunk whose state is to be kept, or 0."""
        if target - state.num_tokens <= self.spec.max_append:
            return 0
        last = 0
        for position in self._positions(state, state.num_tokens, target):
            if position < target and position % SCAN_CHUNK == 0:
                last = position
        return last

    # Snapshots for the prefix cache.

    def _positions(self, state: SequenceState, start: int, end: int) -> list[int]:
        """Return the positions in (start, end] at which the sequence keeps its state, see `snapshot_positions`."""
        if not self._is_caching:
            return []
        return snapshot_positions(
            start,
            end,
            block_size=self._block_size,
            prompt_len=state.prompt_len,
            junction=state.junction,
            interval=self.spec.snapshot_interval,
        )

    def chunk_end(self, state: SequenceState, limit: int, total: int, *, may_leave_grid: bool) -> int:
        """Return where a prompt chunk that may end at `limit` ends, see the function `chunk_end`."""
        start, max_append = state.num_tokens, self.spec.max_append
        kept = self._positions(state, start, limit)
        return chunk_end(start, limit, total, kept, max_append=max_append, may_leave_grid=may_leave_grid)

    def usable(self, matched: Sequence[int], longest: int) -> list[int]:
        """Return the numbers of blocks, ascending, after which a prompt may begin: 0, and those with a snapshot."""
        limit = min(len(matched), longest // self._block_size)
        usable = [0]
        for count, block in enumerate(matched[:limit], 1):
            if block in self.snapshots:
                usable.append(count)
        return usable

    def begin(self, state: SequenceState, matched: Sequence[int], prompt_len: int) -> None:
        """Give a new sequence the snapshot at its length, and note where its prompt parts from published ones.

        matched: the published blocks that its prompt begins with, whether it uses them or not.
        """
        length, size = state.num_tokens, self._block_size
        state.prompt_len = prompt_len
        if length:
            block = matched[length // size - 1]
            slot, position = self.snapshots[block]
            self.slots.cursor(slot, length)
            assert position == length
            self.slots.share([slot])
            state.slot = slot
            self.snapshots.move_to_end(block)
            self._counts.add("state_hits", 1)
        state.passed = length
        junction = min(len(matched), max(prompt_len - 1, 0) // size) * size
        state.junction = junction if junction > length else 0

    def keep(self, inside: Sequence[tuple[SequenceState, Snapshot]], states: Iterable[SequenceState]) -> None:
        """Keep snapshots after blocks were published.

        inside: from `commit`. states: sequences whose own slot may hold a state to keep.
        """
        for state, snapshot in inside:
            if not self._keep(state, snapshot):
                self.slots.release([snapshot.slot])
        size, slots = self._block_size, self.slots
        for state in states:
            slot = state.slot
            position = min(state.num_tokens, slots.ends[slot]) // size * size
            if not slot or position <= state.passed or position < slots.starts[slot]:
                continue
            block = self._index.block_of(state.chain, position // size)
            if block is None:  # not published yet
                continue
            self._rollback.keep_fields(state, ("passed", "rolling"))
            state.passed = position
            is_kept = self._positions(state, position - 1, position)
            if not is_kept or not self._keep(state, Snapshot(slot, position)):
                continue
            slots.share([slot])
            if state.rolling:
                block = self._index.block_of(state.chain, state.rolling // size)
                if block is not None:
                    self._forget([block])
            interval = self.spec.snapshot_interval
            is_rolling = position >= state.prompt_len and (interval is None or position % interval != 0)
            state.rolling = position if is_rolling else 0

    def _keep(self, state: SequenceState, snapshot: Snapshot) -> bool:
        """Enter a snapshot whose reference it takes over; False if its block is not published or has one."""
        block = self._index.block_of(state.chain, snapshot.position // self._block_size)
        if block is None or block in self.snapshots:
            return False
        self.slots.cursor(*snapshot)
        self._rollback.append((self.snapshots.pop, block))
        self.snapshots[block] = snapshot
        return True

    def store(self, blocks: Iterable[int]) -> None:
        """Copy the snapshots of blocks that are about to be withdrawn to the tier."""
        if self.tier is None:
            return
        for block in blocks:
            snapshot, hash_ = self.snapshots.get(block), self._index.hash_of(block)
            if snapshot is not None and hash_ is not None:
                slot, position = snapshot
                ids = self._index.ids_of(block)
                self.tier.store(hash_, ids, slot, position, self.slots.starts[slot], self.slots.ends[slot])

    def load(self, hash_: Hash) -> tuple[int, HostState] | None:
        """Copy a state from the tier to a slot, which gets one reference, and return both.

        Later evictions of this call may replace the state in the tier.

        Returns:
            None if there is no slot, or the state is gone.
        """
        assert self.tier is not None
        if not self.num_free or hash_ not in self.tier.entries:
            return None
        slot = self._take()
        if hash_ not in self.tier.entries:  # the snapshot that was in the slot has replaced it
            self.slots.release([slot])
            return None
        return slot, self.tier.load(hash_, slot)

    def keep_loaded(self, slot: int, state: HostState, block: int) -> None:
        """Keep what `load` has returned as the snapshot behind a block; drop it if the block was not published."""
        if block not in self._index.published:
            self.slots.release([slot])
            return
        self.slots.place(slot, state.start, state.end)
        self._rollback.append((self.snapshots.pop, block))
        self.snapshots[block] = Snapshot(slot, state.position)

    def _take(self) -> int:
        """Return a slot to be written before the call ends; the caller has made sure that there is one."""
        blocks = [*self.snapshots]
        slot = self._allocate()
        lost = [block for block in blocks if block not in self.snapshots]
        self._rollback.keep_lost(self._forget, lost)  # what was overwritten stays evicted
        return slot

    def _forget(self, blocks: Iterable[int]) -> None:
        """Drop the snapshots of blocks that are no longer published."""
        for block in self.snapshots.keys() & set(blocks):
            snapshot = self.snapshots.pop(block)
            self._rollback.append((self.snapshots.__setitem__, block, snapshot))
            self.slots.release([snapshot.slot])

    def _evictable(self) -> list[int]:
        """Return blocks with a snapshot whose slot nothing else holds, least recently used first."""
        if not self.snapshots:
            return []
        kept = Counter(snapshot.slot for snapshot in self.snapshots.values())
        seen, evictable = set[int](), []
        for block, (slot, _) in self.snapshots.items():
            if self.slots.num_references(slot) == kept[slot] and slot not in seen:
                seen.add(slot)
                evictable.append(block)
        return evictable

    def _require(self, count: int) -> None:
        if count > self.slots.num_free and count > self.num_free:
            raise OutOfStateSlotsError(count, self.num_free)

    def _allocate(self) -> int:
        """Return a free slot, of the least recently used snapshot if there is no other; `_require` has been asked."""
        if not self.slots.num_free:
            slot = self.snapshots[self._evictable()[0]].slot
            blocks = [block for block, snapshot in self.snapshots.items() if snapshot.slot == slot]
            self._counts.add("state_evictions", len(blocks))
            self.store(blocks)
            self._forget(blocks)
        return self.slots.take()

    # Other calls of the cache.

    def fork(self, source: SequenceState, target: SequenceState) -> None:
        """Let a new sequence share the slot; whichever runs first writes another one."""
        if source.slot:
            self.slots.cursor(source.slot, source.num_tokens)
            self.slots.share([source.slot])
            target.slot = source.slot
        target.prompt_len, target.passed = source.prompt_len, source.passed

    def release(self, state: SequenceState) -> None:
        """Drop what a sequence that is being changed holds."""
        self.slots.release([state.slot])
        self.host_slots.release([state.host_slot])
        state.slot = state.host_slot = 0

    def truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Let a sequence that is being changed hold its state after `num_tokens`; its chain still holds all tokens."""
        slot, slots = state.slot, self.slots
        if not slot or num_tokens == state.num_tokens:
            return
        if num_tokens == 0:
            self.release(state)
        elif slots.starts[slot] <= num_tokens:
            if slot not in slots.shared:  # a later step may overwrite the tokens behind
                slots.place(slot, slots.starts[slot], num_tokens)
        else:
            count, num_behind = divmod(num_tokens, self._block_size)
            block = None
            if not num_behind:
                block = self._index.block_of(state.chain, count)
            if block is None or block not in self.snapshots:
                raise InvalidInputError(
                    f"num_tokens: {num_tokens}, but the state of {state.request_id!r} is kept at positions "
                    f"{slots.starts[slot]} to {state.num_tokens} and at snapshots only"
                )
            kept = self.snapshots[block]
            slots.cursor(kept.slot, num_tokens)
            slots.share([kept.slot])
            state.slot = kept.slot
            slots.release([slot])
        state.passed = min(state.passed, num_tokens)
        if state.rolling > num_tokens:
            state.rolling = 0

    def swap_out(self, state: SequenceState) -> None:
        """Move the slot of a sequence that is being changed to the host, unless others share it."""
        slot, slots = state.slot, self.slots
        if not slot or slot in slots.shared:
            return
        slots.cursor(slot, state.num_tokens)
        if not self.host_slots.num_free:
            raise OutOfStateSlotsError(1, 0)
        host = self.host_slots.take()
        self.tensors.swap_out([(slot, host)])
        self.host_slots.place(host, slots.starts[slot], slots.ends[slot])
        state.slot, state.host_slot = 0, host
        slots.release([slot])

    def swap_in(self, state: SequenceState) -> None:
        """Move the state of a sequence that is being changed back to the device."""
        host, hosts = state.host_slot, self.host_slots
        if not host:
            return
        hosts.cursor(host, state.num_tokens)
        self._require(1)
        slot = self._take()
        self.tensors.swap_in([(host, slot)])
        self.slots.place(slot, hosts.starts[host], hosts.ends[host])
        state.slot, state.host_slot = slot, 0
        hosts.release([host])

    # Recounts.

    def recount(self, states: Sequence[SequenceState]) -> None:
        """Derive the reference counts from the sequences and snapshots that a rollback has restored."""
        on_device, on_host = self._held(states)
        self.slots.recount(on_device)
        self.host_slots.recount(on_host)
        if self.tier is not None:
            self.tier.recount()

    def check_integrity(self, states: Sequence[SequenceState]) -> None:
        """Recount every reference, and compare positions; raise PagedError for the first error."""
        on_device, on_host = self._held(states)
        self.slots.check(on_device)
        self.host_slots.check(on_host)
        for state in states:
            if state.slot:
                self.slots.cursor(state.slot, state.num_tokens)
            elif state.host_slot:
                self.host_slots.cursor(state.host_slot, state.num_tokens)
        for block, snapshot in self.snapshots.items():
            self.slots.cursor(*snapshot)
            assert block in self._index.published

    def _held(self, states: Iterable[SequenceState]) -> tuple[Counter[int], Counter[int]]:
        """Count the references to slots on the device and on the host."""
        on_device = Counter(snapshot.slot for snapshot in self.snapshots.values())
        on_host = Counter[int]()
        for state in states:
            on_device[state.slot] += 1
            on_host[state.host_slot] += 1
            if state.step is not None:
                on_device.update(state.step.own_slots)
        del on_device[0], on_host[0]
        return on_device, on_host


def _restore(held: Iterable[tuple[SequenceState, int, StateStep | None]]) -> None:
    for state, slot, step in held:
        state.slot, state.step = slot, step
