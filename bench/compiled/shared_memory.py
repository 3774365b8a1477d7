"""Shared memory of the CTAs that run together, with the shadow of every byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paged.bench.compiled.code import SHARED_BASE
from paged.bench.compiled.context import Context
from paged.bench.compiled.global_memory import atomic_time, combined
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shadow import BY_ATOMIC, NOBODY, PENDING, Say, Shadow
from paged.bench.compiled.threads import EPOCH_SHIFT, WARP_MASK, WARP_SIZE, Threads, as_index, scattered

_ALIGNMENT = 128


class SharedMemory:
    """One array of bytes; each CTA has `size` of them.

    unfenced: bytes that ordinary stores have written since the last proxy fence, which the matrix unit may not see.
    """

    def __init__(self, context: Context, threads: Threads, used: int) -> None:
        self.context, self.threads, self.used = context, threads, used
        self.size = -(-(used + 16) // _ALIGNMENT) * _ALIGNMENT
        self.data: Array = np.full(threads.num_ctas * self.size, 0xFF, np.uint8)
        self.shadow = Shadow(len(self.data))
        self.unfenced = np.zeros(len(self.data), bool)
        self._delta = threads.cta * self.size - SHARED_BASE

    def say(self, site: int) -> Say:
        return lambda kind, detail, times: self.context.fault(kind, site, f"shared memory, {detail}", times)

    def start_of(self, thread: int) -> int:
        """Return what turns an address of a thread into a place."""
        return int(self._delta[thread])

    def located(self, address: Array, size: int, chosen: Array | slice, site: int) -> tuple[Array | slice, Array]:
        """Return the threads that may access `size` bytes, and where; others are reported."""
        place = address[chosen].astype(np.int64)
        if len(place) == 0:
            return chosen, place
        if (place & (size - 1)).any():
            is_good = place & (size - 1) == 0
            detail = f"{size} bytes at {int(place[~is_good][0]) - SHARED_BASE}"
            self.context.fault("misaligned shared access", site, detail, int((~is_good).sum()))
            chosen, place = as_index(chosen, self.threads.total)[is_good], place[is_good]
        is_inside = (place >= SHARED_BASE) & (place + size <= SHARED_BASE + self.used)
        if not is_inside.all():
            detail = f"{size} bytes at {int(place[~is_inside][0]) - SHARED_BASE} of {self.used}"
            self.context.fault("out of bounds shared access", site, detail, int((~is_inside).sum()))
            chosen, place = as_index(chosen, self.threads.total)[is_inside], place[is_inside]
        return chosen, place + self._delta[chosen]

    def load(self, address: Array, size: int, count: int, mask: Array | None, site: int) -> list[Array]:
        """Return `count` items for each thread; threads that load nothing get ones."""
        if self.context.counters is not None:
            self.context.counters.note_shared(site, self.threads, address, size * count, mask)
        chosen, place = self.located(address, size * count, self.threads.chosen(mask), site)
        rows = self.data.view(f"u{size}").reshape(-1, count)[place // (size * count)]
        times, say = self.threads.time[chosen], self.say(site)
        used = self.context.sites[site].used_bytes
        if used is None:
            self.shadow.note_read(place, size * count, times, say)
        else:
            for byte in range(size * count):
                if used >> byte & 1:
                    self.shadow.note_read(place + byte, 1, times, say)
        total = self.threads.total
        return [scattered(np.ascontiguousarray(rows[:, item]), chosen, total) for item in range(count)]

    def store(self, address: Array, values: Sequence[Array], size: int, mask: Array | None, site: int) -> None:
        count = len(values)
        if self.context.counters is not None:
            self.context.counters.note_shared(site, self.threads, address, size * count, mask)
        chosen, place = self.located(address, size * count, self.threads.chosen(mask), site)
        if len(place):
            rows = np.stack([value[chosen] for value in values], 1).view(np.uint8)
            self.write(place, rows, self.threads.time[chosen], site)

    def write(self, place: Array, rows: Array, times: Array, site: int) -> None:
        """Write bytes, [threads, bytes], as ordinary stores do."""
        self.note_write(place, rows, times, site)
        memory, index = self.rows(rows.shape[1]), place // rows.shape[1]
        memory[index] = rows
        self.unfenced.reshape(memory.shape)[index] = True
        if (memory[index] != rows).any():
            self.context.fault("different values stored to one place at once", site, "shared memory")

    def rows(self, size: int) -> Array:
        return self.data.reshape(-1, size)

    def note_write(self, place: Array, rows: Array, times: Array, site: int, becomes: int | None = None) -> None:
        size = rows.shape[1]
        is_changed: Callable[[], Array] = lambda: self.rows(size)[place // size] != rows  # noqa: E731
        self.shadow.note_write(place, size, times, is_changed, self.say(site), becomes)

    def atomic(
        self, operation: str, address: Array, kind: str, values: Sequence[Array], mask: Array | None, site: int
    ) -> Array:
        """Apply an atomic operation for one thread after the other, in a random order; return what was there before."""
        dtype = np.dtype(kind)
        chosen, place = self.located(address, dtype.itemsize, self.threads.chosen(mask), site)
        threads = as_index(chosen, self.threads.total)
        result, cells = np.zeros(self.threads.total, dtype), self.data.view(dtype)
        for index in self.context.random.permutation(len(threads)):
            thread, first = int(threads[index]), int(place[index])
            self._check_atomic(int(self.threads.time[thread]), first, site)
            cell = first // dtype.itemsize
            result[thread] = cells[cell]
            cells[cell] = combined(operation, cells[cell], [value[thread] for value in values])
            self.shadow.written[first : first + dtype.itemsize] = atomic_time(int(self.threads.time[thread]))
        return result

    def _check_atomic(self, time: int, first: int, site: int) -> None:
        written, read = int(self.shadow.written[first]), int(self.shadow.read[first])
        is_race = written in (NOBODY, PENDING)
        for before in (written, read):
            is_same_epoch = before >> EPOCH_SHIFT == time >> EPOCH_SHIFT
            is_race |= is_same_epoch and before != time and before & WARP_MASK != BY_ATOMIC
        if is_race:
            self.context.fault("race: atomic on shared memory", site, "")

    def fence_proxy(self, mask: Array | None) -> None:
        """Make what the CTAs' ordinary stores have written visible to the matrix unit and the copy engine."""
        ctas = self.threads.by_cta(mask).any(1)
        self.unfenced.reshape(self.threads.num_ctas, self.size)[ctas] = False

    def load_matrices(
        self, address: Array, count: int, is_transposed: bool, mask: Array | None, site: int
    ) -> list[Array]:
        """Return what ldmatrix gives each thread of `count` matrices of 8 x 8 16-bit numbers."""
        first = self.threads.first_lanes(mask)
        threads = (first[:, None] + np.arange(8 * count)).ravel()  # which give the address of a row each
        if self.context.counters is not None:
            self.context.counters.note_matrices(site, address[threads], 8)
        good, place = self.located(address, 16, threads, site)
        rows = np.full((len(threads), 16), 0xFF, np.uint8)
        rows[np.isin(threads, as_index(good, self.threads.total))] = self.rows(16)[place // 16]
        self.shadow.note_read(place, 16, self.threads.time[good], self.say(site))
        matrices = rows.view(np.uint16).reshape(len(first), count, 8, 8)
        if is_transposed:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(first), count, WARP_SIZE)
        chosen = (first[:, None] + np.arange(WARP_SIZE)).ravel()
        values = []
        for matrix in range(count):
            value = np.full(self.threads.total, 0xFFFFFFFF, np.uint32)
            value[chosen] = pairs[:, matrix].ravel()
            values.append(value)
        return values

    def store_matrices(
        self, address: Array, values: Sequence[Array], is_transposed: bool, mask: Array | None, site: int
    ) -> None:
        first, count = self.threads.first_lanes(mask), len(values)
        chosen = (first[:, None] + np.arange(WARP_SIZE)).ravel()
        pairs = np.stack([value[chosen].reshape(len(first), WARP_SIZE) for value in values], 1)
        matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(len(first), count, 8, 8)
        if is_transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16)
        threads = (first[:, None] + np.arange(8 * count)).ravel()
        if self.context.counters is not None:
            self.context.counters.note_matrices(site, address[threads], 8)
        good, place = self.located(address, 16, threads, site)
        self.write(place, rows[np.isin(threads, as_index(good, self.threads.total))], self.threads.time[good], site)
