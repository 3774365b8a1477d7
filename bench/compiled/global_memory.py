"""Global memory: the tensors of a launch, with checks of every access and the shadow of every byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from paged.bench.compiled.context import Context
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shadow import BY_ATOMIC, NOBODY, PENDING, CtaOrder, Say, Shadow
from paged.bench.compiled.threads import CTA_SHIFT, EPOCH_SHIFT, WARP_MASK, Threads, as_index, scattered

_ALIGNMENT = 128
_COVERED_LIMIT = 1 << 26  # bytes of storages whose elements are told from the gaps between them
_MAX_LOGGED = 1 << 16  # reads of a segment that are kept until it is written


Complain = Callable[[str, Array], None]
"""Reports addresses with a problem."""


class Read(NamedTuple):
    """Reads of one instruction, which are noted in the shadow only if the segment is written."""

    place: Array
    size: int
    times: Array
    say: Say


class Segment:
    """The memory of one storage.

    start: address of the first byte of `data`, which is aligned. low, high: places of the storage's first byte and of
    the byte behind its last. covered: which bytes are elements of a tensor that the launch was given; None for all.
    """

    def __init__(
        self, storage: torch.UntypedStorage, named: Sequence[tuple[str, torch.Tensor]], order: CtaOrder
    ) -> None:
        address = storage.data_ptr()
        self.start = address // _ALIGNMENT * _ALIGNMENT
        self.low = address - self.start
        self.high = self.low + storage.nbytes()
        size = -(-self.high // _ALIGNMENT) * _ALIGNMENT
        self.data: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.start))
        self.names = ", ".join(name for name, _ in named)
        self.covered = self._covered(size, [tensor for _, tensor in named])
        self.shadow = Shadow(size, order)
        self.is_written = False
        self._reads: list[Read] = []

    def _covered(self, size: int, tensors: list[torch.Tensor]) -> Array | None:
        num_bytes = self.high - self.low
        if num_bytes > _COVERED_LIMIT:
            return None
        covered = np.zeros(size, bool)
        for tensor in tensors:
            item = tensor.element_size()
            elements = torch.zeros(num_bytes // item, dtype=torch.bool)
            if tensor.numel():
                places = torch.tensor([tensor.storage_offset()])
                for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
                    if stride:
                        places = (places[:, None] + torch.arange(length) * stride).reshape(-1)
                elements[places] = True
            covered[self.low : self.low + len(elements) * item] |= elements.numpy().repeat(item)
        if covered[self.low : self.high].all():
            return None
        return covered

    def items(self, size: int, count: int) -> Array:
        """Return the memory as vectors of `count` items of `size` bytes."""
        return self.data.view(f"u{size}").reshape(-1, count)

    def note_read(self, place: Array, size: int, times: Array, say: Say) -> None:
        if self.is_written:
            self.shadow.note_read(place, size, times, say)
            return
        self._reads.append(Read(place, size, times.copy(), say))
        if len(self._reads) > _MAX_LOGGED:
            self.note_logged_reads()

    def note_logged_reads(self) -> None:
        """Bring the shadow up to date, before the first write or when too many reads were logged."""
        for read in self._reads:
            self.shadow.note_read(*read)
        self._reads.clear()

    def note_write(self, place: Array, data: Array, times: Array, say: Say) -> None:
        """Note that threads write `data`, [threads, bytes], before the bytes are there."""
        self.note_logged_reads()
        self.is_written = True
        size = data.shape[1]

        def is_changed() -> Array:
            return np.asarray(self.data[place[:, None] + np.arange(size)] != data)

        self.shadow.note_write(place, size, times, is_changed, say)


Located = tuple[Segment, Array | slice, Array]
"""A segment, an index of accesses, and the places of their bytes."""


class GlobalMemory:
    """The segments of a launch's tensors, which outlive the batches of CTAs."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.order = CtaOrder()
        named: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors:
            if tensor.untyped_storage().nbytes():
                named.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self.segments = []
        for start in sorted(named):
            storage = named[start][0][1].untyped_storage()
            self.segments.append(Segment(storage, named[start], self.order))
        self._lows = np.array([segment.start + segment.low for segment in self.segments], np.uint64)

    def find(self, addresses: Array) -> Array:
        """Return for each address the number of the segment that it lies in or behind, or -1."""
        return np.searchsorted(self._lows, addresses, "right") - 1

    def located(self, address: Array, size: int, alignment: int, complain: Complain) -> Iterator[Located]:
        """Yield segments, which of the addresses lie there with `size` bytes, and their places.

        Others are reported and left out.
        """
        index: Array | slice = slice(None)
        remainder = address & np.uint64(alignment - 1)
        if remainder.any():
            complain("misaligned", address[remainder != 0])
            index = np.flatnonzero(remainder == 0)
            address = address[index]
        if len(address) == 0:
            return
        numbers = self.find(address)
        if (numbers == numbers[0]).all():
            yield from self._inside(int(numbers[0]), index, address, size, complain)
            return
        for number in np.unique(numbers):
            part = np.flatnonzero(numbers == number)
            yield from self._inside(int(number), composed(index, part), address[part], size, complain)

    def _inside(
        self, number: int, index: Array | slice, address: Array, size: int, complain: Complain
    ) -> Iterator[Located]:
        """Yield the addresses whose bytes lie inside of a segment."""
        if number < 0:
            complain("out of bounds", address)
            return
        segment = self.segments[number]
        place = (address - np.uint64(segment.start)).astype(np.int64)
        if place.max() + size > segment.high:
            is_inside = place + size <= segment.high
            complain("out of bounds", address[~is_inside])
            kept = np.flatnonzero(is_inside)
            index, address, place = composed(index, kept), address[kept], place[kept]
        if segment.covered is not None and len(place):
            is_covered = segment.covered[place[:, None] + np.arange(size)].all(1)
            if not is_covered.all():
                complain("between a tensor's elements", address[~is_covered])
        if len(place):
            yield segment, index, place

    def describe(self, address: int) -> str:
        number = int(self.find(np.array([address], np.uint64))[0])
        places = []
        if number >= 0:
            segment = self.segments[number]
            offset = address - segment.start - segment.low
            places.append(f"{offset} bytes from the start of {segment.names} ({segment.high - segment.low} bytes)")
        if number + 1 < len(self.segments):
            following = self.segments[number + 1]
            places.append(f"{following.start + following.low - address} bytes before {following.names}")
        return f"{address:#x}: {'; '.join(places)}"


