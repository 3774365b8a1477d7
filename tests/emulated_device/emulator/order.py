"""What is known to have happened before what: streams, events and the host, each with a clock of all streams."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda
    from tests.emulated_device.emulator.graphs import CUDAGraph

# By stream: how much of its work is over at the least.
Clock = dict[int, int]

# A device is as slow as can be: an event happens when somebody waits for it. Who asks again and again waits as well.
_PATIENCE = 1000


def merge(clock: Clock, other: Clock) -> None:
    """Let `clock` know all that `other` knows."""
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


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
        self._moment = next(self._moments)
        self._queries = 0

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
