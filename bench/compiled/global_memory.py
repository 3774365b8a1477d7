"""Global memory: the tensors of a launch, with checks of every access and the shadow of every byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from paged.bench.compiled.context import Context
from paged.bench.compiled.memory import ALIGNMENT, Bytes, Located, Memory
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shadow import BY_ATOMIC, NOBODY, PENDING, CtaOrder, Say, Shadow
from paged.bench.compiled.threads import CTA_SHIFT, EPOCH_SHIFT, WARP_MASK, Threads

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


class Segment(Bytes):
    """The memory of one storage.

    start: address of the first byte of `data`, which is aligned. low, high: places of the storage's first byte and of
    the byte behind its last. covered: which bytes are elements of a tensor that the launch was given; None for all.
    """

    def __init__(
        self, storage: torch.UntypedStorage, named: Sequence[tuple[str, torch.Tensor]], order: CtaOrder
    ) -> None:
        address = storage.data_ptr()
        self.start = address // ALIGNMENT * ALIGNMENT
        self.low = address - self.start
        self.high = self.low + storage.nbytes()
        size = -(-self.high // ALIGNMENT) * ALIGNMENT
        data: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.start))
        super().__init__(data, Shadow(size, order))
        self.names = ", ".join(name for name, _ in named)
        self.covered = self._covered(size, [tensor for _, tensor in named])
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

    def begin_write(self) -> None:
        self.note_logged_reads()
        self.is_written = True

    def note_write(self, place: Array, rows: Array, times: Array, say: Say, becomes: int | None = None) -> None:
        self.begin_write()
        super().note_write(place, rows, times, say, becomes)


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


class GlobalAccess(Memory):
    """Global memory as the threads of a batch see it.

    early: threads that may not touch memory yet, because the kernel before may still be running.
    """

    name = "global memory"

    def __init__(self, context: Context, threads: Threads, memory: GlobalMemory, waits_for_grid: bool) -> None:
        super().__init__(context, threads)
        self.memory = memory
        self.early = np.full(threads.total, waits_for_grid)

    def wait_for_grid(self, mask: Array | None) -> None:
        self.early &= ~self.threads.mask(mask)

    def count(self, site: int, address: Array, size: int, mask: Array | None) -> None:
        if self.context.counters is not None:
            self.context.counters.note_global(site, self.threads, address, size, mask)

    def located(
        self, address: Array, size: int, mask: Array | None, site: int, verb: str, alignment: int | None = None
    ) -> Iterator[Located]:
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

    def order_atomic(self, memory: Bytes, place: int, time: int, order: str, site: int) -> None:
        """Check an atomic's cell, and note what its release and its acquisition order."""
        assert isinstance(memory, Segment)
        memory.begin_write()
        before, known = int(memory.shadow.written[place]), self.memory.order
        if before not in (NOBODY, PENDING, time) and before & WARP_MASK != BY_ATOMIC:
            is_same_epoch = before >> EPOCH_SHIFT == time >> EPOCH_SHIFT
            is_other_cta = before >> CTA_SHIFT != time >> CTA_SHIFT
            if is_same_epoch or (is_other_cta and not known.is_over(before, time)):
                self.context.fault("race: atomic after write", site, self.name)
        cell = memory.start + place
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
