"""The life of requests in an engine: queued, begun, ended by a reason, with what they hold and what is measured."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from typing import Any

from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.isolation import quietly
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import Completion, Request, State
from paged.seq_id import SeqId


class RequestLifecycle:
    """Unfinished requests, and the ways in which they end.

    _requests: unfinished requests, by id. _changed: outputs that gained tokens or ended in this step. _on_finish:
    called with every completion that ends, while it still holds its cache; errors are logged. _sampled: when the
    newest tokens came.
    """

    _space: BlockSpace | TokenSpace
    _scheduler: Scheduler

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self._requests: dict[SeqId, Request] = {}
        self._changed: dict[RequestOutput, None] = {}
        self._timed: list[Request] = []  # those with a deadline, the earliest first
        self._sampled = 0.0
        self._on_finish: list[Callable[[Completion], object]] = [Completion.close_mask]
        self._is_stepping = False
        self._aborted: list[Request] = []

    def _add(self, request: Request) -> None:
        """Queue a request's completions; if the cache can fork, only the first one, whose prompt serves them all."""
        self.metrics.requests += 1
        self._requests[request.request_id] = request
        if request.deadline < inf:
            insort(self._timed, request, key=_deadline)
        request.num_begun = 1 if isinstance(self._space, BlockSpace) else len(request.completions)
        for completion in request.completions[: request.num_begun]:
            self._scheduler.add(completion)

    def _expire(self, now: float) -> None:
        """End the requests whose deadline has passed at `now`, in seconds of `perf_counter`."""
        while self._timed and self._timed[0].deadline <= now:
            request = self._timed[0]
            self._end(request, "timeout", f"not done after {now - request.arrived:.3f} s")

    def _begin(self, completions: Iterable[Completion], now: float) -> None:
        """Record the time in the queue of requests that start at `now`."""
        for request in (completion.request for completion in completions):
            if not request.has_begun:
                request.has_begun = True
                quietly(measure, request, queued_s=now - request.arrived)

    def _abort(self, request: Request) -> None:
        """End a request; within a step, after it, because a stream that is garbage-collected may ask at any time."""
        self._aborted.append(request)  # first, so that the next step ends it if this is interrupted
        if not self._is_stepping:
            self._end_aborted()

    def _end_aborted(self) -> None:
        while self._aborted:
            self._end(self._aborted[-1], "abort")
            self._aborted.pop()

    def _fail_all(self, failed: list[tuple[Completion, str]]) -> None:
        """End completions that could not be run, and empty the list."""
        while failed:
            completion, reason = failed.pop(0)
            if completion.state is not State.FINISHED:
                self._fail(completion, reason)

    def _fail(self, completion: Completion, reason: str) -> None:
        """End a completion that cannot go on, and those that were to fork from it."""
        request = completion.request
        request.output.error = reason
        if request.num_begun < len(request.completions):
            self._end(request, "error", reason)
        else:
            self._finish(completion, "error")

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End the remaining completions of a request, with an error if there is one; repeatable after an interrupt."""
        request.output.error = error or request.output.error
        for completion in list(request.unfinished):
            self._finish(completion, reason)
        self._close_if_done(request, reason)

    def _finish(self, completion: Completion, reason: str) -> None:
        """End a completion and free everything it holds, even if something raises; repeatable after an interrupt."""
        request = completion.request
        completion.output.finish_reason = reason
        for listener in self._on_finish:
            quietly(listener, completion)
        self._scheduler.remove(completion)
        if request.first_token is not None and completion.token_ids:
            request.generating_s += self._sampled - request.first_token
        self._changed[request.output] = None
        request.unfinished.pop(completion, None)
        self._close_if_done(request, reason)

    def _close_if_done(self, request: Request, reason: str) -> None:
        if not request.unfinished and self._requests.get(request.request_id) is request:
            request.output.finished = True
            index = bisect_left(self._timed, _deadline(request), key=_deadline)
            if self._timed[index : index + 1] == [request]:
                del self._timed[index]
            quietly(self._measure_mean_token, request)
            self.metrics.finished[reason] += 1
            del self._requests[request.request_id]

    def _measure_first_token(self, request: Request) -> None:
        seconds = self._sampled - request.arrived
        measure(request, first_token_s=seconds)
        self.metrics.time_to_first_token.observe(seconds)

    def _measure_mean_token(self, request: Request) -> None:
        num_later_tokens = sum(max(len(completion.token_ids) - 1, 0) for completion in request.completions)
        if num_later_tokens:
            mean = request.generating_s / num_later_tokens
            measure(request, mean_token_s=mean)
            self.metrics.time_per_output_token.observe(mean)


def _deadline(request: Request) -> tuple[float, tuple[int, int]]:
    """Return the sort key of a deadline; the rank makes it unique."""
    return request.deadline, request.rank


def measure(request: Request, **values: Any) -> None:
    request.output.metrics = replace(request.output.metrics, **values)
