"""Copies of a step's host arrays to the device and of its results to the host, through reused pinned memory."""

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

# Copies that may be under way at once. A step sends at most 17: metadata, token ids, filters, penalties, rules, noise,
# and the rows with log probabilities. Two steps are under way at once. A draft model sends up to 44 for seven drafts
# without waiting.
_NUM_BUFFERS = 64
_FIRST_SIZE = 1 << 16
# Triton compiles another kernel for pointers that are not multiples of 16.
_ALIGNMENT = 64


def to_device(
    arrays: Sequence[NDArray[Any]], device: torch.device, *, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the arrays as tensors on `device`, copied at once asynchronously through pinned memory; on the CPU, views.

    out: memory for the tensors, see `Staging.to_device`; copied to on the CPU too.
    """
    if device.type == "cpu" and out is None:
        return [torch.from_numpy(array) for array in arrays]
    return _staging(device).to_device(arrays, out)


class HostCopy:
    """A copy of a tensor to the host, which is under way on a GPU until `numpy` is called."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied = _StreamEvent(tensor.device) if tensor.device.type == "cuda" else None
        self._tensor = tensor.to("cpu", non_blocking=True)  # to pinned memory, which PyTorch keeps for later copies
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
    """A ring of host buffers. Thread-safe.

    A buffer is reused only when the copy out of it is done, so that a step never overwrites data that an earlier one is
    still sending.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], _StreamEvent] | None = None) -> None:
        """new_event: makes events that mark the end of asynchronous copies; None takes CUDA events on a GPU."""
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
        """Return the arrays as tensors on the device, in one copy. Every tensor starts at a multiple of 64 bytes.

        out: uint8 [at least the last array's end]; the tensors are then views of it. The offset of each depends only on
            the sizes of those before it.
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
        """Return a buffer of at least `size` bytes; the caller, which holds the lock, makes one copy out of it."""
        buffer = next(self._ring)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if len(buffer.bytes) < size:
            buffer.grow(size, is_pinned=self._device.type == "cuda")
        return buffer


class FixedCopy:
    """Repeated copies of arrays of the same shapes to the same tensors. No new views are made: a third of the time.

    tensors: on the device, where the arrays go.
    """

    def __init__(self, staging: Staging, arrays: Sequence[NDArray[Any]], out: torch.Tensor | None = None) -> None:
        """arrays: examples of dtypes and shapes. out: memory for the tensors, uint8; None allocates it."""
        self._staging, self._arrays, self._size = staging, arrays, _starts(arrays)[-1]
        if out is None:
            out = torch.zeros(self._size, dtype=torch.uint8, device=staging._device)
        self._out = out[: self._size]
        self.tensors = _views(self._out, arrays)
        # For each buffer: its memory, the part to copy, and views of this part as arrays.
        self._sources: dict[_Buffer, tuple[torch.Tensor, torch.Tensor, list[NDArray[Any]]]] = {}

    def send(self, rows: Sequence[NDArray[Any]], fills: Sequence[int]) -> None:
        """Copy values to the tensors: along the last axis `rows`, then `fills`."""
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
    """Return tensors like `arrays` in memory, at the offsets of `_starts`."""
    views: list[torch.Tensor] = []
    for array, start in zip(arrays, _starts(arrays), strict=False):
        part = memory[start : start + array.nbytes]
        views.append(part.view(torch.from_numpy(array).dtype).view(array.shape))
    return views


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return the offset of each array, and the end of the last."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + math.ceil(array.nbytes / _ALIGNMENT) * _ALIGNMENT)
    return starts


class _Buffer:
    """Host memory, and an event for the end of the last copy out of it; None if copies are synchronous."""

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
        """Make capacity for `size` bytes by doubling. The content is lost."""
        length = max(_FIRST_SIZE, 1 << (size - 1).bit_length())
        self.memory = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self.bytes = self.memory.numpy()


class _StreamEvent:
    """A point in the work of a device's current stream; before the first `record` there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()
