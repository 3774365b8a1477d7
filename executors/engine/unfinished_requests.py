"""Unfinished requests of an engine: arrival, start, new tokens, end with a reason, release of resources, metrics."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from paged.executors.engine.cache_space import BlockSpace
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.engine.step import DecodeGroup, EngineStep
from paged.executors.isolation import attempt, once_more, quietly
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import NO_TOKEN, Completion, Request, State
from paged.executors.sampling.sampler import Sampled
from paged.seq_id import SeqId


class UnfinishedRequests:
    """Tracks requests from arrival to end, gives them their tokens, and ends them.

    Args:
        scheduler: queues and runs the completions.
        space: capacity of the cache.
        on_finish: called with every completion that ends, before its cache is freed; errors are logged.

    Attributes:
        by_id: requests by id.
        changed: outputs that gained tokens or ended in this step.
        sampled: time of the newest tokens, in seconds of `perf_counter`.
        is_stepping: whether a step is in progress; requests aborted meanwhile end after it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        space: BlockSpace,
        metrics: EngineMetrics,
        *,
        on_finish: Sequence[Callable[[Completion], object]],
    ) -> None:
        self.by_id: dict[SeqId, Request] = {}
        self.changed: dict[RequestOutput, None] = {}
        self.sampled = 0.0
        self.is_stepping = False
        self._scheduler = scheduler
        self._space = space
        self._metrics = metrics
        self._on_finish = [Completion.close_mask, *on_finish]
        self._timed: list[Request] = []  # requests with a deadline, earliest first
        self._aborted: list[Request] = []

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, request: Request) -> None:
        """Queue a request's completions. If the cache can fork, queue only the first, because its prompt serves all."""
        self._metrics.requests += 1
        self.by_id[request.request_id] = request
        if request.deadline < inf:
            insort(self._timed, request, key=_deadline)
        request.num_begun = 1 if self._space.can_fork else len(request.completions)
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
        """Note the time that requests which start at `now` spent in the queue."""
        for completion in completions:
            request = completion.request
            if not request.has_begun:
                request.has_begun = True
                quietly(measure, request, queued_s=now - request.arrived)

    def abort(self, request: Request) -> None:
        """End a request, or mark it during a step, because a garbage-collected stream may call this at any time."""
        self._aborted.append(request)  # first, so that the next step ends it if this call is interrupted
        if not self.is_stepping:
            self.end_aborted()

    def end_aborted(self) -> None:
        """End the requests that were aborted during a step."""
        while self._aborted:
            self.end(self._aborted[-1], "abort")
            self._aborted.pop()

    def fail_all(self, failed: list[tuple[Completion, str]]) -> None:
        """End completions that could not run, and empty the list."""
        while failed:
            completion, reason = failed.pop(0)
            if completion.state is not State.FINISHED:
                self.fail(completion, reason)

    def fail(self, completion: Completion, reason: str) -> None:
        """End a completion with an error, and the completions that would have forked from it."""
        request = completion.request
        request.output.error = reason
        if request.num_begun < len(request.completions):
            self.end(request, "error", reason)
        else:
            self.finish(completion, "error")

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End the remaining completions of a request, with an error, if any. Repeatable after an interrupt."""
        request.output.error = error or request.output.error
        for completion in list(request.unfinished):
            self.finish(completion, reason)
        self._close_if_done(request, reason)

    def finish(self, completion: Completion, reason: str) -> None:
        """End a completion and free all its resources, even if some part raises. Repeatable after an interrupt."""
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

    def advance(self, sampled: Sampled, step: EngineStep) -> None:
        """Give completions the tokens that a step has sampled, and end completions that are done."""
        self.sampled = perf_counter()
        completions, token_ids, logprobs = sampled.completions, sampled.token_ids, sampled.logprobs
        group = self._scheduler.current_group(completions)
        if group is None:  # some may have ended while the step ran
            unfinished = []
            for row, completion in enumerate(completions):
                if completion.state is not State.FINISHED:
                    unfinished.append(row)
            self._metrics.dropped_tokens += len(completions) - len(unfinished)
            completions = [completions[row] for row in unfinished]
            group = DecodeGroup(completions)
            token_ids = [token_ids[row] for row in unfinished]
            if logprobs is not None:
                logprobs = [logprobs[row] for row in unfinished]
        if step.num_prefill_tokens:
            for request in {completion.request for completion in completions}:
                if request.first_token is None:
                    request.first_token = self.sampled
                    quietly(self._measure_first_token, request)
        self.changed.update(group.outputs)
        if step.drafts is not None:
            group.steps_left = 0
            tables = logprobs or [[]] * len(completions)
            for completion, ids, table in zip(completions, token_ids, tables, strict=True):
                self._advance_by_several(completion, ids, table)
            return
        if logprobs:
            for completion, table, (token,) in zip(completions, logprobs, token_ids, strict=True):
                if completion.output.growth.logprobs is not None and token != NO_TOKEN:
                    completion.output.growth.logprobs.extend(table)
        ending = group.advance(token_ids)
        num_no_tokens = sum(completion.token_ids[-1] == NO_TOKEN for completion in ending)
        self._metrics.generated_tokens += len(completions) - num_no_tokens
        for completion in ending:
            self._finish_if_done(completion)

    def _advance_by_several(
        self, completion: Completion, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> None:
        """Give a completion its accepted drafts and the next token, up to a token that ends it; roll back the rest."""
        ran_to, before = completion.chunk_start + len(completion.chunk), len(completion.token_ids)
        for token in token_ids:
            completion.token_ids.append(token)
            if self._finish_if_done(completion):
                break
        # NO_TOKEN is not counted, because `finish_reason` has removed it.
        count = len(completion.token_ids) - before
        if completion.output.growth.logprobs is not None:
            completion.output.growth.logprobs.extend(logprobs[:count])
        self._metrics.generated_tokens += count
        self._metrics.accepted_tokens += max(count - 1, 0)
        completion.num_sampled = len(completion.token_ids)
        if completion.state is not State.FINISHED and completion.cached < ran_to:
            attempt(partial(self.fail, completion), once_more, self._space.truncate, completion)

    def _finish_if_done(self, completion: Completion) -> bool:
        reason = attempt(partial(self.fail, completion), completion.finish_reason)
        if reason == "error":
            self.fail(completion, "the logits left no token to choose")
        elif reason is not None:
            self._space.publish([completion])
            self.finish(completion, reason)
        return completion.state is State.FINISHED

    def _measure_first_token(self, request: Request) -> None:
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
    """Return the sort key of a deadline, made unique by the turn."""
    return request.deadline, request.turn


def measure(request: Request, **values: Any) -> None:
    request.output.metrics = replace(request.output.metrics, **values)
