"""The sequences of a cache by their names, and those that a call means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged.batch import KvSlotRequest, UnifiedBatchItem
from paged.block_pool import BlockPool
from paged.block_table import BlockTable
from paged.errors import InvalidInputError, SequenceTooLongError, StaleHandleError
from paged.kv_cache import KvCacheHandle, PagedKvCacheConfig
from paged.kv_slot_reservation import SequenceState
from paged.seq_id import SeqId


class LiveSequences:
    """handles: of all sequences by name, oldest first. table: their block ids."""

    def __init__(self, config: PagedKvCacheConfig, pool: BlockPool) -> None:
        self.handles: dict[SeqId, KvCacheHandle] = {}
        self.table = BlockTable()
        self._pool = pool
        self._block_size = config.block_size
        self._max_seq_len = config.max_seq_len

    def add(self, state: SequenceState) -> KvCacheHandle:
        """The handle of a new sequence."""
        self.table.add(state)
        handle = KvCacheHandle(state, self._pool, self._block_size)
        self.handles[state.request_id] = handle
        return handle

    def remove(self, state: SequenceState) -> None:
        """Forget a sequence; its handle says so from now on."""
        state.is_valid = False
        self.table.remove(state)
        del self.handles[state.request_id]

    def check_new(self, request_id: SeqId) -> None:
        """Raise InvalidInputError if a sequence has that name."""
        if request_id in self.handles:
            raise InvalidInputError(f"request_id: {request_id!r} names a live sequence")

    def check_length(self, num_tokens: int) -> None:
        """Raise SequenceTooLongError if no sequence may be that long."""
        if self._max_seq_len is not None and num_tokens > self._max_seq_len:
            raise SequenceTooLongError(f"{num_tokens} tokens, max_seq_len is {self._max_seq_len}")

    def state(self, handle: KvCacheHandle, *, may_be_swapped: bool = False) -> SequenceState:
        """The sequence of a handle.

        Raises:
            StaleHandleError: it has been freed, or is swapped out and may not be.
            InvalidInputError: it belongs to another manager.
        """
        state = handle._state
        if not state.is_valid:
            raise StaleHandleError(f"handle: {state.request_id!r} has been freed")
        if self.handles.get(state.request_id) is not handle:
            raise InvalidInputError(f"handle: {state.request_id!r} belongs to another manager")
        if state.host_blocks is not None and not may_be_swapped:
            raise StaleHandleError(f"handle: {state.request_id!r} is swapped out")
        return state

    def requested(self, requests: Sequence[KvSlotRequest]) -> list[SequenceState]:
        """The sequences of requests that are well formed.

        Raises:
            InvalidInputError, StaleHandleError, SequenceTooLongError: one is not.
        """
        handles, longest = self.handles, self._max_seq_len
        states = []
        for cache_id, target, admission in requests:
            handle = handles.get(cache_id)
            if handle is None:
                raise InvalidInputError(f"cache_id: {cache_id!r} names no live sequence")
            state = handle._state
            if state.host_blocks is not None:
                self.state(handle)
            highest = target if admission is None else admission
            if not state.num_tokens <= target <= highest:
                raise InvalidInputError(
                    f"target_len, admission_target_len: {target}, {admission} for {cache_id!r}, "
                    f"expected {state.num_tokens} <= target_len <= admission_target_len"
                )
            if longest is not None and highest > longest:
                self.check_length(highest)
            states.append(state)
        if len(set(map(id, states))) != len(states):
            repeated = Counter(cache_id for cache_id, _, _ in requests).most_common(1)[0][0]
            raise InvalidInputError(f"cache_id: {repeated!r} is given twice")
        return states

    def of_step(
        self, items: Iterable[UnifiedBatchItem] | Iterable[tuple[KvCacheHandle, int]], *, any_swapped: bool
    ) -> tuple[list[SequenceState], NDArray[np.int64]]:
        """The sequences of a step, all of them able to run, and how many tokens each gets.

        any_swapped: whether there are sequences that are swapped out; else none is looked for.

        Raises:
            InvalidInputError, StaleHandleError: one is unknown, freed, swapped out, given twice or gets less than none.
        """
        pairs: list[Any] = list(items)
        if pairs and isinstance(pairs[0], UnifiedBatchItem):
            pairs = [self._item_tokens(item) for item in pairs]
        states = [handle._state for handle, _ in pairs]
        is_owned = self.table.owns(states)
        if not is_owned or any_swapped:
            for handle, _ in pairs:
                self.state(handle)
        if not is_owned:
            raise InvalidInputError("items: a sequence is given twice")
        counts = np.array([count for _, count in pairs], np.int64)
        if counts.min(initial=0) < 0:
            raise InvalidInputError(f"items: {counts.min()} new tokens, expected at least 0")
        return states, counts

    def _item_tokens(self, item: UnifiedBatchItem) -> tuple[KvCacheHandle, int]:
        handle = item.kv_cache or self.handles.get(item.seq_id)
        if handle is None:
            raise InvalidInputError(f"items: {item.seq_id!r} names no live sequence")
        return handle, len(item.q_tokens)
