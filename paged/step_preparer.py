"""Prepares the next forward over a cache while the device runs the one before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from paged.batch import UnifiedBatchItem
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.errors import PagedError
from paged.forward_step import ForwardStep, PreparedStep, forward_step


class StepPreparer:
    """Holds at most one prepared step: the next forward uses it or cancels it, and preparing another cancels it too."""

    def __init__(self, manager: PagedKvCacheManager, *, vocab_size: int, max_seq_len: int) -> None:
        """vocab_size, max_seq_len: the model's."""
        self._manager = manager
        self._limits = {"vocab_size": vocab_size, "max_seq_len": max_seq_len}
        self._prepared: PreparedStep | None = None

    def prepare(self, handles: Sequence[KvCacheHandle]) -> PreparedStep | None:
        """Prepare a forward over one more token of each sequence; None where there is no room for it."""
        self._cancel()
        try:
            self._prepared = PreparedStep(self._manager, handles, **self._limits)
        except PagedError:
            return None
        return self._prepared

    def expects(self, items: Sequence[UnifiedBatchItem]) -> bool:
        """Whether their forward is prepared, which also says that they need no other check."""
        return self._prepared is not None and self._prepared.fits(items)

    def forward(self, items: Sequence[UnifiedBatchItem]) -> AbstractContextManager[ForwardStep]:
        """`forward_step`, with what was prepared."""
        if not self.expects(items):
            self._cancel()
        prepared, self._prepared = self._prepared, None
        return forward_step(self._manager, items, prepared)

    def _cancel(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.cancel()
