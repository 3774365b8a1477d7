"""Copies by single threads from global to shared memory: cp.async with its groups.

The destination holds ones, which are NaN in floats, from the start of the copy until its thread has waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged.bench.compiled.global_memory import GlobalAccess
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shadow import PENDING
from paged.bench.compiled.shared_memory import SharedMemory
from paged.bench.compiled.threads import Threads, as_index


@dataclass
class _Copies:
    """Copies of one instruction: threads, places in shared memory, and bytes [threads, size]."""

    threads: Array
    place: Array
    data: Array

    def split(self, is_first: Array) -> tuple[_Copies, _Copies]:
        parts = []
        for chosen in (is_first, ~is_first):
            parts.append(_Copies(self.threads[chosen], self.place[chosen], self.data[chosen]))
        return parts[0], parts[1]


@dataclass
class _Group:
    """Copies that threads have committed together. waiting: threads that have not waited for them."""

    waiting: Array
    copies: list[_Copies]


class AsyncCopies:
    """The copies in flight of a batch, by groups, the oldest first."""

    def __init__(self, threads: Threads, memory: GlobalAccess, shared: SharedMemory) -> None:
        self.threads, self.memory, self.shared = threads, memory, shared
        self._open: list[_Copies] = []
        self._groups: list[_Group] = []

    def begin(self, address: Array, source: Array, size: int, num_read: Array, mask: Array | None, site: int) -> None:
        """Copy `size` bytes for each thread: `num_read` of them from global memory, and zeros."""
        chosen, place = self.shared.placed(address, size, self.threads.chosen(mask), site)
        threads = as_index(chosen, self.threads.total)
        context = self.memory.context
        self.memory.count(site, source, size, self.threads.mask(mask) & (num_read > 0))
        self.shared.count(site, address, size, mask)
        data = np.zeros((self.threads.total, size), np.uint8)
        if (num_read[chosen] > size).any():
            context.fault("cp.async of more bytes than its size", site, "")
        for count in np.unique(num_read[chosen]).tolist():
            if count == 0:
                continue
            reads = np.zeros(self.threads.total, bool)
            reads[threads] = num_read[threads] == count
            for segment, readers, start in self.memory.located(source, count, reads, site, "load", alignment=size):
                segment.note_read(start, count, self.threads.time[readers], self.memory.say(site))
                data[readers, :count] = segment.data[start[:, None] + np.arange(count)]
        if len(threads):
            self._open.append(_Copies(threads, place, data[threads]))
            hide(self.shared, place, size, self.threads.time[threads], site)

    def commit(self, mask: Array | None) -> None:
        """End the group of threads."""
        waiting = self.threads.mask(mask).copy()
        committed, still_open = [], []
        for copies in self._open:
            first, second = copies.split(waiting[copies.threads])
            committed.append(first)
            still_open.append(second)
        self._open = [copies for copies in still_open if len(copies.threads)]
        self._groups.append(_Group(waiting, committed))

    def wait(self, num_allowed: int, mask: Array | None) -> None:
        """Complete all groups of threads but the latest `num_allowed` of each."""
        waits = self.threads.mask(mask)
        num_later = np.zeros(self.threads.total, np.int64)
        for group in reversed(self._groups):
            is_done = waits & group.waiting & (num_later >= num_allowed)
            num_later += group.waiting
            remaining = []
            for copies in group.copies:
                done, pending = copies.split(is_done[copies.threads])
                self._complete(done)
                if len(pending.threads):
                    remaining.append(pending)
            group.copies = remaining
            group.waiting &= ~is_done
        self._groups = [group for group in self._groups if group.waiting.any()]

    def _complete(self, copies: _Copies) -> None:
        """Let the bytes arrive, as if their thread had just stored them."""
        if not len(copies.threads):
            return
        size = copies.data.shape[1]
        index = copies.place // size
        self.shared.rows(size)[index] = copies.data
        self.shared.shadow.written.reshape(-1, size)[index] = self.threads.time[copies.threads][:, None]
        self.shared.unfenced.reshape(-1, size)[index] = True


def hide(shared: SharedMemory, place: Array, size: int, times: Array, site: int) -> None:
    """Fill the destination of copies with ones, and mark it as not yet there."""
    ones = np.full((len(place), size), 0xFF, np.uint8)
    shared.note_write(place, ones, times, shared.say(site), becomes=PENDING)
    shared.rows(size)[place // size] = 0xFF
