"""The threads of some CTAs that run in step: their numbers, and when each CTA passed its barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paged.bench.compiled.errors import StoppedError
from paged.bench.compiled.numerics import Array

WARP_SIZE = 32
# A time is CTA << 40 | epoch << 8 | warp. The epoch counts the CTA's barriers, which order accesses of other epochs.
# CTAs and epochs count from 1, so that 0 is no time.
CTA_SHIFT = 40
EPOCH_SHIFT = 8
WARP_MASK = 255
NEXT_EPOCH = 1 << EPOCH_SHIFT
SEVERAL_WARPS = 255

Cta = tuple[int, int, int]


class Threads:
    """Threads of CTAs, one CTA after the other.

    cta: place of a thread's CTA among those that run together. lane, warp: within its CTA. time: see above.
    special: PTX's special registers.
    """

    def __init__(self, ctas: Sequence[Cta], per_cta: int, grid: Cta) -> None:
        self.per_cta = per_cta
        self.num_ctas = len(ctas)
        self.total = per_cta * len(ctas)
        self.cta = np.repeat(np.arange(len(ctas)), per_cta)
        in_cta = np.tile(np.arange(per_cta, dtype=np.uint32), len(ctas))
        self.lane = (in_cta & np.uint32(31)).astype(np.int64)
        self.warp = (in_cta >> np.uint32(5)).astype(np.int64)
        numbers = [(z * grid[1] + y) * grid[0] + x + 1 for x, y, z in ctas]
        self.cta_number = np.repeat(np.array(numbers, np.int64), per_cta)
        self.time = (self.cta_number << CTA_SHIFT) | NEXT_EPOCH | self.warp
        self.all = np.ones(self.total, bool)
        self.special: dict[str, Array] = {
            "tid": in_cta,
            "tid.x": in_cta,
            "laneid": in_cta & np.uint32(31),
            "warpid": in_cta >> np.uint32(5),
            "ntid.x": self._same(per_cta),
            "clock64": np.zeros(self.total, np.uint64),
            "globaltimer": np.zeros(self.total, np.uint64),
        }
        for axis, letter in enumerate("xyz"):
            places = np.array([cta[axis] for cta in ctas], np.uint32)
            self.special[f"ctaid.{letter}"] = np.repeat(places, per_cta)
            self.special[f"nctaid.{letter}"] = self._same(grid[axis])
            if letter != "x":
                self.special[f"tid.{letter}"] = self._same(0)
                self.special[f"ntid.{letter}"] = self._same(1)

    def _same(self, value: int) -> Array:
        return np.full(self.total, value, np.uint32)

    def mask(self, mask: Array | None) -> Array:
        if mask is None:
            return self.all
        return mask

    def chosen(self, mask: Array | None) -> Array | slice:
        """Return the threads of a mask as an index; a slice for all of them."""
        if mask is None or mask.all():
            return slice(None)
        return np.flatnonzero(mask)

    def first_lanes(self, mask: Array | None) -> Array:
        """Return the first thread of each warp that runs an instruction of whole warps."""
        warps = self.mask(mask).reshape(-1, WARP_SIZE)
        if (warps.any(1) != warps.all(1)).any():
            raise StoppedError("part of a warp in an instruction of the whole warp", "")
        return np.flatnonzero(warps.any(1)) * WARP_SIZE

    def by_cta(self, mask: Array | None) -> Array:
        """Return a mask as [CTAs, threads]."""
        return self.mask(mask).reshape(self.num_ctas, self.per_cta)

    def pass_barrier(self, mask: Array | None) -> None:
        """Begin the next epoch of CTAs whose threads have all reached a barrier."""
        if mask is None:
            self.time += NEXT_EPOCH
            return
        arrived = self.by_cta(mask)
        if (arrived.any(1) & ~arrived.all(1)).any():
            count = int(arrived[arrived.any(1) & ~arrived.all(1)][0].sum())
            raise StoppedError("deadlock", f"{count} of {self.per_cta} threads reach a barrier")
        self.time[mask] += NEXT_EPOCH

    def epoch(self, thread: int) -> int:
        """Return a thread's CTA and epoch as one number."""
        return int(self.time[thread]) >> EPOCH_SHIFT


def as_index(chosen: Array | slice, total: int) -> Array:
    """Return the threads that `Threads.chosen` returned as numbers."""
    if isinstance(chosen, slice):
        return np.arange(total)
    return chosen


def scattered(values: Any, chosen: Array | slice, total: int) -> Array:
    """Return values of chosen threads in an array of all threads; the others get ones, which are NaN in floats."""
    if isinstance(chosen, slice):
        return np.asarray(values)
    result = np.full(total, np.iinfo(values.dtype).max, values.dtype)
    result[chosen] = values
    return result
