"""Streams, events and graphs: what is known to have happened before what, and work that is taken down for replays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tests.emulated_device.emulator.memory import Allocation, Block, poison

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda

# By stream: how much of its work is over at the least.
Clock = dict[int, int]
Blocks = tuple[Block, ...]

# A device is as slow as can be: an event happens when somebody waits for it. Who asks again and again waits as well.
_PATIENCE = 1000


def merge(clock: Clock, other: Clock) -> None:
    """Let `clock` know all that `other` knows."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def covers(clock: Clock, other: Clock) -> bool:
    """Whether `clock` knows all that `other` knows."""
    return all(clock.get(stream, 0) >= time for stream, time in other.items())


class Stream:
    """`torch.cuda.Stream`. capture: the graph that takes down what is given to the stream, while there is one."""

    machine: ClassVar[EmulatedCuda]
    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", self.machine.index_of(device))
        self.stream_id = self.cuda_stream = next(self._ids)
        self.priority = priority
        self.clock: Clock = {}
        self.capture: CUDAGraph | None = None
        self.machine.streams.append(self)

    def tick(self) -> int:
        """The time of a piece of work given to the stream now, after all that the host has seen end."""
        merge(self.clock, self.machine.host)
        self.clock[self.stream_id] = self.clock.get(self.stream_id, 0) + 1
        return self.clock[self.stream_id]

    def wait_stream(self, other: Stream) -> None:
        merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = self.machine.new_event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.wait_for("stream.synchronize", self.clock)

    def query(self) -> bool:
        return covers(self.machine.host, self.clock)


class Event:
    """`torch.cuda.Event`: what its stream had been given when it was recorded."""

    machine: ClassVar[EmulatedCuda]
    _moments = itertools.count()

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._clock: Clock = {}
        self._moment: int | None = None
        self._is_timed = enable_timing
        self._queries = 0

    def record(self, stream: Stream | None = None) -> None:
        self._clock = dict((stream or self.machine.current_stream()).clock)
        self._moment, self._queries = next(self._moments), 0

    def wait(self, stream: Stream | None = None) -> None:
        merge((stream or self.machine.current_stream()).clock, self._clock)

    def synchronize(self) -> None:
        self.machine.wait_for("event.synchronize", self._clock)

    def query(self) -> bool:
        self._queries += 1
        if self._queries == _PATIENCE:
            self.synchronize()
        return covers(self.machine.host, self._clock)

    def elapsed_time(self, end: Event) -> float:
        """A made-up time, in milliseconds."""
        if not (self._is_timed and end._is_timed) or self._moment is None or end._moment is None:
            raise ValueError("Both events must be recorded with timing enabled before their time can be told.")
        return 1e-2 * (end._moment - self._moment)


@dataclass(frozen=True)
class Work:
    """One launch, operation or copy. run: does it on the tensors it was made with, and may find out which blocks it
    reads and writes; until then these are what is known."""

    name: str
    place: str
    reads: Blocks
    writes: Blocks
    run: Callable[[], tuple[Blocks, Blocks] | None]


class Pool(list[tuple[Allocation, torch.Tensor]]):
    """Memory that graphs keep for themselves; none of it holds anything from one replay to the next."""


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: the work of a stream, done again over whatever its memory then holds."""

    machine: ClassVar[EmulatedCuda]

    def __init__(self, keep_graph: bool = False) -> None:
        self._stream: Stream | None = None
        self.reset()

    def reset(self) -> None:
        self._works: list[Work] = []
        self._is_whole, self._pool = False, Pool()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        stream = self.machine.current_stream()
        if self.machine.thread.capturing is not None:
            raise RuntimeError("CUDA error: a capture is under way in this thread already")
        self._pool, self._works, self._is_whole = self._pool if pool is None else pool, [], False
        self._stream, stream.capture, self.machine.thread.capturing = stream, self, stream
        self._device = stream.device

    def capture_end(self) -> None:
        assert self._stream is not None
        self._stream.capture, self.machine.thread.capturing, self._stream = None, None, None
        self._is_whole = True

    def add(self, work: Work) -> None:
        """What the stream that is captured was given."""
        self._works.append(work)

    def keep(self, allocation: Allocation, inner: torch.Tensor) -> None:
        """Memory that the capture allocated."""
        self._pool.append((allocation, inner))

    def pool(self) -> Pool:
        return self._pool

    def replay(self) -> None:
        if not self._is_whole:
            raise RuntimeError("CUDA error: a graph was replayed before a capture of it had ended")
        self.machine.report.num_replays += 1
        if self.machine.executes:  # another graph may have used all of the pool
            for _, inner in self._pool:
                poison(inner)
        stream = self.machine.current_stream(self._device)
        for work in self._works:
            self.machine.perform(stream, work)
