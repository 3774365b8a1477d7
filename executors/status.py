"""The measured side of `ExecutorStatus`: counts, times and bytes, moved by forwards that ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from paged.errors import PagedError
from paged.executors.types import ExecutorState, ExecutorStatus


@dataclass(frozen=True)
class ForwardWork:
    """What one forward does: prompts it completes and rows of prompts, tokens it decodes (a row each)."""

    prefills: int
    prefill_tokens: int
    decodes: int


class WorkMeter:
    """Adds up what an executor did; `memory_bytes` tells what it holds at this moment."""

    def __init__(self, device: torch.device, memory_bytes: Callable[[], int]) -> None:
        self.state = ExecutorState.READY
        self._device = device
        self._memory_bytes = memory_bytes
        self._peak_memory_bytes = memory_bytes()
        self.prefills = self.decodes = self._prefill_tokens = self._forwards = self._failed_calls = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        self._untimed: deque[tuple[ForwardWork, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call: the state meanwhile, and whether it failed."""
        self.state = ExecutorState.BUSY
        try:
            yield
        except BaseException as error:
            self._failed_calls += 1
            self.state = ExecutorState.READY if isinstance(error, PagedError) else ExecutorState.FAILED
            raise
        self.state = ExecutorState.READY

    @contextmanager
    def forward(self, work: ForwardWork) -> Iterator[None]:
        """Around a forward that does `work`, counted if it succeeds. On a GPU it is the stream that is timed."""
        on_gpu = self._device.type == "cuda"
        started, start = perf_counter(), self._event() if on_gpu else None
        yield
        if start is not None:
            self._untimed.append((work, start, self._event()))
            self._collect_times(wait=False)
        else:
            self._add_seconds(work, perf_counter() - started)
        self._forwards += 1
        self.prefills += work.prefills
        self._prefill_tokens += work.prefill_tokens
        self.decodes += work.decodes
        self._peak_memory_bytes = max(self._peak_memory_bytes, self._memory_bytes())

    def status(self) -> ExecutorStatus:
        """The totals until now; waits for forwards that are still running on a GPU."""
        self._collect_times(wait=True)
        return ExecutorStatus(
            state=self.state,
            prefill_count=self.prefills,
            decode_count=self.decodes,
            prefill_tokens=self._prefill_tokens,
            failed_calls=self._failed_calls,
            forwards=self._forwards,
            average_prefill_seconds=self._prefill_seconds / max(self.prefills, 1),
            average_decode_seconds=self._decode_seconds / max(self.decodes, 1),
            memory_bytes=self._memory_bytes(),
            peak_memory_bytes=self._peak_memory_bytes,
        )

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _collect_times(self, *, wait: bool) -> None:
        while self._untimed and (wait or self._untimed[0][2].query()):
            work, start, end = self._untimed.popleft()
            end.synchronize()
            self._add_seconds(work, start.elapsed_time(end) / 1e3)

    def _add_seconds(self, work: ForwardWork, seconds: float) -> None:
        prefill_share = work.prefill_tokens / (work.prefill_tokens + work.decodes)
        self._prefill_seconds += seconds * prefill_share
        self._decode_seconds += seconds * (1 - prefill_share)
