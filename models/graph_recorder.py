"""What makes a function repeatable on the same tensors: a CUDA graph, or on a CPU a recording of its loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paged.kernels.common.device import use_triton, wants_loops
from paged.kernels.common.numba_ops.recording import Recording

Begin = Callable[[], Callable[[], None]]
"""Plans a step over tensors that stay where they are, and returns a function that runs it."""
Record = Callable[[Begin], Callable[[], None]]
"""Runs a step, and returns what repeats its work on whatever its tensors then hold."""


@dataclass(frozen=True)
class Unrecorded:
    """In place of a recording: plans and runs the step again, as `obstacle`, an operation in it, cannot be recorded."""

    run: Callable[[], None]
    obstacle: str

    def __call__(self) -> None:
        self.run()


class CudaGraphRecorder:
    """Every function becomes a CUDA graph; all of them share one pool of memory, since they run one after the other.

    The largest function comes first, so that the others find their memory there. What a function returns or keeps of
    its own is overwritten by the next graph: results go to tensors that were made outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, begin: Begin) -> Callable[[], None]:
        def run() -> None:
            begin()()

        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Kernels are compiled and loaded, and workspaces made, while nothing is captured: none of it can be done then.
        with torch.cuda.stream(self._stream):
            run()
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of the process do with the device meanwhile is their own matter.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        current.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


def graph_recorder(device: torch.device) -> Record:
    """The one for tensors on `device`. On a CPU without numba kernels steps are run anew, as are those (`Unrecorded`)
    that do what a `Recording` does not know."""
    if device.type == "cuda":
        return CudaGraphRecorder(device).record
    return _record if records_loops(device) else _call


def records_loops(device: torch.device) -> bool:
    """Whether numba's loops compute on a device, which may be recorded."""
    return device.type == "cpu" and wants_loops() and not use_triton(device)


def _record(begin: Begin) -> Callable[[], None]:
    def run_anew() -> None:
        begin()()

    run = begin()
    run()  # which binds the operations: that reads values, and a repetition need not
    recording = Recording(run)

    def repeat() -> None:
        if not recording.repeat():  # an error, which is raised where it is found anew
            run_anew()

    return Unrecorded(run_anew, recording.obstacle) if recording.obstacle else repeat


def _call(begin: Begin) -> Callable[[], None]:
    begin()()
    return lambda: begin()()
