"""The copy engine (TMA): boxes of tensors come to shared memory, and mbarriers tell when.

A box arrives as late as it may: when a thread asks its mbarrier for the second time. Until then its bytes hold ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paged.bench.compiled.code import PARAMS_BASE, SHARED_BASE
from paged.bench.compiled.copies import hide
from paged.bench.compiled.errors import NotModelledError, StoppedError
from paged.bench.compiled.global_memory import GlobalAccess
from paged.bench.compiled.numerics import Array
from paged.bench.compiled.shared_memory import SharedMemory
from paged.bench.compiled.threads import EPOCH_SHIFT, NEXT_EPOCH, WARP_MASK, Threads, as_index

# Bytes of a swizzle's span -> bits of an address that are combined with the three bits above 128 bytes.
SWIZZLE = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}
_DESTINATION_ALIGNMENT = 128
_VECTOR = 16
_MAX_POLLS = 1000


@dataclass(frozen=True)
class TensorMap:
    """A tensor as cuTensorMapEncodeTiled takes it, the innermost dimension first.

    address: of the first element. strides: in bytes. swizzle: bytes of the span in which 16-byte vectors are permuted.
    """

    address: int
    item: int
    shape: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int

    def problems(self) -> list[str]:
        """Return which conditions of cuTensorMapEncodeTiled are not met."""
        texts = []
        if self.address % _VECTOR:
            texts.append(f"address {self.address % _VECTOR} bytes behind a multiple of {_VECTOR}")
        if any(stride % _VECTOR or not 0 <= stride < 1 << 40 for stride in self.strides[1:]):
            texts.append(f"strides {list(self.strides)}")
        if any(not 0 < size <= 1 << 32 for size in self.shape):
            texts.append(f"shape {list(self.shape)}")
        row = self.box[0] * self.item
        if any(not 0 < size <= 256 for size in self.box) or row % _VECTOR:
            texts.append(f"box {list(self.box)}")
        if self.swizzle and row > self.swizzle:
            texts.append(f"box {list(self.box)} wider than its swizzle of {self.swizzle} bytes")
        return texts


@dataclass
class _Box:
    """A copy in flight: places of 16-byte vectors in shared memory, and their bytes."""

    place: Array
    data: Array


@dataclass
class _Barrier:
    """An mbarrier. missing: arrivals of this phase that are missing; bytes: as many; since: the time of its start."""

    count: int
    since: int
    missing: int = 0
    bytes: int = 0
    phase: int = 0
    polls: int = 0
    boxes: deque[_Box] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.missing = self.count

    def turn(self) -> None:
        """Begin the next phase, if nothing is missing."""
        if self.missing == 0 and self.bytes == 0:
            self.phase ^= 1
            self.missing = self.count


class TensorCopies:
    """The mbarriers and copies of a batch. maps: place in the parameters -> tensor map."""

    def __init__(
        self, threads: Threads, memory: GlobalAccess, shared: SharedMemory, maps: Mapping[int, TensorMap]
    ) -> None:
        self.threads, self.memory, self.shared, self.maps = threads, memory, shared, maps
        self._barriers: dict[tuple[int, int], _Barrier] = {}

    def _located(self, address: Array, size: int, mask: Array | None, site: int) -> Array:
        chosen, _ = self.shared.placed(address, size, self.threads.chosen(mask), site)
        return as_index(chosen, self.threads.total)

    def _barrier(self, thread: int, address: Array, site: int, verb: str) -> _Barrier:
        barrier = self._barriers.get((int(self.threads.cta[thread]), int(address[thread])))
        if barrier is None:
            raise StoppedError(f"{verb} of an mbarrier that was not initialised", self._source(site))
        time = int(self.threads.time[thread])
        if barrier.since >> EPOCH_SHIFT == time >> EPOCH_SHIFT and barrier.since != time:
            kind = "mbarrier used by another warp without a barrier after its initialisation"
            self.memory.context.fault(kind, site, verb)
        return barrier

    def _source(self, site: int) -> str:
        return self.memory.context.sites[site].source

    def begin_barrier(self, address: Array, count: Array, mask: Array | None, site: int) -> None:
        for thread in self._located(address, 8, mask, site):
            key = int(self.threads.cta[thread]), int(address[thread])
            self._barriers[key] = _Barrier(int(count[thread]), int(self.threads.time[thread]))

    def end_barrier(self, address: Array, mask: Array | None, site: int) -> None:
        for thread in self._located(address, 8, mask, site):
            if self._barrier(thread, address, site, "end").boxes:
                self.memory.context.fault("mbarrier invalidated while copies are outstanding on it", site, "")
            del self._barriers[int(self.threads.cta[thread]), int(address[thread])]

    def arrive(self, address: Array, num_bytes: Array | None, mask: Array | None, site: int) -> None:
        """Arrive at mbarriers, which also expect `num_bytes` of copies."""
        for thread in self._located(address, 8, mask, site):
            barrier = self._barrier(thread, address, site, "arrival")
            if barrier.missing == 0:
                self.memory.context.fault("mbarrier has more arrivals than its count", site, "")
                continue
            if num_bytes is not None:
                barrier.bytes += int(num_bytes[thread])
            barrier.missing -= 1
            barrier.turn()

    def try_wait(self, address: Array, parity: Array, mask: Array | None, site: int) -> Array:
        """Return for each thread whether the phase of a parity is over. The first answer is no."""
        result = np.zeros(self.threads.total, bool)
        waiting = self.threads.by_cta(mask)
        for cta in np.flatnonzero(waiting.any(1)):
            threads = cta * self.threads.per_cta + np.flatnonzero(waiting[cta])
            if len(np.unique(address[threads])) > 1 or len(np.unique(parity[threads])) > 1:
                raise NotModelledError("threads of a CTA that wait for different mbarriers")
            barrier = self._barrier(threads[-1], address, site, "wait")  # of the warp farthest from the first
            awaited = int(parity[threads[0]]) & 1
            barrier.polls += 1
            while barrier.phase == awaited and barrier.boxes and barrier.polls > 1:
                self._arrive(barrier, threads)
            if barrier.phase != awaited:
                result[threads] = True
                barrier.polls = 0
            elif barrier.polls > _MAX_POLLS:
                missing = f"{barrier.missing} arrivals and {barrier.bytes} bytes"
                raise StoppedError("deadlock", f"an mbarrier waits for {missing}, {self._source(site)}")
        return result

    def _arrive(self, barrier: _Barrier, threads: Array) -> None:
        box = barrier.boxes.popleft()
        time = int(self.threads.time[threads[0]])
        if len(threads) == self.threads.per_cta:
            time = (time | WARP_MASK) - NEXT_EPOCH  # all have waited, as at a barrier before
        self.shared.rows(_VECTOR)[box.place // _VECTOR] = box.data
        self.shared.shadow.written.reshape(-1, _VECTOR)[box.place // _VECTOR] = time
        self.shared.unfenced.reshape(-1, _VECTOR)[box.place // _VECTOR] = False
        barrier.bytes -= box.data.size
        barrier.turn()

    def begin(
        self,
        address: Array,
        map_address: Array,
        coordinates: Sequence[Array],
        barrier_address: Array,
        mask: Array | None,
        site: int,
    ) -> None:
        """Begin to copy a box of a tensor for each thread."""
        context = self.memory.context
        for thread in self._located(address, _VECTOR, mask, site):
            tensor = self.maps.get(int(map_address[thread]) - PARAMS_BASE)
            if tensor is None:
                raise StoppedError("no tensor map", f"{int(map_address[thread]):#x}")
            start = int(address[thread])
            if start % _DESTINATION_ALIGNMENT:
                context.fault("misaligned destination of a tensor copy", site, f"{start - SHARED_BASE}")
            first = [int(coordinate[thread]) for coordinate in coordinates]
            data = self._box(tensor, first, thread, site).reshape(-1, _VECTOR)
            linear = start + np.arange(len(data)) * _VECTOR
            place = linear ^ (linear >> 3 & SWIZZLE[tensor.swizzle])
            if place.max() + _VECTOR > SHARED_BASE + self.shared.used:
                context.fault("out of bounds shared access", site, "a tensor copy")
                continue
            place = place + self.shared.start_of(thread)
            if self.shared.unfenced.reshape(-1, _VECTOR)[place // _VECTOR].any():
                context.fault("copy engine without a proxy fence behind ordinary stores", site, "")
            hide(self.shared, place, _VECTOR, np.full(len(place), self.threads.time[thread]), site)
            self._barrier(thread, barrier_address, site, "copy").boxes.append(_Box(place, data))

    def _box(self, tensor: TensorMap, first: Sequence[int], thread: int, site: int) -> Array:
        """Return the bytes of a box; elements outside of the tensor are 0."""
        offsets, is_inside = np.zeros(1, np.int64), np.ones(1, bool)
        for axis in reversed(range(len(tensor.shape))):
            index = first[axis] + np.arange(tensor.box[axis])
            offsets = (offsets[:, None] + index * tensor.strides[axis]).ravel()
            is_inside = (is_inside[:, None] & (index >= 0) & (index < tensor.shape[axis])).ravel()
        data = np.zeros((len(offsets), tensor.item), np.uint8)
        sources = (tensor.address + offsets[is_inside]).astype(np.uint64)
        elements = np.flatnonzero(is_inside)
        counters = self.memory.context.counters
        if counters is not None:
            counters.note_box(site, sources, tensor.item)
        if self.memory.early[thread]:
            self.memory.context.fault("load before griddepcontrol.wait", site, "a tensor copy")
        complain = self.memory.complain(tensor.item, site, "load")
        chosen: Array | slice
        for segment, chosen, place in self.memory.memory.located(sources, tensor.item, tensor.item, complain):
            times = np.full(len(place), self.threads.time[thread])
            segment.note_read(place, tensor.item, times, self.memory.say(site))
            data[elements[chosen]] = segment.data[place[:, None] + np.arange(tensor.item)]
        return data.ravel()
