"""Memory of the emulated devices: what is allocated where, who wrote it last, and what reaches beyond it."""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.emulated_device.emulator.report import place

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda
    from tests.emulated_device.emulator.order import Stream

# CUDA's allocator gives addresses that are multiples of it, and Triton specialises on 16.
_ALIGNMENT = 512


@dataclass(order=True)
class Block:
    """Bytes start..end of one device, or of pinned host memory (device None), with the work that used them last: by
    stream, its time and place."""

    start: int
    end: int = field(compare=False)
    device: int | None = field(compare=False)
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
    """All blocks that live, in the order of their addresses."""

    def __init__(self, machine: EmulatedCuda) -> None:
        self._machine = machine
        self._blocks: list[Block] = []
        self._by_storage: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
        self._used: dict[int | None, int] = {}
        self._peak: dict[int | None, int] = {}

    def used(self, device: int) -> int:
        """Bytes allocated."""
        return self._used.get(device, 0)

    def peak(self, device: int) -> int:
        """The most bytes that were allocated at once."""
        return self._peak.get(device, 0)

    def allocation_of(self, inner: torch.Tensor, device: torch.device) -> Allocation:
        """The allocation of a CPU tensor that stands for a device's: the one its storage has, or a new one."""
        storage = inner.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        known = self._by_storage.get(start) if size else None
        if known is not None:
            return known
        if self.used(device.index) + size > self._machine.total_memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes on {device}.")
        home = self._machine.current_stream(device)
        block = Block(start, start + size, device.index, home=None if home.capture else home)
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
        used = self._used[block.device] = self._used.get(block.device, 0) + block.end - block.start
        self._peak[block.device] = max(self._peak.get(block.device, 0), used)

    def find(self, address: int) -> Block | None:
        """The block that an address lies in."""
        index = bisect_right(self._blocks, address, key=lambda one: one.start) - 1
        return self._blocks[index] if index >= 0 and address < self._blocks[index].end else None

    def _free(self, block: Block, where: str) -> None:
        """Streams other than the one it was made on must be known to have done with it: that one may use it again."""
        block.is_alive = False
        del self._blocks[bisect_right(self._blocks, block.start, key=lambda one: one.start) - 1]
        self._used[block.device] -= block.end - block.start
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
    if writes:
        for by, (when, reader) in block.read.items():
            if not is_over(by, when):
                text = f"read at {reader}, overwritten on another stream that did not wait for it"
                machine.report.hazard("unordered streams", text, where)
        block.written, block.read = (stream.stream_id, time, where), {}
    else:
        block.read[stream.stream_id] = time, where


def zeros_like(shape: torch.Tensor) -> torch.Tensor:
    """Zeros of the size, strides and dtype of a tensor without memory, in pages that are not there until written."""
    last = sum((size - 1) * stride for size, stride in zip(shape.shape, shape.stride(), strict=True))
    num_bytes = (last + 1) * shape.element_size() if shape.numel() else 0
    pages = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -pages.ctypes.data % _ALIGNMENT
    flat = torch.from_numpy(pages[start : start + num_bytes]).view(shape.dtype)
    return flat.as_strided(shape.shape, shape.stride())


def poison(inner: torch.Tensor) -> None:
    """Fill a tensor's storage with ones: NaN in every floating point type, -1 in integers."""
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage())  # type: ignore[call-overload]
    bytes_.fill_(0xFF)
