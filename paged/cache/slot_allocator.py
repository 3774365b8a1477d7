"""Writable capacity for sequences: adds blocks, copies shared blocks, ends their steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache.guard import CacheGuard
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_reservation import KvSlotReservation, SequenceState, Undo
from paged.cache.tensors import KvCacheTensors
from paged.errors import InvalidInputError
from paged.seq_id import SeqId
from paged.step.step import Step

Span = tuple[SequenceState, int, int]
"""Positions to write: sequence, first position, end."""

_Need = tuple[SequenceState, list[int], list[int], int]
"""Changes that make a span writable: sequence, indices of missing blocks and of blocks to copy, indices of published
blocks to withdraw, number of blocks missing at the end."""


class DecodeStep(NamedTuple):
    """A decode step (one token for each sequence), kept because the next one mostly differs by one position only.

    Attributes:
        version: version of the block tables after the step.
        targets: lengths of the sequences after the step.
        written: block of each sequence that the step wrote to.
        positions, slot_mappings, seq_lens, cu_seqlens_q: metadata of the step.
    """

    version: int
    targets: list[int]
    written: list[int]
    positions: NDArray[np.int64]
    slot_mappings: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    cu_seqlens_q: NDArray[np.int32]


class KvSlotAllocator:
    """Makes positions writable. The caller holds `guard`. Reservations made here take it themselves."""

    def __init__(
        self,
        config: PagedKvCacheConfig,
        guard: CacheGuard,
        prefixes: PrefixCache,
        tensors: KvCacheTensors,
        sequences: LiveSequences,
    ) -> None:
        self._block_size, self._num_tables = config.block_size, len(config.tables)
        self._max_seq_len = config.max_seq_len
        self._is_publishing = config.enable_prefix_cache
        self._guard = guard
        self._prefixes = prefixes
        self._index, self._pool = prefixes.index, prefixes.pool
        self._tensors = tensors
        self._kinds = prefixes.kinds
        self._sequences = sequences
        self._last_decodes: DecodeStep | None = None

    def require(self, states: Sequence[SequenceState], targets: Sequence[int]) -> None:
        """Raise OutOfBlocksError unless every sequence could grow to its target length; takes no blocks."""
        self._pool.require(_blocks_needed(self._needs(_spans(states, targets))))

    def fitting(self, handle: KvCacheHandle, limit: int, scheduled: Iterable[tuple[KvCacheHandle, int]]) -> int:
        """Implement `PagedKvCacheManager.fitting_tokens`."""
        state = self._sequences.state(handle)
        start, size = state.num_tokens, self._block_size

        def needed(end: int) -> int:
            return _blocks_needed(self._needs([(state, start, end)]))

        num_needed = needed(start + limit)
        if not num_needed:
            return limit
        spans = []
        for other, count in scheduled:
            spans.append((self._sequences.state(other), other.num_tokens, other.num_tokens + count))
        spare = self._pool.num_free - _blocks_needed(self._needs(spans))
        if num_needed <= spare:
            return limit
        ends = range((start // size + 1) * size, start + limit, size)  # more blocks are needed only at a block boundary
        num_fitting = bisect_right(ends, spare, key=needed)
        if not num_fitting:
            return 0
        return ends[num_fitting - 1] - start

    def reserve(
        self, states: Sequence[SequenceState], targets: Sequence[int], needs: Sequence[_Need] | None = None
    ) -> KvSlotReservation:
        """Reserve capacity for every sequence up to its target length; for all sequences or for none.

        needs: result of `_needs`, if it is known.
        """
        if needs is None:
            needs = self._needs(self._unready(states, targets))
        plans = [kind.require(states, targets) for kind in self._kinds]
        undo: dict[SeqId, Undo] = {}
        if needs:
            undo = self._make_room(needs)
        for state in states:
            if state.reservation is not None:
                state.reservation.settle(state)
        for kind, plan in zip(self._kinds, plans, strict=True):
            kind.reserve(states, targets, plan)
        reservation = KvSlotReservation(self._guard, self._pool, states, targets, undo, self.arrive, self._cancel)
        self._guard.give_up_by(reservation.rollback)
        return reservation

    def reserve_for(self, step: Step, *, any_swapped: bool) -> None:
        """Implement `PagedKvCacheManager.reserve_for`. any_swapped: whether the cache has swapped sequences."""
        states = self._sequences.of_step(step.handles, any_swapped=any_swapped)
        starts = [state.num_tokens for state in states]
        counts = step.counts
        targets = list(map(add, starts, counts))
        if self._max_seq_len is not None:
            self._sequences.check_length(max(targets, default=0))
        if self._num_tables == 1 and counts.count(1) == len(counts):
            self._reserve_decodes(step, states, starts, targets)
            return
        step.reservation = self.reserve(states, targets)
        self._place(step, states, np.array(starts, np.int64), np.array(counts, np.int64))

    def _reserve_decodes(self, step: Step, states: list[SequenceState], starts: list[int], targets: list[int]) -> None:
        """Reserve one more token of each sequence in a cache of one table; a fast path of `reserve_for`."""
        tables, block_size, last = self._sequences.tables, self._block_size, self._last_decodes
        tables.update(states)
        if last is not None and last.version == tables.version and last.targets == starts:
            positions = last.positions + 1
            begins = (positions % block_size == 0).nonzero()[0].tolist()
            written = last.written.copy()
        else:
            last, positions = None, np.array(starts, np.int64)
            begins = list(range(len(states)))
            written = [0] * len(states)
        for row in begins:
            index, blocks = starts[row] // block_size, states[row].blocks
            written[row] = blocks[index] if index < len(blocks) else 0  # 0: the block is not allocated yet
        needs: list[_Need] = []
        if not (self._pool.shared.isdisjoint(written) and self._index.published.isdisjoint(written)):
            needs = self._needs(_spans(states, targets))
            last, begins = None, list(range(len(states)))
        elif 0 in written:
            needs = [(states[row], [], [], 1) for row in begins if not written[row]]
        step.reservation = self.reserve(states, targets, needs)
        table = tables.gather([need[0] for need in needs])
        for row in begins:
            written[row] = states[row].blocks[starts[row] // block_size]
        if last is None:
            step.place(positions, None, table, block_size)
        else:  # one position further: a third of the time of `place`
            step.positions = positions
            step.slot_mappings = last.slot_mappings + 1
            for row in begins:
                step.slot_mappings[0, row] = written[row] * block_size
            step.seq_lens = last.seq_lens + np.int32(1)
            step.cu_seqlens_q = last.cu_seqlens_q
            step.block_tables = table
            step.max_seqlen_q = 1
            step.max_seqlen_k = max(targets, default=0)
        self._last_decodes = DecodeStep(
            tables.version, targets, written, positions, step.slot_mappings, step.seq_lens, step.cu_seqlens_q
        )
        self._ask_kinds(step, states)

    def ready_step(self, handles: list[KvCacheHandle], counts: list[int], *, any_swapped: bool) -> Step:
        """Return a step within the sequences' capacity, without tokens; see `PagedKvCacheManager.build_metadata`."""
        states = self._sequences.of_step(handles, any_swapped=any_swapped)
        query_lens = self._sequences.query_lens(counts)
        lengths = np.array([state.num_tokens for state in states], np.int64)
        targets = (lengths + query_lens).tolist()
        reservation = states[0].reservation if states else None
        if reservation is None or not reservation.covers(states, targets):
            unready = self._unready(states, targets)
            for state, start, target in unready:
                if target > len(state.blocks) // self._num_tables * self._block_size:
                    lacking = f"{state.seq_id!r} has no capacity for {target - start} more tokens"
                    raise InvalidInputError(f"items: {lacking}")
            for kind in self._kinds:
                kind.check_step(states, targets)
            self.make_exclusive(unready)
        step = Step(handles, counts)
        self._place(step, states, lengths, query_lens)
        return step

    def _place(
        self, step: Step, states: list[SequenceState], lengths: NDArray[np.int64], query_lens: NDArray[np.int64]
    ) -> None:
        """Fill in where the new tokens of a step lie."""
        step.place(lengths, query_lens, self._sequences.tables.gather(states), self._block_size)
        self._ask_kinds(step, states)

    def _ask_kinds(self, step: Step, states: list[SequenceState]) -> None:
        """Fill in what the layers of each kind read."""
        for kind in self._kinds:
            kind.fill(step, states)

    def make_exclusive(self, spans: Sequence[Span]) -> None:
        """Make the spans writable: copy shared blocks, withdraw published ones."""
        needs = self._needs(spans)
        if needs:
            for undo in self._make_room(needs).values():
                self._pool.release(list(undo.replaced.values()))

    def _unready(self, states: Sequence[SequenceState], targets: Sequence[int]) -> list[Span]:
        """Return the spans from length to target that may need a change; all others are writable.

        Only the block that contains the length can be shared or published, because later blocks hold no tokens.
        """
        block_size, num_tables = self._block_size, self._num_tables
        without_room: list[Span] = []
        written: list[int] = []  # checking all spans at once takes a fifth of the time
        for state, target in zip(states, targets, strict=True):
            start, blocks = state.num_tokens, state.blocks
            if target > start:
                if target > len(blocks) // num_tables * block_size:
                    without_room.append((state, start, target))
                elif num_tables == 1:
                    written.append(blocks[start // block_size])
                else:  # a table with a window may lack blocks
                    written += blocks[start // block_size * num_tables : -(-target // block_size) * num_tables]
        if 0 not in written and self._pool.shared.isdisjoint(written) and self._index.published.isdisjoint(written):
            return without_room
        return _spans(states, targets)

    def _needs(self, spans: Iterable[Span]) -> list[_Need]:
        """Return the changes that make the spans writable; sequences that need none are left out."""
        shared_blocks, published = self._pool.shared, self._index.published
        retained = self._pool.priorities.levels
        needs = []
        for state, start, end in spans:
            if start >= end:
                continue
            blocks = state.blocks
            num_blocks = len(blocks)
            last = -(-end // self._block_size) * self._num_tables
            written = -(-state.num_tokens // self._block_size) * self._num_tables
            replaced: list[int] = []
            stale: list[int] = []
            for i in range(start // self._block_size * self._num_tables, min(last, num_blocks)):
                # A block that is missing before `written` lies behind a window. A block with a priority is copied, so
                # that prompts still find it.
                if blocks[i] in shared_blocks or blocks[i] in retained or (not blocks[i] and i >= written):
                    replaced.append(i)
                elif blocks[i] in published:
                    stale.append(i)
            if last > num_blocks or replaced or stale:
                needs.append((state, replaced, stale, max(0, last - num_blocks)))
        return needs

    def _make_room(self, needs: Sequence[_Need]) -> dict[SeqId, Undo]:
        """Extend sequences, copy shared blocks, and withdraw published blocks.

        Returns an `Undo` for each changed sequence. The caller owns the references to replaced blocks.
        """
        rollback, num_tables = self._guard.rollback, self._num_tables
        new_blocks = self._pool.allocate(_blocks_needed(needs))
        num_used = 0
        undo: dict[SeqId, Undo] = {}
        copies: list[tuple[int, int]] = []
        for state, replaced, stale, num_missing in needs:
            blocks_before = state.blocks
            if replaced or stale:
                self._prefixes.withdraw([blocks_before[index] for index in stale])
                # End the chain before the first block that changes: a block to be written, or one replaced by a copy.
                state.chain.cut(len(state.chain.ids), min([*replaced, *stale]) // num_tables, rollback)
            if replaced or num_missing:
                blocks = list(blocks_before)
                originals: dict[int, int] = {}
                for index in replaced:
                    originals[index] = blocks[index]
                    if blocks[index]:
                        copies.append((blocks[index], new_blocks[num_used]))
                    blocks[index] = new_blocks[num_used]
                    num_used += 1
                blocks += new_blocks[num_used : num_used + num_missing]
                num_used += num_missing
                undo[state.seq_id] = Undo(len(blocks_before), state.num_written, originals)
                rollback.append((setattr, state, "blocks", blocks_before))
                state.blocks = tuple(blocks)
        if copies:
            self._prefixes.overwrite(new_blocks)
            self._tensors.copy(copies)
            self._guard.counts.add("cow_copies", len(copies))
        return undo

    def arrive(
        self,
        states: Sequence[SequenceState],
        targets: Sequence[int],
        token_ids: Sequence[list[int]] | None = None,
    ) -> None:
        """Note that sequences hold tokens up to their targets. Every call that says so ends here.

        token_ids: newest ids of each sequence. Full blocks with known ids are published.
        """
        for state, target in zip(states, targets, strict=True):
            state.num_tokens = target
        for kind in self._kinds:
            kind.commit(states)
        if token_ids is not None and self._is_publishing:
            self._prefixes.append(states, token_ids)
        self.keep(states)
        for kind in self._kinds:
            kind.drop(states)

    def keep(self, states: Sequence[SequenceState]) -> None:
        """Keep what later hits need, after blocks of the sequences may have been published."""
        for kind in self._kinds:
            kind.keep(states)

    def _cancel(self, states: Sequence[SequenceState]) -> None:
        """Drop the steps of sequences whose lengths stay."""
        for kind in self._kinds:
            kind.cancel(states)


def _spans(states: Sequence[SequenceState], targets: Sequence[int]) -> list[Span]:
    return [(state, state.num_tokens, target) for state, target in zip(states, targets, strict=True)]


def _blocks_needed(needs: Iterable[_Need]) -> int:
    return sum(len(replaced) + fresh for _, replaced, _, fresh in needs)
