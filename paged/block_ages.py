"""How long blocks live and how long cached ones wait, from a sample of them."""

from __future__ import annotations

import time

# Every 64th block is watched: a 64th of the bookkeeping, and thousands of blocks in any pool where the figures matter.
SAMPLE_MASK = 63
_NUM_BUCKETS = 24


class BlockAges:
    """Histograms over powers of two of a millisecond: bucket i counts ages below 2^i ms, the last one all above."""

    def __init__(self) -> None:
        self.lifetimes = [0] * _NUM_BUCKETS
        self.reuse_gaps = [0] * _NUM_BUCKETS
        self._since: dict[int, float] = {}

    def taken(self, block: int) -> None:
        """A watched block was handed out."""
        self._since[block] = time.monotonic()

    def freed(self, block: int) -> None:
        """Its last reference was dropped."""
        self._count(self.lifetimes, block)

    def revived(self, block: int) -> None:
        """It was taken up again while it was free."""
        self._count(self.reuse_gaps, block)

    def _count(self, histogram: list[int], block: int) -> None:
        now = time.monotonic()
        milliseconds = int((now - self._since.get(block, now)) * 1e3)
        histogram[min(milliseconds.bit_length(), _NUM_BUCKETS - 1)] += 1
        self._since[block] = now
