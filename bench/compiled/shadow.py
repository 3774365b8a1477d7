"""The shadow of memory: which warp wrote and read each byte last, and when. It shows races whatever order they ran in.

A time is CTA, epoch and warp, see `threads`. Accesses of two warps of a CTA in one epoch are not ordered. Accesses of
two CTAs are ordered if one has released and the other has acquired by atomics since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np

from paged.bench.compiled.numerics import Array
from paged.bench.compiled.threads import CTA_SHIFT, EPOCH_SHIFT, SEVERAL_WARPS, WARP_MASK

NOBODY = 0
PENDING = -1  # the last writer is a copy that has not been waited for
BY_ATOMIC = 254  # in place of the warp
SEVERAL_CTAS = 1 << 62
_MAP_NORESERVE = 0x4000
_LARGE = 1 << 22  # bytes of memory whose shadow takes pages only where it is used

Say = Callable[[str, str, int], None]
"""Reports a fault: its kind, an example, and the number of threads."""


@dataclass
class CtaOrder:
    """Which accesses of other CTAs a CTA knows to be over, by releases and acquisitions of atomics.

    released: cell -> CTA -> its epoch at the release; what it did in earlier epochs is over.
    acquired: CTA -> other CTA -> (the other's epoch, our epoch, our warp): other warps know it from the next epoch on.
    """

    released: dict[int, dict[int, int]] = field(default_factory=dict)
    acquired: dict[int, dict[int, list[tuple[int, int, int]]]] = field(default_factory=dict)

    def release(self, cell: int, time: int) -> None:
        epochs = self.released.setdefault(cell, {})
        epochs[time >> CTA_SHIFT] = time >> EPOCH_SHIFT
        for other, known in self.acquired.get(time >> CTA_SHIFT, {}).items():
            for epoch, since, warp in known:
                if _knows(time, since, warp):
                    epochs[other] = max(epochs.get(other, 0), epoch)

    def acquire(self, cell: int, time: int) -> None:
        known = self.acquired.setdefault(time >> CTA_SHIFT, {})
        for other, epoch in self.released.get(cell, {}).items():
            if other != time >> CTA_SHIFT:
                known.setdefault(other, []).append((epoch, time >> EPOCH_SHIFT, time & WARP_MASK))

    def is_over(self, other: int, time: int) -> bool:
        """Return whether what another CTA did at `other` is known to be over at `time`."""
        for epoch, since, warp in self.acquired.get(time >> CTA_SHIFT, {}).get(other >> CTA_SHIFT, ()):
            if epoch > other >> EPOCH_SHIFT and _knows(time, since, warp):
                return True
        return False

    def unordered(self, earlier: Array, times: Array) -> Array:
        """Return for each pair of accesses whether nothing orders them."""
        pairs = zip(earlier.tolist(), times.tolist(), strict=True)
        known: dict[tuple[int, int], bool] = {}
        result = np.zeros(len(earlier), bool)
        for index, pair in enumerate(pairs):
            if pair not in known:
                known[pair] = not self._is_ordered(*pair)
            result[index] = known[pair]
        return result

    def _is_ordered(self, other: int, time: int) -> bool:
        if other == SEVERAL_CTAS:  # their times are not kept; after any acquisition the reads count as over
            return bool(self.acquired.get(time >> CTA_SHIFT))
        return self.is_over(other, time)


def _knows(time: int, since: int, warp: int) -> bool:
    """Return whether a thread knows what a warp of its CTA has acquired in the epoch `since`."""
    return time >> EPOCH_SHIFT > since or time & WARP_MASK == warp


class Shadow:
    """Times of the last write and of the last reads of each byte.

    order: how CTAs are ordered; None for shared memory, which belongs to one CTA.
    """

    def __init__(self, size: int, order: CtaOrder | None = None) -> None:
        self.written = _zeros(size)
        self.read = _zeros(size)
        self.order = order

    def note_read(self, place: Array, size: int, times: Array, say: Say) -> None:
        """Note that threads read `size` bytes each. Places are multiples of the size, or the size is no power of 2."""
        place, size, times = _rows(place, size, times)
        written = self.written.reshape(-1, size)[place]
        times = times[:, None]
        if written.any():
            is_pending = written == PENDING
            if is_pending.any():
                say("read of a copy that was not waited for", "", int(is_pending.any(1).sum()))
            race = _in_same_epoch(written, times)
            if race.any():
                _say_warps(say, "race: read after write", race, written, times)
            self._check_ctas(say, "read after write", written, times)
        if self.order is None and (written == NOBODY).any():
            is_unwritten = written == NOBODY
            text = f"{int(is_unwritten.sum())} bytes"
            say("read of shared memory that nobody wrote", text, int(is_unwritten.any(1).sum()))
        self._add_readers(place, size, times)

    def _add_readers(self, place: Array, size: int, times: Array) -> None:
        readers = self.read.reshape(-1, size)
        merged = self._merged(readers[place], times)
        readers[place] = merged
        # Where threads of several warps read the same byte at once, only the last one is noted.
        is_lost = readers[place] != merged
        if is_lost.any():
            rows, columns = np.nonzero(is_lost)
            again = self._merged(readers[place[rows], columns], merged[rows, columns])
            readers[place[rows], columns] = again

    def _merged(self, before: Array, times: Array) -> Array:
        """Return the times of readers, with another one."""
        is_same_epoch = before >> EPOCH_SHIFT == times >> EPOCH_SHIFT
        merged = np.where(is_same_epoch & (before != times), times | SEVERAL_WARPS, times)
        if self.order is not None:
            is_other_cta = (before != NOBODY) & (before >> CTA_SHIFT != times >> CTA_SHIFT)
            merged = np.where(is_other_cta, SEVERAL_CTAS, merged)
        return merged

    def note_write(
        self,
        place: Array,
        size: int,
        times: Array,
        is_changed: Callable[[], Array],
        say: Say,
        becomes: int | None = None,
    ) -> None:
        """Note that threads write `size` bytes each.

        is_changed: returns for each byte, [threads, size], whether the write changes it: a byte that two warps write
        with one value is no race. becomes: the time to note instead of the threads'.
        """
        place, size, times = _rows(place, size, times)
        written, read = self.written.reshape(-1, size), self.read.reshape(-1, size)
        before, readers = written[place], read[place]
        times = times[:, None]
        if before.any() or readers.any():
            is_pending = before == PENDING
            if is_pending.any():
                say("write over a copy that was not waited for", "", int(is_pending.any(1).sum()))
            race = _in_same_epoch(readers, times)
            if race.any():
                _say_warps(say, "race: write after read", race, readers, times)
            race = _in_same_epoch(before, times)
            if race.any():
                race &= is_changed().reshape(race.shape)
                if race.any():
                    _say_warps(say, "race: write after write", race, before, times)
            self._check_ctas(say, "write after write", before, times, is_changed)
            self._check_ctas(say, "write after read", readers, times, is_changed)
        if becomes is None:
            written[place] = times
        else:
            written[place] = becomes

    def _check_ctas(
        self, say: Say, kind: str, before: Array, times: Array, is_changed: Callable[[], Array] | None = None
    ) -> None:
        """Report accesses of two CTAs that nothing orders."""
        if self.order is None:
            return
        is_other = (before > NOBODY) & (before >> CTA_SHIFT != times >> CTA_SHIFT)
        if is_changed is not None and is_other.any():
            is_other &= is_changed().reshape(is_other.shape)
        if not is_other.any():
            return
        rows, columns = np.nonzero(is_other)
        earlier, ours = before[rows, columns], np.broadcast_to(times, before.shape)[rows, columns]
        is_race = self.order.unordered(earlier, ours)
        if is_race.any():
            first = int(np.flatnonzero(is_race)[0])
            pair = f"CTA {int(ours[first]) >> CTA_SHIFT} after CTA {int(earlier[first]) >> CTA_SHIFT}"
            say(f"race between CTAs: {kind}", pair, int(is_race.sum()))


def _in_same_epoch(before: Array, times: Array) -> Array:
    """Return where another warp of the CTA was there in the same epoch."""
    return np.asarray((before != times) & (before >> EPOCH_SHIFT == times >> EPOCH_SHIFT))


def _say_warps(say: Say, kind: str, race: Array, before: Array, times: Array) -> None:
    row, column = np.argwhere(race)[0]
    say(kind, f"warp {times[row, 0] & WARP_MASK} after warp {before[row, column] & WARP_MASK}", int(race.any(1).sum()))


def _rows(place: Array, size: int, times: Array) -> tuple[Array, int, Array]:
    """Return the rows of an array [bytes / size, size] that accesses take. A size that is no power of 2 becomes 1."""
    if size & (size - 1):
        return (place[:, None] + np.arange(size)).ravel(), 1, np.repeat(times, size)
    if size == 1:
        return place, 1, times
    return place // size, size, times


def _zeros(size: int) -> Array:
    """Return zeros, which take no memory until they are written."""
    if size < _LARGE:
        return np.zeros(size, np.int64)
    return np.frombuffer(mmap(-1, 8 * size, MAP_PRIVATE | MAP_ANONYMOUS | _MAP_NORESERVE), np.int64)
