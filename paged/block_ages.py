"""How long blocks live and how long cached ones wait, from a sample of them."""

from __future__ import annotations

import time
from collections.abc import Iterable

_NUM_BUCKETS = 24
# Of every 16th call that hands out blocks the first block is watched.
_SAMPLE_EVERY = 16


class BlockAges:
    """Histograms over powers of two of a millisecond: bucket i counts ages below 2^i ms, the last one all above."""

    def __init__(self) -> None:
        self.lifetimes = [0] * _NUM_BUCKETS
        self.reuse_gaps = [0] * _NUM_BUCKETS
        self._since: dict[int, float] = {}
        self._calls = 0

    def taken(self, block: int) -> None:
        """`block`, with others perhaps, was handed out."""
        self._calls += 1
        if self._calls % _SAMPLE_EVERY == 0 or block in self._since:
            self._since[block] = time.monotonic()

    def freed(self, blocks: Iterable[int]) -> None:
        """The last references of `blocks` were dropped."""
        self._count(self.lifetimes, blocks)

    def revived(self, blocks: Iterable[int]) -> None:
        """They were taken up again while they were free."""
        self._count(self.reuse_gaps, blocks)

    def _count(self, histogram: list[int], blocks: Iterable[int]) -> None:
        if self._since.keys().isdisjoint(blocks):
            return
        now = time.monotonic()
        for block in self._since.keys() & blocks:
            milliseconds = int((now - self._since[block]) * 1e3)
            histogram[min(milliseconds.bit_length(), _NUM_BUCKETS - 1)] += 1
            self._since[block] = now
