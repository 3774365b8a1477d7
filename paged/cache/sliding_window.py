"""Frees blocks behind the sliding windows of tables, which no later token can see."""

from __future__ import annotations

from collections.abc import Sequence

from paged.cache.blocks.pool import BlockPool
from paged.cache.blocks.rollback import Rollback
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError


class SlidingWindow:
    """Frees blocks that later tokens cannot see; does nothing without a window."""

    def __init__(self, config: PagedKvCacheConfig, pool: BlockPool, rollback: Rollback) -> None:
        self._block_size, self._tables = config.block_size, config.tables
        self._windows = [pair for pair in enumerate(config.tables) if pair[1].sliding_window is not None]
        # For each table: its reach, and the index that its block -1 would have in `blocks`.
        self._reaches = [(table.reach, index - len(config.tables)) for index, table in self._windows]
        self._rollback = rollback
        self._pool = pool

    def drop_unseen(self, states: Sequence[SequenceState]) -> None:
        """Free blocks that lie behind the sliding window of every later token."""
        block_size, step = self._block_size, len(self._tables)
        for reach, before in self._reaches:
            late = [
                state
                for state in states
                if (gone := state.num_tokens - reach) >= block_size and state.blocks[gone // block_size * step + before]
            ]
            for state in late:
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
        if any(self._has_gap(state, index, first, target) for index, _ in self._windows):
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
