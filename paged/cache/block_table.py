"""Block ids of all live sequences as rows of an array, from which the tables of a step are gathered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.cache.slot_reservation import SequenceState


class BlockTables:
    """Rows of block ids, updated when they are read.

    In a decode step only one sequence in block_size has a new block. Converting all ids of 256 sequences with 512
    blocks would take milliseconds.
    """

    def __init__(self, num_tables: int) -> None:
        self._num_tables = num_tables
        self._rows = np.zeros((num_tables, 16, 16), np.int32)
        self._num_blocks = np.zeros(16, np.int64)
        # Free rows, each with the blocks that it still stores.
        self._free: list[tuple[int, tuple[int, ...]]] = [(row, ()) for row in range(16)]
        # Sequence of each row, None for none; the last entry is for removed sequences, whose row is -1.
        self._owners: list[SequenceState | None] = [None] * 17
        self._is_updating = False
        # A decode step mostly has the previous step's sequences: comparing 256 takes 1 us, looking them up 20 us.
        self._last: list[SequenceState] = []
        self._last_rows = np.empty(0, np.int64)

    def add(self, state: SequenceState) -> None:
        """Give a sequence a row."""
        if not self._free:
            count = len(self._num_blocks)
            rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=1)
            num_blocks = np.concatenate([self._num_blocks, np.zeros_like(self._num_blocks)])
            owners = [*self._owners, *[None] * count]
            free: list[tuple[int, tuple[int, ...]]] = [(row, ()) for row in range(count, 2 * count)]
            # Nothing fails from here on: all four have the same size.
            self._rows, self._num_blocks, self._owners, self._free = rows, num_blocks, owners, free
        state.row, state.row_blocks = self._free[-1]
        del self._free[-1]
        self._owners[state.row] = state

    def remove(self, state: SequenceState) -> None:
        """Free a sequence's row."""
        self._last = []
        self._owners[state.row] = None
        self._free.append((state.row, state.row_blocks))
        state.row = -1

    def recount(self, states: list[SequenceState]) -> None:
        """Give rows to exactly these sequences, after a call that adds or removes one was interrupted."""
        owned, count = {state.row: state for state in states if state.row >= 0}, self._rows.shape[1]
        owners = [*map(owned.get, range(count)), None]
        if owners != self._owners or len(self._free) + len(owned) != count or len(self._num_blocks) != count:
            self._owners, self._num_blocks = owners, np.zeros(count, np.int64)
            self._free = [(row, ()) for row in range(count) if row not in owned]
            self._last, self._is_updating = [], True
        for state in states:
            if state.row < 0:
                self.add(state)

    def owns(self, states: list[SequenceState]) -> bool:
        """Return whether all of these sequences have rows here, and none occurs twice."""
        if states != self._last:
            rows = [state.row for state in states]
            if list(map(self._owners.__getitem__, rows)) != states or len(set(rows)) != len(rows):
                return False
            self._last, self._last_rows = states, np.array(rows, np.int64)
        return True

    def at(self, states: list[SequenceState], indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return int32 [len(states)], the first table's block of each at an index up to its number of blocks, or 0."""
        self._update(states)
        blocks: NDArray[np.int32] = self._rows[0, self._last_rows, indices]
        return blocks

    def gather(self, changed: list[SequenceState]) -> NDArray[np.int32]:
        """Return int32 [tables, num_seqs, most blocks of a sequence], padded with block 0, of the sequences of the last
        `owns`. changed: those whose blocks may have changed since the last `at` for them; else all."""
        self._update(changed)
        width = int(self._num_blocks[self._last_rows].max(initial=0))
        return self._rows[:, self._last_rows, :width]

    def _update(self, states: list[SequenceState]) -> None:
        """Store the blocks of these sequences in their rows."""
        if self._is_updating:  # an earlier call was interrupted, so rows may hold anything
            self._rows[:] = 0
            self._free = [(row, ()) for row, _ in self._free]
            for owner in filter(None, self._owners):
                owner.row_blocks = ()
        self._is_updating = True
        for state in states:
            if state.row_blocks is not state.blocks:
                self._store(state)
        self._is_updating = False

    def _store(self, state: SequenceState) -> None:
        new, old, row, count = state.blocks, state.row_blocks, state.row, self._num_tables
        length = len(new) // count
        while length >= self._rows.shape[2]:  # `at` may read one more
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=2)
        kept = _first_change(new, old)
        same = kept // count
        if kept == len(old) and same == length - 1:
            # The common case: writing one number takes a fifth of the time of writing a slice.
            for table, block in enumerate(new[kept:]):
                self._rows[table, row, same] = block
        elif kept < len(new) == len(old) and new[kept + 1 :] == old[kept + 1 :]:  # freed behind a window
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
