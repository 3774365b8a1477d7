"""Writable capacity for sequences: new blocks at their ends, missing blocks, copies of shared blocks, and blocks behind
a sliding window, which are freed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache.groups import CacheGroup
from paged.cache.guard import CacheGuard, Rollback
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.live_sequences import LiveSequences
from paged.cache.pool import BlockPool
from paged.cache.prefix_cache import PrefixCache
from paged.cache.slot_reservation import KvSlotReservation, SequenceState, Undo
from paged.cache.tensors import KvCacheTensors
from paged.errors import InvalidInputError
from paged.metadata import HostMetadata, make_host_metadata
from paged.seq_id import SeqId

Span = tuple[SequenceState, int, int]
"""A sequence, the first position to write, and the end of the positions to write."""

_Need = tuple[SequenceState, list[int], list[int], int]
"""A sequence; indices of shared or missing blocks that a span writes to; indices of published ones; number of blocks
missing at its end."""


class DecodeStep(NamedTuple):
    """A step of one token for each sequence. The next one is made from it: more differs only where a block begins.

    Attributes:
        version: of the block tables after it.
        targets: lengths of the sequences after it.
        written: the blocks that the tokens were written to.
        host: its metadata, without states.
    """

    version: int
    targets: list[int]
    written: list[int]
    host: HostMetadata


class SlidingWindow:
    """Frees blocks that later tokens cannot see; does nothing without a window."""

    def __init__(self, config: PagedKvCacheConfig, pool: BlockPool, rollback: Rollback) -> None:
        self._block_size, self._tables = config.block_size, config.tables
        self._windows: list[tuple[int, CacheGroup]] = []
        # For each table: its reach, and the index that its block -1 would have in `blocks`.
        self._reaches: list[tuple[int, int]] = []
        for index, table in enumerate(config.tables):
            if table.sliding_window is not None:
                self._windows.append((index, table))
                self._reaches.append((table.reach, index - len(config.tables)))
        self._rollback = rollback
        self._pool = pool

    def drop_unseen(self, states: Sequence[SequenceState]) -> None:
        """Free blocks that lie behind the sliding window of every later token."""
        block_size, step = self._block_size, len(self._tables)
        for reach, before in self._reaches:
            for state in states:
                gone = state.num_tokens - reach
                if gone >= block_size and state.blocks[gone // block_size * step + before]:
                    self._drop(state)

    def _drop(self, state: SequenceState) -> None:
        blocks, step = state.blocks, len(self._tables)
        dropped = []
        for reach, before in self._reaches:
            last = (state.num_tokens - reach) // self._block_size * step + before
            while last >= 0 and blocks[last]:  # blocks before a freed one are all freed
                dropped.append(last)
                last -= step
        state.keep(self._rollback)
        kept = list(blocks)
        for position in dropped:
            kept[position] = 0
        self._pool.release([blocks[position] for position in reversed(dropped)])
        state.blocks = tuple(kept)

    def check_room(self, state: SequenceState, target: int) -> None:
        """Raise InvalidInputError if a table lacks a block between the length and `target`."""
        first = state.num_tokens // self._block_size
        for index, _ in self._windows:
            if self._has_gap(state, index, first, target):
                raise InvalidInputError(f"num_tokens: length {target}, but not all blocks before it are allocated")

    def check_rollback(self, state: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError if a block that the token after `num_tokens` sees has been freed."""
        for index, table in self._windows:
            first = table.first_seen_block(num_tokens, self._block_size)
            if self._has_gap(state, index, first, num_tokens):
                raise InvalidInputError(f"num_tokens: {num_tokens}, but part of its sliding window has been freed")

    def check_seen(self, state: SequenceState, index: int, start: int, end: int) -> None:
        """Raise InvalidInputError if one of the positions start..end of a table has been freed."""
        if start < end and self._has_gap(state, index, start // self._block_size, min(end, state.num_tokens)):
            raise InvalidInputError(f"positions {start}..{end} of {state.request_id!r} lie behind its sliding window")

    def _has_gap(self, state: SequenceState, index: int, first: int, num_tokens: int) -> bool:
        """Return whether a table lacks a block from `first` on for one of the first `num_tokens`."""
        step = len(self._tables)
        return 0 in state.blocks[first * step + index : -(-num_tokens // self._block_size) * step : step]


class KvSlotAllocator:
    """Makes positions writable. The caller holds `guard`; the reservations made here also take it."""

    def __init__(
        self,
        config: PagedKvCacheConfig,
        guard: CacheGuard,
        prefixes: PrefixCache,
        tensors: KvCacheTensors,
        window: SlidingWindow,
        sequences: LiveSequences,
    ) -> None:
        self._block_size, self._num_tables = config.block_size, len(config.tables)
        self._max_seq_len = config.max_seq_len
        self._has_windows = any(table.sliding_window is not None for table in config.tables)
        self._is_publishing = config.enable_prefix_cache
        self._guard = guard
        self._prefixes = prefixes
        self._index, self._pool = prefixes.index, prefixes.pool
        self._tensors = tensors
        self._window = window
        self._recurrent = prefixes.recurrent
        self._sequences = sequences
        self._last_decodes: DecodeStep | None = None

    def require(self, states: Sequence[SequenceState], targets: Sequence[int]) -> None:
        """Raise OutOfBlocksError unless every sequence could grow to its target length; takes no blocks."""
        self._pool.require(_blocks_needed(self._needs(_spans(states, targets))))

    def fitting(self, handle: KvCacheHandle, limit: int, planned: Iterable[tuple[KvCacheHandle, int]]) -> int:
        """Implement `PagedKvCacheManager.fitting_tokens`."""
        state = self._sequences.state(handle)
        start, size = state.num_tokens, self._block_size

        def needed(end: int) -> int:
            return _blocks_needed(self._needs([(state, start, end)]))

        num_needed = needed(start + limit)
        if not num_needed:
            return limit
        spans = []
        for other, count in planned:
            spans.append((self._sequences.state(other), other.num_tokens, other.num_tokens + count))
        spare = self._pool.num_free - _blocks_needed(self._needs(spans))
        if num_needed <= spare:
            return limit
        ends = range((start // size + 1) * size, start + limit, size)  # behind these, more blocks are needed
        num_fitting = bisect_right(ends, spare, key=needed)
        if not num_fitting:
            return 0
        return ends[num_fitting - 1] - start

    def reserve(
        self, states: Sequence[SequenceState], targets: Sequence[int], needs: Sequence[_Need] | None = None
    ) -> KvSlotReservation:
        """Reserve capacity for every sequence up to its target length: for all of them or for none.

        needs: the changes that make room, if they are known.
        """
        if needs is None:
            needs = self._needs(self._unready(states, targets))
        undo: dict[SeqId, Undo] = {}
        if needs:
            undo = self._make_room(needs)
        for state in states:
            if state.reservation is not None:
                state.reservation.settle(state)
        if self._recurrent is not None:
            self._recurrent.reserve(states, targets)
        steps = () if self._recurrent is None else (self._recurrent.drop_steps,)
        reservation = KvSlotReservation(self._guard, self._pool, states, targets, undo, self._on_commit, *steps)
        self._guard.give_up_by(reservation.rollback)
        return reservation

    def reserve_step(
        self, handles: list[KvCacheHandle], counts: list[int], *, any_swapped: bool
    ) -> tuple[KvSlotReservation, HostMetadata]:
        """Implement `PagedKvCacheManager.reserve_step`. any_swapped: whether any sequence is swapped out."""
        states = self._sequences.of_step(handles, any_swapped=any_swapped)
        starts = [state.num_tokens for state in states]
        targets = list(map(add, starts, counts))
        if self._max_seq_len is not None:
            self._sequences.check_length(max(targets, default=0))
        if self._num_tables == 1 and counts.count(1) == len(counts):
            return self._reserve_decodes(states, starts, targets)
        reservation = self.reserve(states, targets)
        return reservation, self._metadata(states, np.array(starts, np.int64), np.array(counts, np.int64))

    def _reserve_decodes(
        self, states: list[SequenceState], starts: list[int], targets: list[int]
    ) -> tuple[KvSlotReservation, HostMetadata]:
        """Reserve one more token of each sequence in a cache of one table, as `reserve_step`."""
        tables, block_size, last = self._sequences.tables, self._block_size, self._last_decodes
        tables.update(states)
        if last is not None and last.version == tables.version and last.targets == starts:
            positions = last.host.positions + 1
            begins = (positions % block_size == 0).nonzero()[0].tolist()
            written = last.written.copy()
        else:
            last, positions = None, np.array(starts, np.int64)
            begins = list(range(len(states)))
            written = [0] * len(states)
        for row in begins:
            index, blocks = starts[row] // block_size, states[row].blocks
            written[row] = blocks[index] if index < len(blocks) else 0  # 0: there is none yet
        needs: list[_Need] = []
        if not (self._pool.shared.isdisjoint(written) and self._index.published.isdisjoint(written)):
            needs = self._needs(_spans(states, targets))
            last, begins = None, list(range(len(states)))
        elif 0 in written:
            needs = [(states[row], [], [], 1) for row in begins if not written[row]]
        reservation = self.reserve(states, targets, needs)
        table = tables.gather([need[0] for need in needs])
        for row in begins:
            written[row] = states[row].blocks[starts[row] // block_size]
        if last is None:
            host = make_host_metadata(positions, None, table, block_size)
        else:
            host = last.host.after_one(positions, table, max_seqlen_k=max(targets, default=0))
            for row in begins:
                host.slot_mappings[0, row] = written[row] * block_size
        self._last_decodes = DecodeStep(tables.version, targets, written, host)
        return reservation, self._with_states(host, states)

    def ready_step(self, handles: list[KvCacheHandle], counts: list[int], *, any_swapped: bool) -> HostMetadata:
        """Return the metadata of a step that sequences have capacity for; see `PagedKvCacheManager.build_metadata`."""
        states = self._sequences.of_step(handles, any_swapped=any_swapped)
        query_lens = self._sequences.query_lens(counts)
        lengths = np.array([state.num_tokens for state in states], np.int64)
        targets = (lengths + query_lens).tolist()
        reservation = states[0].reservation if states else None
        if reservation is None or not reservation.covers(states, targets):
            unready = self._unready(states, targets)
            for state, start, target in unready:
                if target > len(state.blocks) // self._num_tables * self._block_size:
                    lacking = f"{state.request_id!r} has no capacity for {target - start} more tokens"
                    raise InvalidInputError(f"items: {lacking}")
            self.make_exclusive(unready)
        return self._metadata(states, lengths, query_lens)

    def _metadata(
        self, states: list[SequenceState], lengths: NDArray[np.int64], query_lens: NDArray[np.int64]
    ) -> HostMetadata:
        table = self._sequences.tables.gather(states)
        return self._with_states(make_host_metadata(lengths, query_lens, table, self._block_size), states)

    def _with_states(self, host: HostMetadata, states: list[SequenceState]) -> HostMetadata:
        """Return the metadata with the slots of recurrent layers, if there are some."""
        if self._recurrent is None:
            return host
        arrays = self._recurrent.arrays(states, host.seq_lens.tolist())
        return replace(host, states=arrays, max_append=self._recurrent.spec.max_append)

    def make_exclusive(self, spans: Sequence[Span]) -> None:
        """Make the spans writable: copy shared blocks, withdraw published ones."""
        needs = self._needs(spans)
        if needs:
            for undo in self._make_room(needs).values():
                self._pool.release(list(undo.replaced.values()))

    def _unready(self, states: Sequence[SequenceState], targets: Sequence[int]) -> list[Span]:
        """Return spans from lengths to targets that may need a change; others are writable.

        Only the block that contains the length can be shared or published: later blocks hold no tokens.
        """
        block_size, num_tables = self._block_size, self._num_tables
        without_room: list[Span] = []
        written: list[int] = []  # checking the blocks of all spans at once takes a fifth of the time
        for state, target in zip(states, targets, strict=True):
            start, blocks = state.num_tokens, state.blocks
            if target > start:
                if target > len(blocks) // num_tables * block_size:
                    without_room.append((state, start, target))
                elif num_tables == 1:
                    written.append(blocks[start // block_size])
                else:  # a block behind a window may be missing
                    written += blocks[start // block_size * num_tables : -(-target // block_size) * num_tables]
        if 0 not in written and self._pool.shared.isdisjoint(written) and self._index.published.isdisjoint(written):
            return without_room
        return _spans(states, targets)

    def _needs(self, spans: Iterable[Span]) -> list[_Need]:
        """Return the changes that make the spans writable; sequences that are ready are left out."""
        shared_blocks, published = self._pool.shared, self._index.published
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
                if blocks[i] in shared_blocks or (not blocks[i] and i >= written):  # earlier ones are behind a window
                    replaced.append(i)
                elif blocks[i] in published:
                    stale.append(i)
            if last > num_blocks or replaced or stale:
                needs.append((state, replaced, stale, max(0, last - num_blocks)))
        return needs

    def _make_room(self, needs: Sequence[_Need]) -> dict[SeqId, Undo]:
        """Extend sequences, copy shared blocks, and withdraw published ones.

        Returns data to undo this for each changed sequence. The caller owns the references to replaced blocks.
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
                # Neither copies nor blocks to be written are published: the chain continues before them.
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
                undo[state.request_id] = Undo(len(blocks_before), state.num_written, originals)
                rollback.append((setattr, state, "blocks", blocks_before))
                state.blocks = tuple(blocks)
        if copies:
            self._prefixes.overwrite(new_blocks)
            self._tensors.copy(copies)
            self._guard.counts.add("cow_copies", len(copies))
        return undo

    def _on_commit(self, states: Sequence[SequenceState], token_ids: Sequence[list[int]] | None) -> None:
        """Publish full blocks after a commit, before blocks behind the window are freed."""
        inside = [] if self._recurrent is None else self._recurrent.commit(states)
        if token_ids is not None and self._is_publishing:
            self._prefixes.append(states, token_ids)
        if self._recurrent is not None:
            self._recurrent.keep(inside, states)
        if self._has_windows:
            self._window.drop_unseen(states)


def _spans(states: Sequence[SequenceState], targets: Sequence[int]) -> list[Span]:
    return [(state, state.num_tokens, target) for state, target in zip(states, targets, strict=True)]


def _blocks_needed(needs: Iterable[_Need]) -> int:
    return sum(len(replaced) + fresh for _, replaced, _, fresh in needs)
