"""Lifetimes of blocks, and times until cached blocks are reused, from a sample."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

_NUM_BUCKETS = 24
# In every 16th call that hands out blocks, the first block is sampled, at most 256 at a time. This takes 2 us of the 25
# us of a call for 128 blocks.
_SAMPLE_EVERY = 16
_MAX_WATCHED = 256


class BlockAges:
    """Histograms with powers of two of a millisecond: bucket i counts ages below 2^i ms, the last bucket all above."""

    def __init__(self) -> None:
        self.lifetimes = [0] * _NUM_BUCKETS
        self.reuse_gaps = [0] * _NUM_BUCKETS
        self._since: dict[int, float] = {}
        self._calls = 0

    def taken(self, blocks: Sequence[int]) -> None:
        """Record that `blocks` were handed out; a sampled block among them is no longer sampled."""
        if self._since and not self._since.keys().isdisjoint(blocks):
            for block in self._since.keys() & blocks:
                del self._since[block]
        self._calls += 1
        if blocks and self._calls % _SAMPLE_EVERY == 0 and len(self._since) < _MAX_WATCHED:
            self._since[blocks[0]] = time.monotonic()

    def count(self, histogram: list[int], blocks: Iterable[int]) -> None:
        """Count the sampled ones of `blocks` in `lifetimes` when freed, in `reuse_gaps` when shared again."""
        if not self._since or self._since.keys().isdisjoint(blocks):
            return
        now = time.monotonic()
        for block in self._since.keys() & blocks:
            milliseconds = int((now - self._since[block]) * 1e3)
            histogram[min(milliseconds.bit_length(), _NUM_BUCKETS - 1)] += 1
            self._since[block] = now
