"""Capacity reserved for a batch until its forward succeeds or fails, and the state of sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import sub
from types import NoneType, TracebackType
from typing import Any, NamedTuple

from paged.cache.guard import CacheGuard, Rollback
from paged.cache.pool import BlockPool
from paged.cache.token_chain import TokenChain, pack
from paged.errors import InvalidInputError
from paged.kernels.common.scalars import shown
from paged.seq_id import SeqId
from paged.token_ids import as_token_ids


class StateStep(NamedTuple):
    """A step of one sequence that has been reserved and not committed.

    Attributes:
        start, num_tokens: position of the step's first token, and number of tokens.
        read: slot with the state at `start`; -1 if the sequence begins.
        write: slot that holds the state after the step; `read` if its tokens are appended to the ring there.
        cursor: ring tokens in `read` before `start`.
        snapshot, snapshot_len: slot for the state after that many tokens of the sequence; -1 for none.
    """

    start: int
    num_tokens: int
    read: int
    write: int
    cursor: int
    snapshot: int
    snapshot_len: int

    @property
    def is_in_place(self) -> bool:
        """Whether it writes the slot that it reads."""
        return self.read == self.write

    @property
    def own_slots(self) -> tuple[int, int]:
        """Slots that the step holds beside its sequence's: the written one and the snapshot's, 0 for none."""
        return 0 if self.is_in_place else self.write, max(self.snapshot, 0)


_KEPT = """blocks num_tokens num_cached_tokens num_written is_valid reservation chain host_blocks slot host_slot step
    passed rolling""".split()


_NOT_COMMITTED = (
    "the reservation ends without commit() or rollback(): its sequences keep the blocks, and their lengths are still 0"
)


@dataclass(eq=False, slots=True)
class SequenceState:
    """The manager's state of one sequence; callers see it through a KvCacheHandle.

    Attributes:
        blocks: ids, the first of every table, then the second of every table; 0 if a table has no block there.
            Replaced, never changed in place, so that an old value can be kept for a rollback.
        num_written: positions below it were written by write_kv, without a gap after num_tokens.
        chain: known token ids and their published blocks.
        num_loaded_tokens: those of num_cached_tokens whose K/V a tier had.
        host_blocks: while swapped out, host blocks by index in `blocks`, which is 0 there.
        row, row_blocks: the sequence's row in the manager's table, -1 for none, and the blocks stored in it; None if it
            may hold anything.
        slot, host_slot: of recurrent layers, with the state of `num_tokens` tokens; 0 for none. `host_slot` is set
            while swapped out, unless `slot` is shared and stays on the device.
        step: what an open reservation has planned for the recurrent layers.
        prompt_len: tokens of the prompt of recurrent layers, 0 if unknown.
        junction: position where the prompt parted from published blocks without a snapshot, 0 for none.
        passed: last boundary at which the state was kept, or could have been.
        rolling: such a boundary behind the prompt whose snapshot goes when the next one is kept; 0 for none.
    """

    request_id: SeqId
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
    row: int = -1
    row_blocks: tuple[int, ...] | None = ()
    slot: int = 0
    host_slot: int = 0
    step: StateStep | None = None
    prompt_len: int = 0
    junction: int = 0
    passed: int = 0
    rolling: int = 0

    def keep(self, rollback: Rollback) -> None:
        """Save all fields for a rollback, except the row; the chain's lists save themselves."""
        rollback.keep_fields(self, _KEPT)

    def begin_change(self, rollback: Rollback) -> None:
        """Save the state for a rollback before a call changes it, and take the sequence out of an open reservation."""
        self.keep(rollback)
        if self.reservation is not None:
            self.reservation.settle(self)


@dataclass(slots=True)
class Undo:
    """Data to undo a reservation's changes of one sequence.

    Attributes:
        replaced: shared blocks by index in `blocks`, where their copies are now; 0 if there was none. The reservation
            holds their references.
    """

    num_blocks: int
    num_written: int
    replaced: dict[int, int]


