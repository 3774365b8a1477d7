"""Capacity reserved for a batch until its forward succeeds or fails, and the state of a sequence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import sub
from types import NoneType, TracebackType
from typing import Any

from paged.cache.guard import CacheGuard, Rollback
from paged.cache.pool import BlockPool
from paged.cache.retention import Retention
from paged.cache.token_chain import TokenChain, pack
from paged.errors import InvalidInputError
from paged.kernels.core.errors import shown
from paged.seq_id import SeqId
from paged.token_ids import as_token_ids

_KEPT = "blocks num_tokens num_cached_tokens num_written is_valid reservation chain host_blocks".split()

_NOT_COMMITTED = (
    "the reservation ends without commit() or rollback(): its sequences keep the blocks, and their lengths are still 0"
)


@dataclass(eq=False, slots=True)
class SequenceState:
    """State of one sequence in the manager; callers see it through a KvCacheHandle.

    Attributes:
        blocks: block ids, the first of every table, then the second of every table; 0 if a table lacks the block.
            The tuple is replaced, never changed, so that a rollback can keep the old value.
        num_written: end of the positions that `write_kv` has written without a gap after num_tokens.
        chain: known token ids and their published blocks.
        num_loaded_tokens: number of cached tokens whose K/V came from a tier.
        retention: priority of its published blocks; None for the lowest.
        host_blocks: while swapped out, host block by index in `blocks`; `blocks` is 0 at these indices.
        row, row_blocks: the sequence's row in `BlockTables`, -1 for none, and the blocks stored in the row; None if
            they are unknown.
        parts: record by kind, see `Kind.put`.
    """

    seq_id: SeqId
    namespace: Hashable
    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_written: int = 0
    is_valid: bool = True
    reservation: KvSlotReservation | None = None
    chain: TokenChain = field(default_factory=TokenChain)
    host_blocks: dict[int, int] | None = None
    retention: Retention | None = None
    row: int = -1
    row_blocks: tuple[int, ...] | None = ()
    parts: dict[object, Any] = field(default_factory=dict)

    def keep(self, rollback: Rollback) -> None:
        """Save all fields for a rollback, except the row. The chain and the kinds save their own changes."""
        rollback.keep_fields(self, _KEPT)

    def begin_change(self, rollback: Rollback) -> None:
        """Save the state for a rollback before a change, and take the sequence out of an open reservation."""
        self.keep(rollback)
        if self.reservation is not None:
            self.reservation.settle(self)


@dataclass(slots=True)
class Undo:
    """Data to undo a reservation's changes of one sequence.

    Attributes:
        replaced: blocks that copies have replaced, by index in `blocks`; 0 if a missing block was added. The
            reservation holds their references.
    """

    num_blocks: int
    num_written: int
    replaced: dict[int, int]


class KvSlotReservation:
    """Context manager for the capacity of a whole batch.

    It ends in one of two ways. `commit()` sets every sequence to its target length. `rollback()`, or an exception in
    the `with` body, frees the capacity and undoes copies. If the body ends without either, it ends as by `leave()`, a
    commit of no tokens: sequences keep the capacity and their old lengths. If another call changes a sequence
    meanwhile, the reservation ends for this sequence as by `leave()`, and commit and rollback skip it.
    """

    def __init__(
        self,
        guard: CacheGuard,
        pool: BlockPool,
        states: Sequence[SequenceState],
        targets: Sequence[int],
        undo: dict[SeqId, Undo],
        on_commit: Callable[[Sequence[SequenceState], Sequence[int], Sequence[list[int]] | None], None],
        on_cancel: Callable[[Sequence[SequenceState]], None],
    ) -> None:
        """on_commit: `KvSlotAllocator.arrive`. on_cancel: called with sequences whose step ends without tokens."""
        self._guard = guard
        self._pool = pool
        self._states = states
        self._targets = targets
        self._undo = undo
        self._on_commit = on_commit
        self._on_cancel = on_cancel
        self._is_open = True
        self._is_whole = True  # whether all sequences grow, and no other call has changed one since
        self._starts = [state.num_tokens for state in states]
        guard.rollback.append((self._restore, states, None, self._starts, {}, False, False))
        for state, target in zip(states, targets, strict=True):
            if target > state.num_tokens:
                state.reservation = self
            else:  # a sequence that does not grow has nothing to undo
                self._is_whole = False

    @property
    def is_open(self) -> bool:
        """Whether the reservation can still be committed or rolled back."""
        return self._is_open

    @property
    def kept_blocks(self) -> list[int]:
        """Shared blocks that copies have replaced, kept for `rollback`."""
        kept: list[int] = []
        for undo in self._undo.values():
            kept += filter(None, undo.replaced.values())
        return kept

    def covers(self, states: Sequence[SequenceState], targets: Sequence[int]) -> bool:
        """Return whether it reserves exactly these lengths for these sequences, and no sequence has changed since."""
        return self._is_whole and states == self._states and targets == self._targets

    def commit(self, token_ids: Iterable[Iterable[int] | None] | None = None) -> None:
        """Set every sequence to its target length; the caller has written the K/V up to there.

        Args:
            token_ids: for each request, the ids of its new tokens, or None if they are not known yet (pass them to
                `PagedKvCacheManager.append_tokens` later). Full blocks with known ids are published.

            Raises:
                InvalidInputError: the reservation is closed, or `token_ids` is not one list per sequence with one
                    integer of 32 bits for each new token. The reservation does not change.
        """
        new_ids: list[list[int]] | None = None
        if token_ids is not None:
            new_ids = self._new_ids(token_ids)  # without the lock: it runs caller code
        with self._guard:
            if not self._is_open:
                raise InvalidInputError("commit: the reservation is closed")
            grown, targets = self._states, self._targets
            if not self._is_whole:
                is_ours = [state.reservation is self for state in self._states]
                grown, targets = list(compress(grown, is_ours)), list(compress(targets, is_ours))
                if new_ids is not None:
                    new_ids = list(compress(new_ids, is_ours))
            self._end(grown, is_open=False)
            self._on_commit(grown, targets, new_ids)

    def rollback(self) -> None:
        """Restore blocks, reference counts and lengths from before the reservation; do nothing if it is closed."""
        with self._guard:
            ours = self._ours()
            for state in ours:
                undo = self._undo.get(state.seq_id)
                if undo is None:
                    continue
                state.keep(self._guard.rollback)
                blocks = list(state.blocks)
                dropped = blocks[undo.num_blocks :]
                for index, original in undo.replaced.items():
                    dropped.append(blocks[index])
                    blocks[index] = original
                state.blocks = tuple(blocks[: undo.num_blocks])
                state.num_written = undo.num_written
                self._pool.release(dropped)
            self._on_cancel(ours)
            self._end(ours, is_open=False, is_released=False)

    def leave(self) -> None:
        """End as by a commit of no tokens; do nothing if it is closed."""
        with self._guard:
            ours = self._ours()
            self._on_cancel(ours)
            self._end(ours, is_open=False)

    def settle(self, state: SequenceState) -> None:
        """End for one sequence as by a commit of no tokens."""
        self._on_cancel([state])
        self._end([state], is_open=True)

    def _ours(self) -> list[SequenceState]:
        """Return the sequences that are still in the reservation."""
        return [state for state in self._states if state.reservation is self]

    def _end(self, states: Sequence[SequenceState], *, is_open: bool, is_released: bool = True) -> None:
        """Take sequences out of the reservation.

        is_open: whether it stays open for the others; if not, `states` are all its sequences. is_released: whether to
        release the blocks that copies have replaced.
        """
        if not self._is_open:
            return
        starts = self._starts
        if not self._is_whole or is_open:
            starts = [state.num_tokens for state in states]
        undo = self._undo
        self._guard.rollback.append((self._restore, states, self, starts, undo, True, self._is_whole))
        self._undo = {}
        if is_open:
            self._undo = undo.copy()
            undo = {state.seq_id: self._undo.pop(state.seq_id) for state in states if state.seq_id in undo}
        for state in states:
            state.reservation = None
        for undone in undo.values():
            # Skip empty releases: they would take 2 % of a large decode step.
            if is_released and undone.replaced:
                self._pool.release(list(undone.replaced.values()))
        self._is_open, self._is_whole = is_open, False

    def _new_ids(self, token_ids: Iterable[Iterable[int] | None]) -> list[list[int]]:
        """Return `token_ids` as checked lists, empty where ids are not known."""
        try:
            rows: list[Any] = list(token_ids)
        except MemoryError:
            raise
        except Exception as error:
            raise InvalidInputError(f"token_ids: {shown(token_ids)}, expected one list per sequence") from error
        counts = list(map(sub, self._targets, self._starts))
        kinds = set(map(type, rows))  # not `None in rows`, which compares arrays
        if NoneType in kinds:
            for index, row in enumerate(rows):
                if row is None:
                    rows[index] = []
                    if index < len(counts):
                        counts[index] = 0
        # Check the ids of all lists at once, because a decode step has hundreds of lists with one id.
        if not kinds <= {list, NoneType}:
            rows = [as_token_ids("token_ids", row) for row in rows]
        flat = rows[0] if len(rows) == 1 else list(chain.from_iterable(rows))
        if not set(map(type, flat)) <= {int}:
            rows = [as_token_ids("token_ids", row) for row in rows]
            flat = list(chain.from_iterable(rows))
        if list(map(len, rows)) != counts:
            num_ids = [len(row) for row in rows]
            raise InvalidInputError(f"token_ids: {shown(num_ids)} ids, expected {shown(counts)} as in the requests")
        pack(flat)
        return rows

    def _restore(
        self,
        states: Iterable[SequenceState],
        reservation: KvSlotReservation | None,
        lengths: Iterable[int],
        undo: dict[SeqId, Undo],
        is_open: bool,
        is_whole: bool,
    ) -> None:
        """Restore the reservation as it was when `states` were or were not in it, in a call that fails."""
        for state, length in zip(states, lengths, strict=True):
            state.reservation, state.num_tokens = reservation, length
        self._undo, self._is_open, self._is_whole = undo, is_open, is_whole

    def __enter__(self) -> KvSlotReservation:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not None:
            self.rollback()
            return
        if self._is_open and not any(state.num_tokens for state in self._states):
            warnings.warn(_NOT_COMMITTED, stacklevel=2)
        self.leave()
