"""Loads, stores and atomics of threads, which are the same for global and for shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paged.bench.compiled.context import Context
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shadow import BY_ATOMIC, Say, Shadow
from paged.bench.compiled.threads import WARP_MASK, Threads, as_index, scattered

ALIGNMENT = 128


class Bytes:
    """Some memory, a multiple of 128 bytes, and its shadow."""

    def __init__(self, data: Array, shadow: Shadow) -> None:
        self.data = data
        self.shadow = shadow

    def rows(self, size: int) -> Array:
        """Return the memory as rows of `size` bytes."""
        return self.data.reshape(-1, size)

    def note_read(self, place: Array, size: int, times: Array, say: Say) -> None:
        self.shadow.note_read(place, size, times, say)

    def note_write(self, place: Array, rows: Array, times: Array, say: Say, becomes: int | None = None) -> None:
        """Note that threads write rows, [threads, bytes], before the bytes are there. See `Shadow.note_write`."""
        size = rows.shape[1]

        def is_changed() -> Array:
            return np.asarray(self.rows(size)[place // size] != rows)

        self.shadow.note_write(place, size, times, is_changed, say, becomes)


Located = tuple[Bytes, Array | slice, Array]
"""Some memory, an index of threads, and the places of their bytes in it."""


class Memory:
    """One kind of memory as the threads of a batch see it. name: "global memory" or "shared memory"."""

    name: str

    def __init__(self, context: Context, threads: Threads) -> None:
        self.context, self.threads = context, threads

    def located(self, address: Array, size: int, mask: Array | None, site: int, verb: str) -> Iterator[Located]:
        """Yield which threads may access `size` bytes, and where. Wrong addresses are reported and left out."""
        raise NotImplementedError

    def count(self, site: int, address: Array, size: int, mask: Array | None) -> None:
        """Count the requests of an instruction, if counters were asked for."""
        raise NotImplementedError

    def order_atomic(self, memory: Bytes, place: int, time: int, order: str, site: int) -> None:
        """Check one atomic access, and note what it orders."""
        raise NotImplementedError

    def say(self, site: int) -> Say:
        """Return the function by which the shadow reports faults of an instruction."""
        return lambda kind, detail, times: self.context.fault(kind, site, f"{self.name}, {detail}", times)

    def load(self, address: Array, size: int, count: int, mask: Array | None, site: int) -> list[Array]:
        """Return `count` items for each thread; threads that load nothing get ones."""
        width = size * count
        self.count(site, address, width, mask)
        ones = np.full(self.threads.total, (1 << 8 * size) - 1, f"u{size}")
        values = [ones] * count
        is_first = True
        for memory, chosen, place in self.located(address, width, mask, site, "load"):
            rows = memory.rows(width)[place // width].view(f"u{size}")
            self._note_load(memory, place, width, self.threads.time[chosen], site)
            for item in range(count):
                if is_first:
                    values[item] = scattered(np.ascontiguousarray(rows[:, item]), chosen, self.threads.total)
                else:
                    values[item][chosen] = rows[:, item]
            is_first = False
        return values

    def _note_load(self, memory: Bytes, place: Array, width: int, times: Array, site: int) -> None:
        used = self.context.sites[site].used_bytes
        if used is None:
            memory.note_read(place, width, times, self.say(site))
            return
        for byte in range(width):
            if used >> byte & 1:
                memory.note_read(place + byte, 1, times, self.say(site))

    def store(self, address: Array, values: Sequence[Array], size: int, mask: Array | None, site: int) -> None:
        width = size * len(values)
        self.count(site, address, width, mask)
        for memory, chosen, place in self.located(address, width, mask, site, "store"):
            rows = np.stack([value[chosen] for value in values], 1).view(np.uint8)
            self.write(memory, place, rows, self.threads.time[chosen], site)

    def write(self, memory: Bytes, place: Array, rows: Array, times: Array, site: int) -> None:
        """Write rows of bytes, as ordinary stores do."""
        memory.note_write(place, rows, times, self.say(site))
        width = rows.shape[1]
        index = place // width
        memory.rows(width)[index] = rows
        if (memory.rows(width)[index] != rows).any():
            self.context.fault("different values stored to one place at once", site, self.name)

    def atomic(
        self,
        operation: str,
        address: Array,
        kind: str,
        values: Sequence[Array],
        order: str,
        mask: Array | None,
        site: int,
    ) -> Array:
        """Apply an atomic operation for one thread after the other, in a random order; return what was there before."""
        dtype = np.dtype(kind)
        result = np.zeros(self.threads.total, dtype)
        for memory, chosen, place in self.located(address, dtype.itemsize, mask, site, "atomic"):
            threads, cells = as_index(chosen, self.threads.total), memory.data.view(dtype)
            for index in self.context.random.permutation(len(threads)):
                thread, first = int(threads[index]), int(place[index])
                time = int(self.threads.time[thread])
                self.order_atomic(memory, first, time, order, site)
                cell = first // dtype.itemsize
                result[thread] = cells[cell]
                cells[cell] = _combined(operation, cells[cell], [value[thread] for value in values])
                memory.shadow.written[first : first + dtype.itemsize] = time & ~WARP_MASK | BY_ATOMIC
        return result


def _combined(operation: str, old: Array, values: Sequence[Array]) -> Array:
    """Return what an atomic leaves behind."""
    if operation == "add":
        return old + values[0]
    if old == values[0]:  # "cas"
        return values[1]
    return old
