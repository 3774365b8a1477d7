"""The live sequences of a cache by request id, their block tables, and the sequences that a call refers to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.batch import KvSlotRequest, UnifiedBatchItem
from paged.cache.guard import Rollback
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.pool import BlockPool
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError, PagedError, SequenceTooLongError, StaleHandleError
from paged.kernels.common.scalars import as_int, shown
from paged.seq_id import SeqId, as_seq_id
from paged.token_ids import MAX_TOKEN_IDS


class BlockTables:
    """Rows of block ids, updated when they are read.

    In a decode step only one sequence in block_size has a new block. Converting all ids of 256 sequences with 512
    blocks would take milliseconds.

    version: another number whenever a row or the sequences of the last `owns` have changed.
    """

    def __init__(self, num_tables: int) -> None:
        self._num_tables = num_tables
        self._rows = np.zeros((num_tables, 16, 16), np.int32)
        self._num_blocks = np.zeros(16, np.int64)
        # Free rows, each with the blocks that it still stores, as `SequenceState.row_blocks`.
        self._free: list[tuple[int, tuple[int, ...] | None]] = [(row, ()) for row in range(16)]
        # Sequence of each row, None for none; the last entry is for removed sequences, whose row is -1.
        self._owners: list[SequenceState | None] = [None] * 17
        # A decode step mostly has the previous step's sequences: comparing 256 takes 1 us, looking them up 20 us.
        self._last: list[SequenceState] | None = []
        self._last_rows = np.empty(0, np.int64)
        # The last ones' table, None if it must be read anew; rows and indices that have got a block since.
        self._gathered: NDArray[np.int32] | None = None
        self._grown: list[tuple[int, int]] = []
        self._places: dict[int, int] = {}  # of rows in that table
        self.version = 0

    def add(self, state: SequenceState) -> None:
        """Give a sequence a row."""
        if not self._free:
            count = len(self._num_blocks)
            rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=1)
            num_blocks = np.concatenate([self._num_blocks, np.zeros_like(self._num_blocks)])
            owners = [*self._owners, *[None] * count]
            free: list[tuple[int, tuple[int, ...] | None]] = [(row, ()) for row in range(count, 2 * count)]
            # Nothing fails from here on: all four have the same size.
            self._rows, self._num_blocks, self._owners, self._free = rows, num_blocks, owners, free
        state.row, state.row_blocks = self._free[-1]
        del self._free[-1]
        self._owners[state.row] = state

    def remove(self, state: SequenceState) -> None:
        """Free a sequence's row."""
        self._last = None
        self._owners[state.row] = None
        self._free.append((state.row, state.row_blocks))
        state.row = -1

    def recount(self, states: list[SequenceState]) -> None:
        """Give rows to exactly these sequences, after a call that adds or removes one was interrupted."""
        owned, count = {state.row: state for state in states if state.row >= 0}, self._rows.shape[1]
        owners = [*map(owned.get, range(count)), None]
        if owners != self._owners or len(self._free) + len(owned) != count or len(self._num_blocks) != count:
            self._owners, self._num_blocks = owners, np.zeros(count, np.int64)
            self._free = [(row, None) for row in range(count) if row not in owned]
            self._last = None
            for state in states:
                state.row_blocks = None
        for state in states:
            if state.row < 0:
                self.add(state)

    def owns(self, states: list[SequenceState]) -> bool:
        """Return whether all of these sequences have rows here, and none occurs twice."""
        if states != self._last:
            rows = [state.row for state in states]
            if list(map(self._owners.__getitem__, rows)) != states or len(set(rows)) != len(rows):
                return False
            self._last, self._last_rows, self._gathered = states, np.array(rows, np.int64), None
            self._places = {row: place for place, row in enumerate(rows)}
            self.version += 1
        return True

    def gather(self, changed: list[SequenceState]) -> NDArray[np.int32]:
        """Return int32 [tables, num_seqs, most blocks of a sequence], padded with block 0, of the last `owns`.

        The same array as before if no block has changed: do not write to it. changed: the sequences whose blocks may
        have changed since the last `update`.
        """
        self.update(changed)
        table, grown = self._gathered, self._grown
        if table is None or max((index for _, index in grown), default=-1) >= table.shape[2]:
            width = int(self._num_blocks[self._last_rows].max(initial=0))
            table = self._rows[:, self._last_rows, :width]
        elif grown:  # of 64 rows a copy takes a quarter of the time
            table = table.copy()
            for row, index in grown:
                place = self._places.get(row)
                if place is not None:
                    table[:, place, index] = self._rows[:, row, index]
        self._gathered, self._grown = table, []
        return table

    def update(self, states: list[SequenceState]) -> None:
        """Store the blocks of these sequences in their rows."""
        for state in states:
            if state.row_blocks is not state.blocks:
                self._store(state)

    def _store(self, state: SequenceState) -> None:
        self.version += 1
        new, old, row, count = state.blocks, state.row_blocks, state.row, self._num_tables
        state.row_blocks = None  # until the row is whole, in case this fails
        if old is None:
            self._rows[:, row] = 0
            old = ()
        length = len(new) // count
        while length > self._rows.shape[2]:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=2)
        kept = _first_change(new, old)
        same = kept // count
        if kept == len(old) and same == length - 1:
            # The common case: writing one number takes a fifth of the time of writing a slice.
            for table, block in enumerate(new[kept:]):
                self._rows[table, row, same] = block
            self._grown.append((row, same))
            self._num_blocks[row] = length
            state.row_blocks = new
            return
        self._gathered = None
        if kept < len(new) == len(old) and new[kept + 1 :] == old[kept + 1 :]:  # freed behind a window
            self._rows[kept % count, row, same] = new[kept]
        else:
            for table in range(count):
                self._rows[table, row, same:length] = new[same * count + table :: count]
            self._rows[:, row, length : len(old) // count] = 0
        self._num_blocks[row] = length
        state.row_blocks = new


def _first_change(new: tuple[int, ...], old: tuple[int, ...]) -> int:
    """Return the index of the first block that differs from `old`, or len(old) if none does."""
    if new[: len(old)] == old:
        return len(old)
    low, high = 0, min(len(new), len(old))  # a block before `high` differs, or `new` ends there
    while low < high:
        middle = (low + high + 1) // 2
        if new[low:middle] == old[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


RequestColumns = tuple[list[SeqId], list[int], list[int | None]]


class LiveSequences:
    """All live sequences. handles: by request id, oldest first. tables: their block ids."""

    def __init__(self, config: PagedKvCacheConfig, pool: BlockPool, rollback: Rollback) -> None:
        self.handles: dict[SeqId, KvCacheHandle] = {}
        self.tables = BlockTables(len(config.tables))
        self._pool = pool
        self._rollback = rollback
        self._config = config
        self._max_seq_len = config.max_seq_len

    def states(self) -> list[SequenceState]:
        """Return all live sequences, oldest first."""
        return [handle._state for handle in self.handles.values()]

    def add(self, state: SequenceState) -> KvCacheHandle:
        """Register a new sequence; return its handle."""
        handle = KvCacheHandle(state, self._pool, self._config)
        self._rollback.append((setattr, state, "is_valid", False))
        self._rollback.keep_absence(self.handles, (state.request_id,))
        self.tables.add(state)
        self.handles[state.request_id] = handle
        return handle

    def remove(self, state: SequenceState) -> None:
        """Remove a sequence that is being changed; its handle becomes invalid."""
        self._rollback.append((self.handles.__setitem__, state.request_id, self.handles[state.request_id]))
        state.is_valid = False
        self.tables.remove(state)
        del self.handles[state.request_id]  # last, because a rollback does not restore the order

    def new_name(self, request_id: object) -> SeqId:
        """Return `request_id` if it is valid and no live sequence has it; else raise InvalidInputError."""
        name = as_seq_id("request_id", request_id)
        if name in self.handles:
            raise InvalidInputError(f"request_id: {shown(name)} is the id of a live sequence")
        return name

    def check_length(self, num_tokens: int) -> None:
        """Raise SequenceTooLongError if `num_tokens` exceeds max_seq_len."""
        if self._max_seq_len is not None and num_tokens > self._max_seq_len:
            raise SequenceTooLongError(f"{num_tokens} tokens, expected at most max_seq_len {self._max_seq_len}")

    def check_unused(self, namespace: Hashable) -> None:
        """Raise InvalidInputError if a sequence of the namespace holds tokens."""
        for handle in self.handles.values():
            if handle.num_tokens and handle._state.namespace == namespace:
                raise InvalidInputError(f"namespace: {shown(namespace)} is in use by {handle.request_id!r}")

    def state(self, handle: KvCacheHandle, *, may_be_swapped: bool = False) -> SequenceState:
        """Return the sequence of a handle.

        Raises:
            StaleHandleError: it has been freed, or is swapped out without `may_be_swapped`.
            InvalidInputError: it belongs to another manager.
        """
        if not isinstance(handle, KvCacheHandle):
            raise InvalidInputError(f"handle: {shown(handle)}, expected a KvCacheHandle")
        state = handle._state
        if not state.is_valid:
            raise StaleHandleError(f"handle: {state.request_id!r} has been freed")
        if self.handles.get(state.request_id) is not handle:
            raise InvalidInputError(f"handle: {state.request_id!r} belongs to another manager")
        if state.host_blocks is not None and not may_be_swapped:
            raise StaleHandleError(f"handle: {state.request_id!r} is swapped out")
        return state

    def requested(self, columns: RequestColumns) -> tuple[list[SequenceState], list[int], list[int] | None]:
        """Return the sequences of the requests in `as_columns`, their target lengths, and the lengths to admit.

        The last is None if it equals the target lengths.
        """
        handles, longest = self.handles, self._max_seq_len
        cache_ids, targets, admissions = columns
        states: list[SequenceState] = []
        admitted: list[int] = []
        for cache_id, target, admission in zip(cache_ids, targets, admissions, strict=True):
            handle = handles.get(cache_id)
            if handle is None:
                raise InvalidInputError(f"cache_id: {shown(cache_id)} is not a live sequence")
            state = handle._state
            if state.host_blocks is not None:
                self.state(handle)
            highest = target if admission is None else admission
            if target < state.num_tokens:
                raise InvalidInputError(
                    f"target_len is the total length: {cache_id!r} holds {state.num_tokens} tokens, got {shown(target)}"
                )
            if highest < target:
                raise InvalidInputError(
                    f"admission_target_len: {shown(admission)} for {cache_id!r}, expected at least target_len {target}"
                )
            if longest is not None and highest > longest:
                self.check_length(highest)
            states.append(state)
            admitted.append(highest)
        if len(set(map(id, states))) != len(states):
            raise InvalidInputError(f"cache_id: {Counter(cache_ids).most_common(1)[0][0]!r} is given twice")
        if set(admissions) <= {None}:
            return states, targets, None
        return states, targets, admitted

    def of_step(self, handles: list[KvCacheHandle], *, any_swapped: bool) -> list[SequenceState]:
        """Return the sequences of a step, all ready to run.

        any_swapped: whether any sequence is swapped out; otherwise this is not checked.
        """
        states = [handle._state for handle in handles]
        is_owned = self.tables.owns(states)
        if not is_owned or any_swapped:
            for handle in handles:
                self.state(handle)
        if not is_owned:
            raise InvalidInputError("items: a sequence is given twice")
        return states

    def query_lens(self, counts: list[Any]) -> NDArray[np.int64]:
        """Return the numbers of new tokens of a step; raise InvalidInputError if one is no integer, or negative."""
        different = set(counts) if set(map(type, counts)) <= {int} else None  # a decode step: all are 1
        if different is None or min(different, default=0) < 0 or max(different, default=0) > MAX_TOKEN_IDS:
            counts = [as_int("items: new tokens", count, high=MAX_TOKEN_IDS) for count in counts]
        return np.array(counts, np.int64)

    def item_pair(self, item: UnifiedBatchItem) -> tuple[KvCacheHandle, int]:
        """Return the sequence of a batch item and the number of its new tokens; raise InvalidInputError if none."""
        handle = item.kv_cache or self.handles.get(item.seq_id)
        if handle is None:
            raise InvalidInputError(f"items: {item.seq_id!r} is not a live sequence")
        return handle, len(item.q_tokens)


def as_pairs(
    name: str, items: Iterable[Any], convert: Callable[[UnifiedBatchItem], Any] | None = None
) -> tuple[list[KvCacheHandle], list[Any]]:
    """Split pairs into handles and second elements; `convert` makes a pair of a batch item.

    Raises:
        InvalidInputError: an element is not a pair that begins with a handle.
    """
    try:
        pairs = list(items)
        if convert is not None and pairs and isinstance(pairs[0], UnifiedBatchItem):
            pairs = list(map(convert, pairs))
        handles: list[KvCacheHandle] = []
        values: list[Any] = []
        if pairs:
            handles, values = map(list, zip(*pairs, strict=True))
        if not set(map(type, handles)) <= {KvCacheHandle}:
            raise TypeError
    except (PagedError, MemoryError):
        raise
    except Exception as error:
        raise InvalidInputError(f"{name}: {shown(items)}, expected pairs that begin with a handle") from error
    return handles, values


def as_columns(requests: Iterable[KvSlotRequest]) -> RequestColumns:
    """Return checked ids, target and admission lengths of requests. Call it without the lock: it runs caller code."""
    try:
        rows = list(requests)
        cache_ids, targets, admissions = map(list, zip(*rows, strict=True)) if rows else ([], [], [])
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidInputError(f"requests: {shown(requests)}, expected KvSlotRequests") from error
    # Check the types of all at once: a step has a request for each of hundreds of sequences.
    if not set(map(type, cache_ids)) <= {str, int}:
        cache_ids = [as_seq_id("cache_id", cache_id) for cache_id in cache_ids]
    if not set(map(type, targets)) <= {int}:
        targets = [as_int("target_len", target) for target in targets]
    if not set(map(type, admissions)) <= {int, NoneType}:
        for i, length in enumerate(admissions):
            if length is not None:
                admissions[i] = as_int("admission_target_len", length)
    return cache_ids, targets, admissions
