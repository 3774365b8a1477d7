"""The live sequences of a cache by request id, their block tables, and the checks of sequence arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.cache.guard import Rollback
from paged.cache.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.cache.pool import BlockPool
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError, PagedError, SequenceTooLongError, StaleHandleError
from paged.kernels.core.errors import as_int, shown
from paged.seq_id import SeqId, as_seq_id
from paged.step.batch import KvSlotRequest, UnifiedBatchItem
from paged.token_ids import MAX_TOKEN_IDS


class BlockTables:
    """Matrix of block ids, one row for each sequence, updated lazily when it is read.

    In a decode step only one sequence in `block_size` has a new block. Converting the ids of all sequences at every
    step would take milliseconds.

    version: changes whenever a row or the sequences of the last `owns` have changed.
    """

    def __init__(self, num_tables: int) -> None:
        self._num_tables = num_tables
        self._rows = np.zeros((num_tables, 16, 16), np.int32)
        self._num_blocks = np.zeros(16, np.int64)
        # Free rows, each with the blocks that it still stores, in the form of `SequenceState.row_blocks`.
        self._free: list[tuple[int, tuple[int, ...] | None]] = [(row, ()) for row in range(16)]
        # Sequence of each row, or None. Removed sequences have row -1, so the last entry is theirs.
        self._owners: list[SequenceState | None] = [None] * 17
        # Most decode steps run the previous step's sequences, and comparing lists is faster than look-ups.
        self._last: list[SequenceState] | None = []
        self._last_rows = np.empty(0, np.int64)
        # Block tables of the sequences in `_last`; None if they must be gathered again.
        self._gathered: NDArray[np.int32] | None = None
        # (row, index) of each block that was added after the block tables were gathered.
        self._grown: list[tuple[int, int]] = []
        self._places: dict[int, int] = {}  # position of each row in `_gathered`
        self.version = 0

    def add(self, state: SequenceState) -> None:
        """Give a sequence a row."""
        if not self._free:
            count = len(self._num_blocks)
            rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=1)
            num_blocks = np.concatenate([self._num_blocks, np.zeros_like(self._num_blocks)])
            owners = [*self._owners, *[None] * count]
            free: list[tuple[int, tuple[int, ...] | None]] = [(row, ()) for row in range(count, 2 * count)]
            # Nothing fails from here on, so the four containers keep the same size.
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
        """Give rows to exactly these sequences, after a call that added or removed a sequence was rolled back."""
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
        """Return whether every sequence has a row here and occurs once."""
        if states != self._last:
            rows = [state.row for state in states]
            if list(map(self._owners.__getitem__, rows)) != states or len(set(rows)) != len(rows):
                return False
            self._last, self._last_rows, self._gathered = states, np.array(rows, np.int64), None
            self._places = {row: place for place, row in enumerate(rows)}
            self.version += 1
        return True

    def gather(self, changed: list[SequenceState]) -> NDArray[np.int32]:
        """Return the block tables of the sequences of the last `owns`, int32 [tables, num_seqs, blocks of the longest].

        Rows are padded with block 0. If no block has changed, this is the same array as before: do not write to it.

        changed: the sequences whose blocks may have changed since the last `update`.
        """
        self.update(changed)
        table, grown = self._gathered, self._grown
        if table is None or max((index for _, index in grown), default=-1) >= table.shape[2]:
            width = int(self._num_blocks[self._last_rows].max(initial=0))
            table = self._rows[:, self._last_rows, :width]
        elif grown:  # a copy takes a quarter of the time of a new gather
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
        state.row_blocks = None  # unknown until all entries are written, because a write may fail
        if old is None:
            self._rows[:, row] = 0
            old = ()
        length = len(new) // count
        while length > self._rows.shape[2]:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=2)
        kept = _first_change(new, old)
        same = kept // count
        if kept == len(old) and same == length - 1:
            # The common case: writing single numbers takes a fifth of the time of writing a slice.
            for table, block in enumerate(new[kept:]):
                self._rows[table, row, same] = block
            self._grown.append((row, same))
            self._num_blocks[row] = length
            state.row_blocks = new
            return
        self._gathered = None
        if kept < len(new) == len(old) and new[kept + 1 :] == old[kept + 1 :]:  # one block was freed behind a window
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
    low, high = 0, min(len(new), len(old))  # binary search: some block before `high` differs, or `new` ends there
    while low < high:
        middle = (low + high + 1) // 2
        if new[low:middle] == old[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


RequestColumns = tuple[list[SeqId], list[int], list[int | None]]


class LiveSequences:
    """All live sequences, and what pins hold.

    handles: handle by request id, oldest first. tables: block ids of the sequences. pinned: sequences of pins, which
    never run, with the time of `time.monotonic` at which they expire.
    """

    def __init__(self, config: PagedKvCacheConfig, pool: BlockPool, rollback: Rollback) -> None:
        self.handles: dict[SeqId, KvCacheHandle] = {}
        self.pinned: dict[SequenceState, float] = {}
        self.tables = BlockTables(len(config.tables))
        self._pool = pool
        self._rollback = rollback
        self._config = config
        self._max_seq_len = config.max_seq_len

    def states(self) -> list[SequenceState]:
        """Return all live sequences, oldest first."""
        return [handle._state for handle in self.handles.values()]

    def holders(self) -> list[SequenceState]:
        """Return everything that holds blocks: all live sequences, then those of pins."""
        return [*self.states(), *self.pinned]

    def add(self, state: SequenceState) -> KvCacheHandle:
        """Register a new sequence; return its handle."""
        handle = KvCacheHandle(state, self._pool, self._config)
        self._rollback.append((setattr, state, "is_valid", False))
        self._rollback.keep_absence(self.handles, (state.seq_id,))
        self.tables.add(state)
        self.handles[state.seq_id] = handle
        return handle

    def remove(self, state: SequenceState) -> None:
        """Remove a sequence after `begin_change`; its handle becomes invalid."""
        self._rollback.append((self.handles.__setitem__, state.seq_id, self.handles[state.seq_id]))
        state.is_valid = False
        self.tables.remove(state)
        del self.handles[state.seq_id]  # last, because a rollback would not restore the order of the dictionary

    def new_id(self, value: object) -> SeqId:
        """Return a `request_id`; raise InvalidInputError if it is invalid or a live sequence has it."""
        seq_id = as_seq_id("request_id", value)
        if seq_id in self.handles:
            raise InvalidInputError(f"request_id: {shown(seq_id)} is the id of a live sequence")
        return seq_id

    def check_length(self, num_tokens: int) -> None:
        """Raise SequenceTooLongError if `num_tokens` exceeds max_seq_len."""
        if self._max_seq_len is not None and num_tokens > self._max_seq_len:
            raise SequenceTooLongError(f"{num_tokens} tokens, expected at most max_seq_len {self._max_seq_len}")

    def check_unused(self, namespace: Hashable) -> None:
        """Raise InvalidInputError if a live sequence of the namespace holds tokens."""
        for handle in self.handles.values():
            if handle.num_tokens and handle._state.namespace == namespace:
                raise InvalidInputError(f"namespace: {shown(namespace)} is in use by {handle.cache_id!r}")

    def state(self, handle: KvCacheHandle, *, may_be_swapped: bool = False) -> SequenceState:
        """Return the sequence of a handle.

        Raises:
            StaleHandleError: it has been freed, or it is swapped out and `may_be_swapped` is false.
            InvalidInputError: it belongs to another manager.
        """
        if not isinstance(handle, KvCacheHandle):
            raise InvalidInputError(f"handle: {shown(handle)}, expected a KvCacheHandle")
        state = handle._state
        if not state.is_valid:
            raise StaleHandleError(f"handle: {state.seq_id!r} has been freed")
        if self.handles.get(state.seq_id) is not handle:
            raise InvalidInputError(f"handle: {state.seq_id!r} belongs to another manager")
        if state.host_blocks is not None and not may_be_swapped:
            raise StaleHandleError(f"handle: {state.seq_id!r} is swapped out")
        return state

    def requested(self, columns: RequestColumns) -> tuple[list[SequenceState], list[int], list[int] | None]:
        """Return the sequences of requests from `as_columns`, their target lengths and their admission lengths.

        The admission lengths are None if they equal the target lengths.
        """
        handles, longest = self.handles, self._max_seq_len
        seq_ids, targets, admissions = columns
        states: list[SequenceState] = []
        admitted: list[int] = []
        for seq_id, target, admission in zip(seq_ids, targets, admissions, strict=True):
            handle = handles.get(seq_id)
            if handle is None:
                raise InvalidInputError(f"cache_id: {shown(seq_id)} is not a live sequence")
            state = handle._state
            if state.host_blocks is not None:
                self.state(handle)
            highest = target if admission is None else admission
            if target < state.num_tokens:
                raise InvalidInputError(
                    f"target_len is the total length: {seq_id!r} holds {state.num_tokens} tokens, got {shown(target)}"
                )
            if highest < target:
                raise InvalidInputError(
                    f"admission_target_len: {shown(admission)} for {seq_id!r}, expected at least target_len {target}"
                )
            if longest is not None and highest > longest:
                self.check_length(highest)
            states.append(state)
            admitted.append(highest)
        if len(set(map(id, states))) != len(states):
            raise InvalidInputError(f"cache_id: {Counter(seq_ids).most_common(1)[0][0]!r} is given twice")
        if set(admissions) <= {None}:
            return states, targets, None
        return states, targets, admitted

    def of_step(self, handles: Sequence[KvCacheHandle], *, any_swapped: bool) -> list[SequenceState]:
        """Return the sequences of a step, all ready to run.

        any_swapped: whether the cache has swapped sequences; if it has none, this is not checked.
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
        """Return the numbers of new tokens of a step; raise InvalidInputError if one is negative or no integer."""
        # Check the set of the counts. It is short, because all counts of a decode step are 1.
        different = set(counts) if set(map(type, counts)) <= {int} else None
        if different is None or min(different, default=0) < 0 or max(different, default=0) > MAX_TOKEN_IDS:
            counts = [as_int("items: new tokens", count, high=MAX_TOKEN_IDS) for count in counts]
        return np.array(counts, np.int64)

    def item_pair(self, item: UnifiedBatchItem) -> tuple[KvCacheHandle, int]:
        """Return a batch item's sequence and number of new tokens; raise InvalidInputError for an unknown sequence."""
        handle = item.kv_cache or self.handles.get(item.seq_id)
        if handle is None:
            raise InvalidInputError(f"items: {item.seq_id!r} is not a live sequence")
        return handle, len(item.q_tokens)


def as_pairs(
    name: str, items: Iterable[Any], convert: Callable[[UnifiedBatchItem], Any] | None = None
) -> tuple[list[KvCacheHandle], list[Any]]:
    """Split pairs into handles and second elements; `convert` turns a batch item into a pair.

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
    """Return checked ids, target and admission lengths of requests. Runs caller code, so call it without the lock."""
    try:
        columns = list(zip(*requests, strict=True))
        seq_ids, targets, admissions = map(list, columns) if columns else ([], [], [])
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidInputError(f"requests: {shown(requests)}, expected KvSlotRequests") from error
    # Check the types of all ids at once, because a step has hundreds of requests.
    if not set(map(type, seq_ids)) <= {str, int}:
        seq_ids = [as_seq_id("cache_id", seq_id) for seq_id in seq_ids]
    if not set(map(type, targets)) <= {int}:
        targets = [as_int("target_len", target) for target in targets]
    if not set(map(type, admissions)) <= {int, NoneType}:
        for i, length in enumerate(admissions):
            if length is not None:
                admissions[i] = as_int("admission_target_len", length)
    return seq_ids, targets, admissions
