"""Gives back blocks behind the sliding window of every layer, which no later token can see."""

from __future__ import annotations

from collections.abc import Iterable

from paged.cache.blocks.pool import BlockPool
from paged.cache.blocks.undo_log import UndoLog
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.slot_reservation import SequenceState
from paged.errors import InvalidInputError

# Positions behind the sliding window that are kept, so that rejected speculation can be rolled back.
ROLLBACK_SLACK = 64


class SlidingWindow:
    """Gives back what is out of later tokens' reach; where the cache has no window, nothing is."""

    def __init__(self, config: PagedKvCacheConfig, pool: BlockPool, undo: UndoLog) -> None:
        self._config = config
        self._undo = undo
        self._pool = pool

    def drop_unseen(self, states: Iterable[SequenceState]) -> None:
        """Give back blocks that lie behind the sliding window of every later token."""
        if self._config.sliding_window is None:
            return
        for state in states:
            first = self._first_seen_block(state.num_tokens, ROLLBACK_SLACK)
            if any(state.blocks[:first]):
                state.remember(self._undo)
                self._pool.release(state.blocks[:first])
                state.blocks = (0,) * first + state.blocks[first:]

    def check_rollback(self, state: SequenceState, num_tokens: int) -> None:
        """Raise InvalidInputError if what the token after `num_tokens` sees has been given back."""
        if 0 in state.blocks[self._first_seen_block(num_tokens, 0) : self._config.blocks_for(num_tokens)]:
            raise InvalidInputError(f"num_tokens: {num_tokens}, its sliding window has been given back in part")

    def check_seen(self, state: SequenceState, start: int, end: int) -> None:
        """Raise InvalidInputError if one of the positions start..end has been given back."""
        if start < end and 0 in state.blocks[start // self._config.block_size : self._config.blocks_for(end)]:
            raise InvalidInputError(f"positions {start}..{end} of {state.request_id!r} lie behind its sliding window")

    def _first_seen_block(self, num_tokens: int, slack: int) -> int:
        """Index of the first block that the token after `num_tokens`, or after `slack` fewer, can see."""
        window = self._config.sliding_window
        return 0 if window is None else max(0, num_tokens - slack - window + 1) // self._config.block_size
