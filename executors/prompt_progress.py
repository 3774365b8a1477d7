"""Tells rows of prompts from decodes, for the counts of an executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paged.batch import UnifiedBatch, UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from paged.executors.row_batches import is_decode_step
from paged.executors.status import ForwardWork


class PromptProgress:
    """Knows which prompts have chunks left to run. handle_of: the live handle of an item's cache, None without one."""

    def __init__(self, handle_of: Callable[[UnifiedBatchItem], KvCacheHandle | None]) -> None:
        self._handle_of = handle_of
        self._unfinished: set[KvCacheHandle] = set()

    def work_of(self, batch: UnifiedBatch) -> ForwardWork:
        """What the forward of a batch does."""
        decodes = [
            len(item.q_tokens)
            for item in batch.items
            if is_decode_step(item) and not self._is_unfinished(self._handle_of(item), item.pos_offset)
        ]
        rows = sum(decodes)
        return ForwardWork(batch.num_sampled_items - len(decodes), batch.total_q_tokens - rows, rows)

    def work_of_next_tokens(self, handles: Sequence[KvCacheHandle]) -> ForwardWork:
        """What a forward of one more token of each sequence does."""
        decodes = sum(one.num_tokens > 0 and not self._is_unfinished(one, one.num_tokens) for one in handles)
        return ForwardWork(len(handles) - decodes, len(handles) - decodes, decodes)

    def update(self, items: Sequence[UnifiedBatchItem]) -> None:
        """Note which prompts have chunks left, after a forward with some."""
        handles = [(self._handle_of(item), item.is_final_chunk) for item in items]
        unfinished = self._unfinished | {one for one, is_final in handles if one is not None and not is_final}
        unfinished -= {one for one, is_final in handles if is_final}
        self._unfinished = {handle for handle in unfinished if handle.is_valid}

    def _is_unfinished(self, handle: KvCacheHandle | None, length: int) -> bool:
        """Whether its next token is of a prompt: chunks of it are left, or it begins with a cached prefix."""
        if handle is None:
            return False
        return 0 < handle.num_cached_tokens == length or handle in self._unfinished
