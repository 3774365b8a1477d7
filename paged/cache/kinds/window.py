"""Tables with a window: blocks that no later token sees are freed, and a hit needs only the window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paged.cache.kinds.kind import Kind, Match
from paged.errors import InvalidInputError

if TYPE_CHECKING:
    from paged.cache.groups import CacheGroup
    from paged.cache.kinds.kind import CacheParts
    from paged.cache.slot_reservation import SequenceState


class WindowTable(Kind):
    """Block tables of layers with the same window, or with another rule of `CacheGroup.first_seen_block`."""

    group: CacheGroup

    def __init__(self, group: CacheGroup, columns: range, parts: CacheParts) -> None:
        super().__init__(group, columns, parts)
        self._reach = group.reach
        self._is_plain = group.sliding_window is not None

    def drop(self, states: Sequence[SequenceState]) -> None:
        """Free the blocks that no later token can see."""
        blocks_gone, block_size, num_tables = self.group.blocks_gone, self._block_size, self._num_tables
        before = self.columns.start - num_tables  # the first table holds a block wherever the others do
        if self._is_plain:  # comparing lengths takes a fifth of the time of asking the group about each sequence
            reach, due = self._reach, []
            for state in states:
                gone = state.num_tokens - reach
                if gone >= block_size and state.blocks[gone // block_size * num_tables + before]:
                    due.append(state)
            states = due
        for state in states:
            end = blocks_gone(state.num_tokens, block_size) * num_tables
            if end and state.blocks[end + before]:
                self._drop(state, end)

    def _drop(self, state: SequenceState, end: int) -> None:
        """Free this kind's blocks before the index `end` in `state.blocks`."""
        blocks = state.blocks
        dropped = []
        for column in self.columns:
            last = end - self._num_tables + column
            while last >= 0 and blocks[last]:  # all blocks before a freed one are freed
                dropped.append(last)
                last -= self._num_tables
        state.keep(self._rollback)
        kept = list(blocks)
        for position in dropped:
            kept[position] = 0
        self._pool.release([blocks[position] for position in reversed(dropped)])
        state.blocks = tuple(kept)

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Raise InvalidInputError unless the tables have all blocks from the length to `target`."""
        if call == "advance" and self._has_gap(state, state.num_tokens // self._block_size, target):
            raise InvalidInputError(f"num_tokens: length {target}, but not all blocks before it are allocated")

    def check_truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError if the token after `num_tokens` would see a freed block."""
        if self._has_gap(state, self.group.first_seen_block(num_tokens, self._block_size), num_tokens):
            raise InvalidInputError(f"num_tokens: {num_tokens}, but part of its sliding window has been freed")

    def check_read(self, state: SequenceState, column: int, start: int, end: int) -> None:
        """Raise InvalidInputError if one of the positions start..end has been freed."""
        if column not in self.columns or start >= end:
            return
        first, last = start // self._block_size, -(-min(end, state.num_tokens) // self._block_size)
        if 0 in state.blocks[first * self._num_tables + column : last * self._num_tables : self._num_tables]:
            raise InvalidInputError(f"positions {start}..{end} of {state.seq_id!r} lie behind its sliding window")

    def check_share(self, giver: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError if the giver lacks a block that the token after `num_tokens` sees."""
        for column in self.columns:
            first = self.group.first_seen_block(num_tokens, self._block_size) if column else 0
            last = num_tokens // self._block_size
            if 0 in giver.blocks[first * self._num_tables + column : last * self._num_tables : self._num_tables]:
                raise InvalidInputError("source: the first of these blocks lie behind its sliding window")

    def usable(self, match: Match) -> NDArray[np.bool_] | None:
        """A hit may end where the tables have all blocks that the next token sees."""
        num_positions = len(match.has_block)
        is_complete = match.has_block[:, self.columns.start : self.columns.stop].all(axis=1)
        last_gap = np.maximum.accumulate(np.where(is_complete, -1, np.arange(num_positions)))
        lengths = match.lengths(self._block_size)
        first_seen = [self.group.first_seen_block(length, self._block_size) for length in lengths]
        is_usable = np.ones(num_positions + 1, bool)
        is_usable[1:] = last_gap < first_seen[1:]
        return is_usable

    def _has_gap(self, state: SequenceState, first: int, num_tokens: int) -> bool:
        """Return whether a table lacks a block, at position `first` or later, for the first `num_tokens`."""
        last = -(-num_tokens // self._block_size)
        for column in self.columns:
            if 0 in state.blocks[first * self._num_tables + column : last * self._num_tables : self._num_tables]:
                return True
        return False
