"""Memory of the emulated machine: what is allocated where, who used it last, and copies between host and device."""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.emulated_device.emulator.report import place

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda
    from tests.emulated_device.emulator.streams import Clock, Stream

# CUDA's allocator gives addresses that are multiples of it, and Triton specialises on 16.
_ALIGNMENT = 512
_PAGES = 1 << 17  # bytes from which on memory is the system's own
# Linux's MAP_NORESERVE, which Python 3.11 does not name: without it no memory larger than the machine's is to be had.
_PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS | 0x4000


@dataclass(order=True)
class Block:
    """Bytes start..end of one device, or of pinned host memory (device None), with the work that used them last: by
    stream, its time and place. size: bytes that count as used; 0 in a graph's pool, which the next graph uses again."""

    start: int
    end: int = field(compare=False)
    device: int | None = field(compare=False)
    size: int = field(default=0, compare=False)
    is_alive: bool = field(default=True, compare=False)
    home: Stream | None = field(default=None, compare=False)
    written: tuple[int, int, str] | None = field(default=None, compare=False)
    read: dict[int, tuple[int, str]] = field(default_factory=dict, compare=False)


class Allocation:
    """What the tensors over a block hold together: the block is freed with the last of them."""

    def __init__(self, machine: EmulatedCuda, device: torch.device, block: Block, storage: Any) -> None:
        self.machine, self.device, self.block = machine, device, block
        self._storage = storage


class Memory:
    """All blocks that live, in the order of their addresses. used, peak: bytes of each device, now and at most."""

    def __init__(self, machine: EmulatedCuda) -> None:
        self._machine = machine
        self._blocks: list[Block] = []
        self._by_storage: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self.used: Counter[int | None] = Counter()
        self.peak: Counter[int | None] = Counter()

    def allocation_of(self, inner: torch.Tensor, device: torch.device) -> Allocation:
        """The allocation of a CPU tensor that stands for a device's: the one its storage has, or a new one."""
        storage = inner.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        known = self._by_storage.get(start) if size else None
        if known is not None:
            return known
        if self.used[device.index] + size > self._machine.total_memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes on {device}.")
        home = self._machine.current_stream(device)
        if home.capture is None:
            block = Block(start, start + size, device.index, size, home=home)
        else:
            block = Block(start, start + size, device.index)
        allocation = Allocation(self._machine, device, block, storage)
        if size:
            if home.capture is not None:
                home.capture.keep(allocation, inner)
            self._by_storage[start] = allocation
            self.add(block)
            weakref.finalize(allocation, self._free, block, place())
        return allocation

    def add(self, block: Block) -> None:
        """Let kernels use a block."""
        insort(self._blocks, block)
        self.used[block.device] += block.size
        self.peak[block.device] = max(self.peak[block.device], self.used[block.device])

    def find(self, address: int) -> Block | None:
        """The block that an address lies in."""
        index = bisect_right(self._blocks, address, key=lambda one: one.start) - 1
        return self._blocks[index] if index >= 0 and address < self._blocks[index].end else None

    def _free(self, block: Block, where: str) -> None:
        """Streams other than the one it was made on must be known to have done with it: that one may use it again."""
        block.is_alive = False
        del self._blocks[bisect_right(self._blocks, block.start, key=lambda one: one.start) - 1]
        self.used[block.device] -= block.size
        home = block.home
        if home is None:
            return
        uses = [(stream, *use) for stream, use in block.read.items()]
        for stream, time, user in [*uses, *([block.written] if block.written else [])]:
            clocks = home.clock, self._machine.host
            if stream != home.stream_id and all(clock.get(stream, 0) < time for clock in clocks):
                text = f"memory of {where} was freed while another stream may be using it, at {user}"
                self._machine.report.hazard("freed in use", text, where)


def access(machine: EmulatedCuda, stream: Stream, time: int, block: Block, *, writes: bool, where: str) -> None:
    """Work given to a stream uses a block: whatever it must come after has to be known to."""

    def is_over(by: int, when: int) -> bool:
        return by == stream.stream_id or stream.clock.get(by, 0) >= when

    if block.written is not None and not is_over(*block.written[:2]):
        verb = "overwritten" if writes else "read"
        text = f"written at {block.written[2]}, {verb} on another stream that did not wait for it"
        machine.report.hazard("unordered streams", text, where)
    if not writes:
        block.read[stream.stream_id] = time, where
        return
    for by, (when, reader) in block.read.items():
        if not is_over(by, when):
            text = f"read at {reader}, overwritten on another stream that did not wait for it"
            machine.report.hazard("unordered streams", text, where)
    block.written, block.read = (stream.stream_id, time, where), {}


