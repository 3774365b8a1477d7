"""CUDA graphs: the work of a stream taken down, and done again over whatever its memory then holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tests.emulated_device.emulator.memory import Allocation, Block, poison
from tests.emulated_device.emulator.order import Stream

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda

Blocks = tuple[Block, ...]


@dataclass(frozen=True)
class Work:
    """One launch, operation or copy. run: does it on the tensors it was made with, and may find out which blocks it
    reads and writes; until then these are what is known."""

    name: str
    place: str
    reads: Blocks
    writes: Blocks
    run: Callable[[], tuple[Blocks, Blocks] | None]


class Pool:
    """Memory that graphs keep for themselves; none of it holds anything from one replay to the next."""

    def __init__(self) -> None:
        self._kept: list[tuple[Allocation, torch.Tensor]] = []

    def keep(self, allocation: Allocation, inner: torch.Tensor) -> None:
        """Give memory that a capture allocated to the pool."""
        self._kept.append((allocation, inner))

    def poison(self) -> None:
        """Another graph may have used all of it."""
        for _, inner in self._kept:
            poison(inner)


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    machine: ClassVar[EmulatedCuda]

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool = Pool()
        self._works: list[Work] = []
        self._stream: Stream | None = None
        self._is_whole = False

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        stream = self.machine.current_stream()
        if self.machine.capturing is not None:
            raise RuntimeError("CUDA error: a capture is under way in this thread already")
        self._pool, self._works, self._is_whole = pool or self._pool, [], False
        self._stream, stream.capture, self.machine.capturing = stream, self, stream
        self._device = stream.device

    def capture_end(self) -> None:
        assert self._stream is not None
        self._stream.capture, self.machine.capturing, self._stream = None, None, None
        self._is_whole = True

    def add(self, work: Work) -> None:
        """What the stream that is captured was given."""
        self._works.append(work)

    def keep(self, allocation: Allocation, inner: torch.Tensor) -> None:
        """Memory that the capture allocated."""
        self._pool.keep(allocation, inner)

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None:
        self._works, self._is_whole, self._pool = [], False, Pool()

    def replay(self) -> None:
        if not self._is_whole:
            raise RuntimeError("CUDA error: a graph was replayed before a capture of it had ended")
        self.machine.report.num_replays += 1
        if self.machine.executes:
            self._pool.poison()
        stream = self.machine.current_stream(self._device)
        for work in self._works:
            self.machine.perform(stream, work)


class graph:  # noqa: N801
    """`torch.cuda.graph`, the context in which a graph is captured."""

    machine: ClassVar[EmulatedCuda]

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
        self._stream = stream or self.machine.new_stream()

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._graph.capture_end()
        if kind is not None:
            self._graph.reset()
        self._context.__exit__(kind, error, trace)
