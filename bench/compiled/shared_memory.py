"""Shared memory of the CTAs that run together, with the shadow of every byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paged.bench.compiled.code import SHARED_BASE
from paged.bench.compiled.context import Context
from paged.bench.compiled.memory import ALIGNMENT, Bytes, Located, Memory
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shadow import BY_ATOMIC, NOBODY, PENDING, Shadow
from paged.bench.compiled.threads import EPOCH_SHIFT, WARP_MASK, WARP_SIZE, Threads, as_index


class SharedMemory(Memory, Bytes):
    """One array of bytes; each CTA has `size` of them.

    unfenced: bytes that ordinary stores have written since the last proxy fence, which the matrix unit may not see.
    """

    name = "shared memory"

    def __init__(self, context: Context, threads: Threads, used: int) -> None:
        Memory.__init__(self, context, threads)
        self.used = used
        self.size = -(-(used + 16) // ALIGNMENT) * ALIGNMENT
        total = threads.num_ctas * self.size
        Bytes.__init__(self, np.full(total, 0xFF, np.uint8), Shadow(total))
        self.unfenced = np.zeros(total, bool)
        self._delta = threads.cta * self.size - SHARED_BASE

    def start_of(self, thread: int) -> int:
        """Return what turns an address of a thread into a place."""
        return int(self._delta[thread])

    def count(self, site: int, address: Array, size: int, mask: Array | None) -> None:
        if self.context.counters is not None:
            self.context.counters.note_shared(site, self.threads, address, size, mask)

    def located(self, address: Array, size: int, mask: Array | None, site: int, verb: str) -> Iterator[Located]:
        chosen, place = self.placed(address, size, self.threads.chosen(mask), site)
        if len(place):
            yield self, chosen, place

    def placed(self, address: Array, size: int, chosen: Array | slice, site: int) -> tuple[Array | slice, Array]:
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

    def write(self, memory: Bytes, place: Array, rows: Array, times: Array, site: int) -> None:
        super().write(memory, place, rows, times, site)
        width = rows.shape[1]
        self.unfenced.reshape(-1, width)[place // width] = True

    def order_atomic(self, memory: Bytes, place: int, time: int, order: str, site: int) -> None:
        """Check one atomic access. Its order does not count, because the memory belongs to one CTA."""
        written, read = int(memory.shadow.written[place]), int(memory.shadow.read[place])
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
        good, place = self.placed(address, 16, threads, site)
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
        good, place = self.placed(address, 16, threads, site)
        rows = rows[np.isin(threads, as_index(good, self.threads.total))]
        self.write(self, place, rows, self.threads.time[good], site)
