"""The unfinished requests of an engine: queued, begun, ended by a reason, with what they hold and what is measured."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.isolation import quietly
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import Completion, Request, State
from paged.seq_id import SeqId


class UnfinishedRequests:
    """Requests from their arrival to their end, and the ways in which they end.

    Args:
        scheduler: it queues and runs their completions.
        can_fork: whether sequences can fork, so that one prompt serves all completions of a request.
        on_finish: called with every completion that ends, while it still holds its cache; errors are logged.

    Attributes:
        by_id: the requests by their ids.
        changed: outputs that gained tokens or ended in this step.
        sampled: when the newest tokens came, in seconds of `perf_counter`.
        is_stepping: whether a step runs; requests that are aborted meanwhile end after it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        *,
        can_fork: bool,
        on_finish: Sequence[Callable[[Completion], object]],
    ) -> None:
        self.by_id: dict[SeqId, Request] = {}
        self.changed: dict[RequestOutput, None] = {}
        self.sampled = 0.0
        self.is_stepping = False
        self._scheduler = scheduler
        self._metrics = metrics
        self._can_fork = can_fork
        self._on_finish = [Completion.close_mask, *on_finish]
        self._timed: list[Request] = []  # those with a deadline, the earliest first
        self._aborted: list[Request] = []

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, request: Request) -> None:
        """Queue a request's completions; if the cache can fork, only the first one, whose prompt serves them all."""
        self._metrics.requests += 1
        self.by_id[request.request_id] = request
        if request.deadline < inf:
            insort(self._timed, request, key=_deadline)
        request.num_begun = 1 if self._can_fork else len(request.completions)
        for completion in request.completions[: request.num_begun]:
            self._scheduler.add(completion)

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        if not self._timed:
            return
        now = perf_counter()
        while self._timed and self._timed[0].deadline <= now:
            request = self._timed[0]
            self.end(request, "timeout", f"not done after {now - request.arrived:.3f} s")

    def begin(self, completions: Iterable[Completion], now: float) -> None:
        """Record the time in the queue of requests that start at `now`."""
        for completion in completions:
            request = completion.request
            if not request.has_begun:
                request.has_begun = True
                quietly(measure, request, queued_s=now - request.arrived)

    def abort(self, request: Request) -> None:
        """End a request; within a step, after it, because a stream that is garbage-collected may ask at any time."""
        self._aborted.append(request)  # first, so that the next step ends it if this is interrupted
        if not self.is_stepping:
            self.end_aborted()

    def end_aborted(self) -> None:
        """End the requests that were aborted within a step."""
        while self._aborted:
            self.end(self._aborted[-1], "abort")
            self._aborted.pop()

    def fail_all(self, failed: list[tuple[Completion, str]]) -> None:
        """End completions that could not be run, and empty the list."""
        while failed:
            completion, reason = failed.pop(0)
            if completion.state is not State.FINISHED:
                self.fail(completion, reason)

    def fail(self, completion: Completion, reason: str) -> None:
        """End a completion that cannot go on, and those that were to fork from it."""
        request = completion.request
        request.output.error = reason
        if request.num_begun < len(request.completions):
            self.end(request, "error", reason)
        else:
            self.finish(completion, "error")

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End the remaining completions of a request, with an error if there is one; repeatable after an interrupt."""
        request.output.error = error or request.output.error
        for completion in list(request.unfinished):
            self.finish(completion, reason)
        self._close_if_done(request, reason)

    def finish(self, completion: Completion, reason: str) -> None:
        """End a completion and free everything it holds, even if something raises; repeatable after an interrupt."""
        request = completion.request
        completion.output.finish_reason = reason
        for listener in self._on_finish:
            quietly(listener, completion)
        self._scheduler.remove(completion)
        if request.first_token is not None and completion.token_ids:
            request.generating_s += self.sampled - request.first_token
        self.changed[request.output] = None
        request.unfinished.pop(completion, None)
        self._close_if_done(request, reason)

    def _close_if_done(self, request: Request, reason: str) -> None:
        if not request.unfinished and self.by_id.get(request.request_id) is request:
            request.output.finished = True
            index = bisect_left(self._timed, _deadline(request), key=_deadline)
            if self._timed[index : index + 1] == [request]:
                del self._timed[index]
            quietly(self._measure_mean_token, request)
            self._metrics.finished[reason] += 1
            del self.by_id[request.request_id]

    def measure_first_token(self, request: Request) -> None:
        seconds = self.sampled - request.arrived
        measure(request, first_token_s=seconds)
        self._metrics.time_to_first_token.observe(seconds)

    def _measure_mean_token(self, request: Request) -> None:
        num_later_tokens = sum(max(len(completion.token_ids) - 1, 0) for completion in request.completions)
        if num_later_tokens:
            mean = request.generating_s / num_later_tokens
            measure(request, mean_token_s=mean)
            self._metrics.time_per_output_token.observe(mean)


def _deadline(request: Request) -> tuple[float, tuple[int, int]]:
    """Return the sort key of a deadline; the rank makes it unique."""
    return request.deadline, request.rank


def measure(request: Request, **values: Any) -> None:
    request.output.metrics = replace(request.output.metrics, **values)
