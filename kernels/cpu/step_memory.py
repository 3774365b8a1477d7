"""Memory that a model's recordings share, as CUDA graphs share a pool: no two of them run at once."""

from __future__ import annotations

import weakref
from bisect import bisect
from typing import NamedTuple

import torch

# Bytes of a cache line, to which PyTorch aligns chunks, and the fewest bytes of a chunk.
_ALIGNMENT = 64
_LEAST_CHUNK = 8 << 20


class _Span(NamedTuple):
    """Bytes of a chunk from `start` to below `end`."""

    chunk: int
    start: int
    end: int

    def touches(self, following: _Span) -> bool:
        return self.chunk == following.chunk and self.end == following.start


class StepMemory:
    """Memory for temporary tensors of a step: later tensors take the place of earlier ones that were dropped."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._free: list[_Span] = []  # sorted; no two spans touch
        self._returned: list[_Span] = []  # freed since the last `take`; a tensor may die in any thread

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Return memory for a tensor. It is freed when the last view of it is gone."""
        while self._returned:
            self._add_free(self._returned.pop())
        size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        span = self._take_span(size)
        memory = self._chunks[span.chunk].numpy()[span.start : span.start + num_bytes]
        # The storage keeps its NumPy array alive, and a finalizer can watch the array. So the last view frees the span.
        weakref.finalize(memory, self._returned.append, span).atexit = False
        return torch.from_numpy(memory).untyped_storage()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this memory."""
        return self._chunk_of(tensor) is not None

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy if it lies in this memory, so that its place stays free for later tensors."""
        chunk = self._chunk_of(tensor)
        if chunk is None:
            return tensor
        start = (tensor.untyped_storage().data_ptr() - chunk.data_ptr()) // tensor.itemsize
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(chunk.untyped_storage(), start + tensor.storage_offset(), tensor.shape, tensor.stride())

    def _chunk_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_cpu or tensor.is_mkldnn:
            return None
        address = tensor.untyped_storage().data_ptr()
        for chunk in self._chunks:
            if chunk.data_ptr() <= address < chunk.data_ptr() + chunk.nbytes:
                return chunk
        return None

    def _take_span(self, size: int) -> _Span:
        for index, span in enumerate(self._free):
            if span.end - span.start >= size:
                del self._free[index]
                break
        else:
            self._chunks.append(torch.empty(max(size, _LEAST_CHUNK), dtype=torch.uint8))
            index, span = len(self._free), _Span(len(self._chunks) - 1, 0, self._chunks[-1].nbytes)
        end = span.start + size
        if end < span.end:
            self._free.insert(index, _Span(span.chunk, end, span.end))
        return _Span(span.chunk, span.start, end)

    def _add_free(self, span: _Span) -> None:
        """Add a span, joined with the spans that it touches."""
        index = bisect(self._free, span)
        if index < len(self._free) and span.touches(self._free[index]):
            span = span._replace(end=self._free.pop(index).end)
        if index > 0 and self._free[index - 1].touches(span):
            index -= 1
            span = span._replace(start=self._free.pop(index).start)
        self._free.insert(index, span)
