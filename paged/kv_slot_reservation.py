"""Room that a whole batch holds until its forward has succeeded or failed, and the state of the sequences it is for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from types import TracebackType

from paged.block_pool import BlockPool
from paged.cache_events import Notifier
from paged.errors import InvalidInputError
from paged.seq_id import SeqId
from paged.token_chain import TokenChain


@dataclass(eq=False, slots=True)
class SequenceState:
    """What the manager knows of one sequence; callers see it through a KvCacheHandle.

    num_written: positions below it were written through write_kv, without a gap after num_tokens.
    blocks is replaced, never changed in place, so an old value can be kept to go back to.
    chain: what is known of the tokens, and published of them.
    host_blocks: while swapped out, the host block by index in `blocks`, where 0 stands meanwhile.
    row, row_blocks: the sequence's row in the manager's table, and the blocks that stand there.
    """

    request_id: SeqId
    namespace: Hashable
    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_written: int = 0
    is_valid: bool = True
    reservation: KvSlotReservation | None = None
    chain: TokenChain = field(default_factory=TokenChain)
    host_blocks: dict[int, int] | None = None
    row: int = 0
    row_blocks: tuple[int, ...] = ()

    def settle(self) -> None:
        """Take the sequence out of the open reservation it is in, as it stands."""
        if self.reservation is not None:
            self.reservation.settle(self)


@dataclass(slots=True)
class Undo:
    """What takes back what a reservation changed of one sequence.

    replaced: shared block by its index in `blocks`, where a copy stands now; the reservation keeps the reference.
    """

    num_blocks: int
    num_written: int
    replaced: dict[int, int]


class KvSlotReservation:
    """Room for a whole batch, as a context manager.

    `commit()` moves every sequence to its target length. `rollback()`, or leaving by an exception, takes the room back
    and undoes copies. Leaving normally without either keeps the room and leaves the lengths alone. A sequence that
    another call changes meanwhile is settled as if left normally; commit and rollback pass it over.
    """

    def __init__(
        self,
        guard: Notifier,
        pool: BlockPool,
        states: Sequence[SequenceState],
        targets: Sequence[int],
        undo: dict[SeqId, Undo],
        on_commit: Callable[[Sequence[SequenceState], Sequence[Sequence[int]] | None], None],
    ) -> None:
        self._guard = guard
        self._pool = pool
        self._states = states
        self._targets = targets
        self._undo = undo
        self._on_commit = on_commit
        self._is_open = True
        self._is_whole = True
        for state, target in zip(states, targets, strict=True):
            if target > state.num_tokens:
                state.reservation = self
            else:  # one that grows by nothing has nothing to keep or to take back
                self._is_whole = False

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or rolled back."""
        return self._is_open

    @property
    def is_whole(self) -> bool:
        """Whether it is open, all of its sequences grow by it, and no other call has changed one of them since."""
        return self._is_whole

    @property
    def kept_blocks(self) -> list[int]:
        """Shared blocks that copies replaced, kept to go back to."""
        return [block for undo in self._undo.values() for block in undo.replaced.values()]

    def covers(self, states: Sequence[SequenceState], targets: Sequence[int]) -> bool:
        """Whether exactly these sequences have room for exactly these lengths, and none has changed since."""
        return self._is_whole and states == self._states and targets == self._targets

    def commit(self, token_ids: Sequence[Sequence[int]] | None = None) -> None:
        """Every sequence now holds valid K/V up to its target length.

        token_ids: the ids of each sequence's new tokens, in the order of the requests: full blocks are published.

        Raises:
            InvalidInputError: committed, rolled back or left before.
        """
        with self._guard:
            if not self._is_open:
                raise InvalidInputError("commit: the reservation is closed")
            is_ours = [state.reservation is self for state in self._states]
            grown = list(compress(self._states, is_ours))
            for state, target in zip(grown, compress(self._targets, is_ours), strict=True):
                state.num_tokens = target
            self._close()
            self._on_commit(grown, None if token_ids is None else list(compress(token_ids, is_ours)))

    def rollback(self) -> None:
        """Blocks, reference counts and lengths of sequences that were to grow are again as before the reservation. Does
        nothing once it is closed.
        """
        with self._guard:
            for state in self._states:
                undo = self._undo.get(state.request_id) if state.reservation is self else None
                if undo is None:
                    continue
                blocks = list(state.blocks)
                dropped = blocks[undo.num_blocks :]
                for index, original in undo.replaced.items():
                    dropped.append(blocks[index])
                    blocks[index] = original
                undo.replaced = {}
                state.blocks = tuple(blocks[: undo.num_blocks])
                state.num_written = undo.num_written
                self._pool.release(dropped)
            self._close()

    def settle(self, state: SequenceState) -> None:
        """Leave one sequence as it stands: its room stays, and so does its length."""
        state.reservation = None
        self._is_whole = False
        undo = self._undo.pop(state.request_id, None)
        if undo is not None:
            self._pool.release(list(undo.replaced.values()))

    def _close(self) -> None:
        if self._is_open:
            for state in self._states:
                if state.reservation is self:
                    state.reservation = None
            for undo in self._undo.values():
                if undo.replaced:  # seldom, and 16 calls that release nothing are 2 % of a decode step of 256 sequences
                    self._pool.release(list(undo.replaced.values()))
            self._undo = {}
            self._is_open = self._is_whole = False

    def __enter__(self) -> KvSlotReservation:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._guard:
            if exc_type is not None:
                self.rollback()
            else:
                self._close()
