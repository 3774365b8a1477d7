"""Every live sequence's block ids as rows of an array, from which a step's tables are gathered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged.cache.slot_reservation import SequenceState


class BlockTables:
    """Rows are brought up to date when they are read: in a decode step one sequence in block_size has a new block, and
    converting all ids of 256 sequences of 512 blocks would take milliseconds.
    """

    def __init__(self, num_tables: int) -> None:
        self._num_tables = num_tables
        self._rows = np.zeros((num_tables, 16, 16), np.int32)
        self._num_blocks = np.zeros(16, np.int64)
        # Rows without a sequence, each with the blocks it still holds.
        self._free: list[tuple[int, tuple[int, ...]]] = [(row, ()) for row in range(16)]
        # The sequence of each row, None for none; the last entry is what row -1 of removed sequences leads to.
        self._owners: list[SequenceState | None] = [None] * 17
        self._is_updating = False
        # A decode step mostly has the sequences of the one before: comparing 256 takes 1 us, looking them up 20.
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
            # Nothing fails from here on: the four are of one size.
            self._rows, self._num_blocks, self._owners, self._free = rows, num_blocks, owners, free
        state.row, state.row_blocks = self._free[-1]
        del self._free[-1]
        self._owners[state.row] = state

    def remove(self, state: SequenceState) -> None:
        """Take its row back."""
        self._last = []
        self._owners[state.row] = None
        self._free.append((state.row, state.row_blocks))
        state.row = -1

    def recount(self, states: list[SequenceState]) -> None:
        """Give these sequences rows, and no others, where a call that adds or removes one came to no end."""
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
        """Whether all of them have rows here, and none is given twice."""
        if states != self._last:
            rows = [state.row for state in states]
            if list(map(self._owners.__getitem__, rows)) != states or len(set(rows)) != len(rows):
                return False
            self._last, self._last_rows = states, np.array(rows, np.int64)
        return True

    def gather(self, states: list[SequenceState]) -> NDArray[np.int32]:
        """int32 [tables, len(states), most blocks of one], padded with block 0; for states that `owns` has just
        approved.
        """
        if self._is_updating:  # a call before came to no end, so that rows hold anything
            self._rows[:] = 0
            self._free = [(row, ()) for row, _ in self._free]
            for owner in filter(None, self._owners):
                owner.row_blocks = ()
        self._is_updating = True
        for state in states:
            if state.row_blocks is not state.blocks:
                self._update(state)
        self._is_updating = False
        width = int(self._num_blocks[self._last_rows].max(initial=0))
        return self._rows[:, self._last_rows, :width]

    def _update(self, state: SequenceState) -> None:
        new, old, row, count = state.blocks, state.row_blocks, state.row, self._num_tables
        length = len(new) // count
        while length > self._rows.shape[2]:
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)], axis=2)
        kept = _first_change(new, old)
        same = kept // count
        if kept == len(old) and same == length - 1:
            # Mostly: writing one number takes a fifth of the time of writing a slice.
            for table, block in enumerate(new[kept:]):
                self._rows[table, row, same] = block
        elif kept < len(new) == len(old) and new[kept + 1 :] == old[kept + 1 :]:  # given back behind a window
            self._rows[kept % count, row, same] = new[kept]
        else:
            for table in range(count):
                self._rows[table, row, same:length] = new[same * count + table :: count]
            self._rows[:, row, length : len(old) // count] = 0
        self._num_blocks[row] = length
        state.row_blocks = new


def _first_change(new: tuple[int, ...], old: tuple[int, ...]) -> int:
    """Index of the first block that is another one, of those that `old` has; len(old) if none is."""
    if new[: len(old)] == old:
        return len(old)
    low, high = 0, min(len(new), len(old))  # one before `high` is another, or `new` ends there
    while low < high:
        middle = (low + high + 1) // 2
        if new[low:middle] == old[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