class KvSlotReservation:
    """Capacity reserved for a whole batch, as a context manager.

    `commit()` sets every sequence to its target length. `rollback()`, or an exception in the `with` body, frees the
    capacity and undoes copies. If the body ends without either, capacity is kept and lengths do not change. If another
    call changes a sequence meanwhile, the sequence keeps its capacity, and commit and rollback skip it.
    """

    def __init__(
        self,
        guard: CacheGuard,
        pool: BlockPool,
        states: Sequence[SequenceState],
        targets: Sequence[int],
        undo: dict[SeqId, Undo],
        on_commit: Callable[[Sequence[SequenceState], Sequence[list[int]] | None], None],
        drop_steps: Callable[[Iterable[SequenceState]], None] = lambda states: None,
    ) -> None:
        """drop_steps: gives back the slots that recurrent layers' steps would have written."""
        self._guard = guard
        self._pool = pool
        self._states = states
        self._targets = targets
        self._undo = undo
        self._on_commit = on_commit
        self._drop_steps = drop_steps
        self._is_open = True
        self._is_whole = True  # all sequences grow by it, and no other call has changed one of them since
        self._starts = [state.num_tokens for state in states]
        guard.rollback.append((self._abandon,))
        for state, target in zip(states, targets, strict=True):
            if target > state.num_tokens:
                state.reservation = self
            else:  # a sequence that does not grow has nothing to undo
                self._is_whole = False

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._is_open

    @property
    def kept_blocks(self) -> list[int]:
        """Shared blocks that copies have replaced, kept for a rollback."""
        kept: list[int] = []
        for undo in self._undo.values():
            kept += filter(None, undo.replaced.values())
        return kept

    def covers(self, states: Sequence[SequenceState], targets: Sequence[int]) -> bool:
        """Return whether it reserves exactly these lengths for these sequences, and none has changed since."""
        return self._is_whole and states == self._states and targets == self._targets

    def commit(self, token_ids: Iterable[Iterable[int] | None] | None = None) -> None:
        """Set every sequence to its target length; the caller has written the K/V up to there.

        Args:
            token_ids: ids of each sequence's new tokens, in the order of the requests; None where they are not known
                yet, see `PagedKvCacheManager.append_tokens`. If known, full blocks are published.

        Raises:
            InvalidInputError: the reservation is closed, or `token_ids` are not integers of 32 bits, one list per
                sequence with as many ids as it has new tokens. The reservation does not change.
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
            self._close()
            for state, target in zip(grown, targets, strict=True):
                state.num_tokens = target
            self._on_commit(grown, new_ids)

    def rollback(self) -> None:
        """Restore blocks, reference counts and lengths from before the reservation; does nothing if it is closed."""
        with self._guard:
            ours = self._ours()
            for state in ours:
                undo = self._undo.get(state.request_id)
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
            self._drop_steps(ours)
            self._close(is_released=False)

    def leave(self) -> None:
        """Close the reservation but keep the capacity; lengths do not change. Does nothing if it is closed."""
        with self._guard:
            self._drop_steps(self._ours())
            self._close()

    def settle(self, state: SequenceState) -> None:
        """Take one sequence out of the reservation; it keeps its capacity and its length."""
        self._keep([state], [state.num_tokens])
        self._drop_steps([state])
        state.reservation = None
        self._is_whole = False
        if state.request_id in self._undo:
            self._undo = self._undo.copy()
            self._pool.release(list(self._undo.pop(state.request_id).replaced.values()))

    def _ours(self) -> list[SequenceState]:
        """Return the sequences that are in the reservation."""
        return [state for state in self._states if state.reservation is self]

    def _close(self, *, is_released: bool = True) -> None:
        """is_released: whether to release the blocks that copies have replaced."""
        if not self._is_open:
            return
        ours, starts = self._states, self._starts
        if not self._is_whole:
            ours = self._ours()
            starts = [state.num_tokens for state in ours]
        self._keep(ours, starts)
        for state in ours:
            state.reservation = None
        for undo in self._undo.values():
            # Rare; 16 calls that release nothing take 2 % of a decode step of 256 sequences.
            if is_released and undo.replaced:
                self._pool.release(list(undo.replaced.values()))
        self._undo = {}
        self._is_open = self._is_whole = False

    def _keep(self, states: Sequence[SequenceState], lengths: Sequence[int]) -> None:
        """Record for a rollback that `states`, with these lengths, were in the reservation."""
        self._guard.rollback.append((self._reopen, states, lengths, self._undo, self._is_whole))

    def _new_ids(self, token_ids: Iterable[Iterable[int] | None]) -> list[list[int]]:
        """Return `token_ids` as checked lists, empty for those that are not known."""
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
        # Check the ids of all lists at once: a decode step has hundreds with one id each.
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

    def _abandon(self) -> None:
        """Undo the reservation while it is being made."""
        self._undo = {}
        self._is_open = self._is_whole = False
        for state in self._states:
            if state.reservation is self:
                state.reservation = None

    def _reopen(
        self, states: Iterable[SequenceState], lengths: Iterable[int], undo: dict[SeqId, Undo], is_whole: bool
    ) -> None:
        for state, length in zip(states, lengths, strict=True):
            state.reservation, state.num_tokens = self, length
        self._undo, self._is_open, self._is_whole = undo, True, is_whole

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
