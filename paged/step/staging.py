"""Copies of host arrays to the device and of results to the host, through reused pinned memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Number of copies that may be in progress at once. Two steps and a draft model's drafts need fewer, see limits.md.
_NUM_BUFFERS = 64
_FIRST_SIZE = 1 << 16
# Alignment of each tensor in bytes. Triton would compile kernels again for pointers that are not multiples of 16.
_ALIGNMENT = 64


def to_device(
    arrays: Sequence[NDArray[Any]], device: torch.device, *, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`, by one asynchronous copy through pinned memory; on the CPU, as views.

    out: memory for the tensors, see `Staging.to_device`. If given, arrays are copied on the CPU as well.
    """
    if device.type == "cpu" and out is None:
        return [torch.from_numpy(array) for array in arrays]
    return _staging(device).to_device(arrays, out)


class HostCopy:
    """Copy of a tensor to the host; on a GPU, it is asynchronous until `numpy` is called."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied = _StreamEvent(tensor.device) if tensor.device.type == "cuda" else None
        self._tensor = tensor.to("cpu", non_blocking=True)  # into pinned memory, which PyTorch caches for later copies
        if self._copied is not None:
            self._copied.record()

    def numpy(self) -> NDArray[Any]:
        """Wait for the copy and return its values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.numpy()


@cache
def _staging(device: torch.device) -> Staging:
    return Staging(device)


class Staging:
    """Ring of pinned host buffers. Thread-safe.

    A buffer is reused only after the copy out of it is done, so a step never overwrites data that is still being sent.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], _StreamEvent] | None = None) -> None:
        """new_event: makes the events that mark the end of asynchronous copies; None for CUDA events on a GPU."""
        if new_event is None and device.type == "cuda":
            new_event = partial(_StreamEvent, device)
        self._device = device
        self._buffers = []
        for _ in range(_NUM_BUFFERS):
            event = None if new_event is None else new_event()
            self._buffers.append(_Buffer(event))
        self._ring = cycle(self._buffers)
        self.lock = Lock()

    def to_device(self, arrays: Sequence[NDArray[Any]], out: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, by one copy. Every tensor starts at a multiple of 64 bytes.

        out: uint8 memory up to the last array's end or longer; the tensors are then views of it. The offset of a tensor
        depends only on the sizes of the tensors before it.
        """
        starts = _starts(arrays)
        if out is None:
            moved = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        else:
            moved = out[: starts[-1]]
        with self.lock:
            buffer = self.next_buffer(len(moved))
            for array, start in zip(arrays, starts, strict=False):
                buffer.bytes[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
            buffer.send(buffer.memory[: len(moved)], moved)
        return _views(moved, arrays)

    def next_buffer(self, size: int) -> _Buffer:
        """Return a buffer of at least `size` bytes. The caller holds the lock and makes one copy out of the buffer."""
        buffer = next(self._ring)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if len(buffer.bytes) < size:
            buffer.grow(size, is_pinned=self._device.type == "cuda")
        return buffer


class FixedCopy:
    """Repeated copies of arrays with fixed shapes to the same tensors. Reused views make it three times as fast.

    tensors: the targets on the device.
    """

    def __init__(self, staging: Staging, arrays: Sequence[NDArray[Any]], out: torch.Tensor | None = None) -> None:
        """arrays: examples of dtypes and shapes. out: uint8 memory for the tensors; None allocates it."""
        self._staging, self._arrays, self._size = staging, arrays, _starts(arrays)[-1]
        if out is None:
            out = torch.zeros(self._size, dtype=torch.uint8, device=staging._device)
        self._out = out[: self._size]
        self.tensors = _views(self._out, arrays)
        # For each buffer: its memory, the part to copy, and the part's views as arrays.
        self._sources: dict[_Buffer, tuple[torch.Tensor, torch.Tensor, list[NDArray[Any]]]] = {}

    def send(self, rows: Sequence[NDArray[Any]], fills: Sequence[int]) -> None:
        """Copy values to the tensors; each tensor gets its `rows` and then its fill value along the last axis."""
        with self._staging.lock:
            buffer = self._staging.next_buffer(self._size)
            memory, source, targets = self._sources.get(buffer) or (None, None, [])
            if memory is not buffer.memory or source is None:
                source = buffer.memory[: self._size]
                targets = [view.numpy() for view in _views(source, self._arrays)]
                self._sources[buffer] = buffer.memory, source, targets
            for target, row, fill in zip(targets, rows, fills, strict=True):
                count = row.shape[-1]
                target[..., :count] = row
                if count < target.shape[-1]:
                    target[..., count:] = fill
            buffer.send(source, self._out)


def _views(memory: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Return views of memory like `arrays`, at the offsets of `_starts`."""
    views: list[torch.Tensor] = []
    for array, start in zip(arrays, _starts(arrays), strict=False):
        part = memory[start : start + array.nbytes]
        views.append(part.view(torch.from_numpy(array).dtype).view(array.shape))
    return views


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return the offset of each array and the end of the last array."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + math.ceil(array.nbytes / _ALIGNMENT) * _ALIGNMENT)
    return starts


class _Buffer:
    """Host memory and the event at the end of the last copy out of it; the event is None if copies are synchronous."""

    def __init__(self, copied: _StreamEvent | None) -> None:
        self.copied = copied
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.bytes: NDArray[np.uint8] = self.memory.numpy()

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a part of the memory to the device; on a GPU this returns at once."""
        target.copy_(source, non_blocking=self.copied is not None)
        if self.copied is not None:
            self.copied.record()

    def grow(self, size: int, *, is_pinned: bool) -> None:
        """Grow to at least `size` bytes by doubling. The content is lost."""
        length = max(_FIRST_SIZE, 1 << (size - 1).bit_length())
        self.memory = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self.bytes = self.memory.numpy()


class _StreamEvent:
    """Point in the work of a device's current stream; before the first `record`, waiting returns at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()