class GlobalAccess:
    """Global memory as the threads of a batch see it.

    early: threads that may not touch memory yet, because the kernel before may still be running.
    """

    def __init__(self, context: Context, threads: Threads, memory: GlobalMemory, waits_for_grid: bool) -> None:
        self.context, self.threads, self.memory = context, threads, memory
        self.early = np.full(threads.total, waits_for_grid)

    def wait_for_grid(self, mask: Array | None) -> None:
        self.early &= ~self.threads.mask(mask)

    def say(self, site: int) -> Say:
        """Return the function by which the shadow reports faults of an instruction."""
        return lambda kind, detail, times: self.context.fault(kind, site, f"global memory, {detail}", times)

    def located(
        self, address: Array, size: int, mask: Array | None, site: int, verb: str, alignment: int | None = None
    ) -> Iterator[Located]:
        """Yield segments, the threads that may access `size` bytes there, and the places of these bytes."""
        chosen = self.threads.chosen(mask)
        if self.early.any() and self.early[chosen].any():
            self.context.fault(f"{verb} before griddepcontrol.wait", site, "")
        complain = self.complain(size, site, verb)
        for segment, index, place in self.memory.located(address[chosen], size, alignment or size, complain):
            yield segment, composed(chosen, index), place

    def complain(self, size: int, site: int, verb: str) -> Complain:
        """Return the function by which wrong addresses of an instruction are reported."""

        def report(problem: str, addresses: Array) -> None:
            detail = f"{size} bytes at {self.memory.describe(int(addresses[0]))}"
            self.context.fault(f"{verb} {problem}", site, detail, len(addresses))

        return report

    def load(self, address: Array, size: int, count: int, mask: Array | None, site: int) -> list[Array]:
        """Return `count` items for each thread; threads that load nothing get ones."""
        if self.context.counters is not None:
            self.context.counters.note_global(site, self.threads, address, size * count, mask)
        total = self.threads.total
        values: list[Array] | None = None
        for segment, chosen, place in self.located(address, size * count, mask, site, "load"):
            rows = segment.items(size, count)[place // (size * count)]
            segment.note_read(place, size * count, self.threads.time[chosen], self.say(site))
            if values is None:
                values = [scattered(np.ascontiguousarray(rows[:, item]), chosen, total) for item in range(count)]
            else:
                for item in range(count):
                    values[item][chosen] = rows[:, item]
        if values is None:
            ones = np.full(total, (1 << 8 * size) - 1, f"u{size}")
            values = [ones] * count
        return values

    def store(self, address: Array, values: Sequence[Array], size: int, mask: Array | None, site: int) -> None:
        count = len(values)
        if self.context.counters is not None:
            self.context.counters.note_global(site, self.threads, address, size * count, mask)
        for segment, chosen, place in self.located(address, size * count, mask, site, "store"):
            rows = np.stack([value[chosen] for value in values], 1)
            segment.note_write(place, rows.view(np.uint8), self.threads.time[chosen], self.say(site))
            items, index = segment.items(size, count), place // (size * count)
            items[index] = rows
            if (items[index] != rows).any():
                self.context.fault("different values stored to one place at once", site, "global memory")

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
        for segment, chosen, place in self.located(address, dtype.itemsize, mask, site, "atomic"):
            segment.note_logged_reads()
            segment.is_written = True
            cells = segment.data.view(dtype)
            threads = as_index(chosen, self.threads.total)
            for index in self.context.random.permutation(len(threads)):
                thread, first = int(threads[index]), int(place[index])
                self._order_atomic(segment, thread, first, order, site)
                cell = first // dtype.itemsize
                result[thread] = cells[cell]
                cells[cell] = combined(operation, cells[cell], [value[thread] for value in values])
                segment.shadow.written[first : first + dtype.itemsize] = atomic_time(int(self.threads.time[thread]))
        return result

    def _order_atomic(self, segment: Segment, thread: int, first: int, order: str, site: int) -> None:
        """Check an atomic's cell, and note what its release and its acquisition order."""
        time, before = int(self.threads.time[thread]), int(segment.shadow.written[first])
        known = self.memory.order
        if before not in (NOBODY, PENDING, time) and before & WARP_MASK != BY_ATOMIC:
            is_same_epoch = before >> EPOCH_SHIFT == time >> EPOCH_SHIFT
            is_other_cta = before >> CTA_SHIFT != time >> CTA_SHIFT
            if is_same_epoch or (is_other_cta and not known.is_over(before, time)):
                self.context.fault("race: atomic after write", site, "global memory")
        cell = segment.start + first
        if order in ("acq_rel", "release"):
            known.release(cell, time)
        if order in ("acq_rel", "acquire"):
            known.acquire(cell, time)


def composed(outer: Array | slice, inner: Array | slice) -> Array | slice:
    """Return outer[inner], where a slice stands for everything."""
    if isinstance(inner, slice):
        return outer
    if isinstance(outer, slice):
        return inner
    return outer[inner]


def atomic_time(time: int) -> int:
    return time & ~WARP_MASK | BY_ATOMIC


def combined(operation: str, old: Array, values: Sequence[Array]) -> Array:
    """Return what an atomic leaves behind."""
    if operation == "add":
        return old + values[0]
    if old == values[0]:  # "cas"
        return values[1]
    return old