def zeros_like(shape: torch.Tensor) -> torch.Tensor:
    """Zeros of the size, strides and dtype of a tensor without memory, in pages that are not there until written."""
    num_bytes = _span(shape) if shape.numel() else 0
    size = num_bytes + _ALIGNMENT
    # What NumPy has freed it would fill with zeros, and so touch every page of it.
    pages = np.zeros(size, np.uint8) if size < _PAGES else np.frombuffer(mmap(-1, size, _PRIVATE), np.uint8)
    start = -pages.ctypes.data % _ALIGNMENT
    flat = torch.from_numpy(pages[start : start + num_bytes]).view(shape.dtype)
    return flat.as_strided(shape.shape, shape.stride())


def poison(inner: torch.Tensor) -> None:
    """Fill a tensor's storage with ones: NaN in every floating point type, -1 in integers."""
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage())  # type: ignore[call-overload]
    bytes_.fill_(0xFF)


@dataclass(eq=False)
class _Transfer:
    """A copy that the stream has not come to yet. values: of `host` when the copy was asked for, or for it."""

    host: torch.Tensor
    values: torch.Tensor
    stream: int
    time: int
    place: str
    to_host: bool


class Transfers:
    """Pinned host memory, and the copies under way. What the device sends to it arrives when the host waits for it,
    not before; what the device takes from it has to stay until then."""

    def __init__(self, machine: EmulatedCuda) -> None:
        self._machine = machine
        # Kept for good, so that no address is ever another's.
        self._pinned: dict[int, tuple[Block, torch.UntypedStorage]] = {}
        self._in_flight: list[_Transfer] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a host tensor's memory for pinned."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            block = Block(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), None)
            self._pinned[block.start] = block, storage
            self._machine.memory.add(block)
        return tensor

    def pinned_block(self, tensor: torch.Tensor) -> Block | None:
        """The pinned memory that a host tensor lies in."""
        return self._pinned.get(_address(tensor), (None,))[0]

    def send(self, host: torch.Tensor, stream: int, time: int) -> None:
        """A copy out of pinned host memory has begun."""
        self._in_flight.append(_Transfer(host, host.clone(), stream, time, place(), to_host=False))

    def receive(self, host: torch.Tensor, values: torch.Tensor, stream: int, time: int) -> None:
        """A copy into pinned host memory has begun."""
        _bytes(host).fill_(0xFF)
        self._in_flight.append(_Transfer(host, values, stream, time, place(), to_host=True))

    def settle(self, clock: Clock | None = None) -> None:
        """The host knows that everything up to here is over; without a clock, the device is idle."""
        over = [one for one in self._in_flight if clock is None or clock.get(one.stream, 0) >= one.time]
        self._in_flight = [one for one in self._in_flight if one not in over]
        for transfer in over:
            if transfer.to_host:
                transfer.host.copy_(transfer.values)
            elif not torch.equal(_bytes(transfer.host), _bytes(transfer.values)):
                text = "the source of an asynchronous copy was overwritten before the copy was over"
                self._machine.report.hazard("host memory in flight", text, transfer.place)

    def deliver(self, host: torch.Tensor) -> None:
        """The device reads pinned memory that it may be sending to: its own order sees to that."""
        for transfer in self._in_flight:
            if transfer.to_host and _address(transfer.host) == _address(host):
                transfer.host.copy_(transfer.values)

    def host_uses(self, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """PyTorch reads and writes tensors on the host; what NumPy does is only seen by its results."""
        if not self._in_flight:
            return
        changed = {_address(tensor) for tensor in written}
        for tensor in tensors:
            for transfer in self._in_flight:
                if _address(transfer.host) != _address(tensor) or not _overlap(transfer.host, tensor):
                    continue
                if transfer.to_host:
                    text = f"the copy to it at {transfer.place} was not waited for"
                    self._machine.report.hazard("host memory in flight", text)
                elif _address(tensor) in changed:
                    text = f"overwritten while the copy from it at {transfer.place} was in flight"
                    self._machine.report.hazard("host memory in flight", text)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor, which has some, to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _address(tensor: torch.Tensor) -> int:
    """Where the storage of a host tensor begins."""
    return tensor.untyped_storage().data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0 or other.numel() == 0:
        return False
    return one.data_ptr() < other.data_ptr() + _span(other) and other.data_ptr() < one.data_ptr() + _span(one)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
