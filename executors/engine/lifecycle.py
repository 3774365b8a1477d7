"""What becomes of requests: they begin, gain tokens, fork, fail and finish."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter

from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.isolation import attempt, quietly
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import Completion, Request, State
from paged.executors.sampling.sampler import Sampled
from paged.seq_id import SeqId


class RequestLifecycle:
    """Keeps the requests that are not done, moves their completions on and ends them.

    requests: by id. changed: the outputs that gained tokens or ended since it was last emptied.
    scheduler: where completions wait and run, over `space`. decode_cost: see `Scheduler`.
    on_finish: called with every completion that ends, while it still holds its cache; what they raise is logged.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        config: EngineConfig,
        space: BlockSpace | TokenSpace,
        metrics: EngineMetrics,
        *,
        decode_cost: int,
    ) -> None:
        self.requests: dict[SeqId, Request] = {}
        self.changed: dict[RequestOutput, None] = {}
        self.scheduler = Scheduler(config, space, self.fail, decode_cost=decode_cost)
        self.on_finish: list[Callable[[Completion], object]] = []
        self.metrics = metrics
        self._executor = executor
        self._blocks = space if isinstance(space, BlockSpace) else None
        self._timed: list[Request] = []  # those that have to end at some time, the earliest first
        self._sampled = 0.0

    def add(self, request: Request) -> None:
        """Queue the completions of a request: where the cache can fork, the first one, whose prompt serves them all."""
        self.requests[request.request_id] = request
        if request.deadline < inf:
            insort(self._timed, request, key=_deadline)
        request.num_begun = len(request.completions) if self._blocks is None else 1
        for completion in request.completions[: request.num_begun]:
            self.scheduler.add(completion)
        self.metrics.requests += 1

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed at `now`, seconds of `perf_counter`."""
        while self._timed and self._timed[0].deadline <= now:
            request = self._timed.pop(0)
            self.end(request, "timeout", f"not done after {now - request.arrived:.3f} s")

    def begin(self, completions: Iterable[Completion]) -> None:
        """Note which requests have waited in the queue until now."""
        now = perf_counter()
        for request in (completion.request for completion in completions):
            if not request.has_begun:
                request.has_begun = True
                quietly(_measure, request, queued_s=now - request.arrived)

    def end_prefill(self, completion: Completion) -> list[Completion]:
        """Have a completion decode from here on, and those that fork from its prompt; all that do."""
        request = completion.request
        self.scheduler.to_decoding(completion)
        if request.first_token is None:
            self.metrics.cached_tokens += request.num_cached_tokens
        forks = request.completions[request.num_begun :]
        request.num_begun += len(forks)
        for fork in forks:
            assert self._blocks is not None
            self.scheduler.add_decoding(fork)
            attempt(partial(self.fail, fork), self._blocks.fork, completion, fork)
        return [completion, *(fork for fork in forks if fork.state is State.DECODE)]

    def advance(
        self, completions: Sequence[Completion], sampled: Sampled, *, may_be_first: bool, drafted: bool
    ) -> None:
        """Give completions the tokens that were sampled for them, and end those that are done.

        may_be_first: some of them may be their requests' first tokens. drafted: some may be several for a completion.
        """
        self._sampled = perf_counter()
        if may_be_first:
            for request in {completion.request for completion in completions}:
                if request.first_token is None:
                    request.first_token = self._sampled
                    quietly(self._measure_first_token, request)
        self.changed.update(dict.fromkeys([completion.request_output for completion in completions]))
        if not drafted and sampled.logprobs is None:
            pairs = zip(completions, sampled.token_ids, strict=True)
            for completion in [completion for completion, (token,) in pairs if completion.advance(token)]:
                self._finish_if_done(completion)
            self.metrics.generated_tokens += len(completions)
        else:
            logprobs = sampled.logprobs or [[]] * len(completions)
            for completion, token_ids, tables in zip(completions, sampled.token_ids, logprobs, strict=True):
                self._advance_by_several(completion, token_ids, tables)

    def fail(self, completion: Completion, reason: str) -> None:
        """End a completion that cannot go on, and those that were to fork from it."""
        request = completion.request
        request.output.error = reason
        if request.num_begun < len(request.completions):
            self.end(request, "error", reason)
        else:
            self.finish(completion, "error")

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End what is left of a request, with an error where there is one."""
        request.output.error = error or request.output.error
        for completion in request.completions:
            if completion.state is not State.FINISHED:
                self.finish(completion, reason)

    def finish(self, completion: Completion, reason: str) -> None:
        """End a completion and give back all that it holds, whatever that raises."""
        request, output = completion.request, completion.request.output
        completion.output.finish_reason = reason
        for listener in self.on_finish:
            quietly(listener, completion)
        self.scheduler.remove(completion)
        if request.first_token is not None and completion.token_ids:
            request.generating_s += self._sampled - request.first_token
        self.changed[output] = None
        request.num_left -= 1
        output.finished = request.num_left == 0
        if output.finished:
            self.requests.pop(request.request_id, None)
            index = bisect_left(self._timed, _deadline(request), key=_deadline)
            if self._timed[index : index + 1] == [request]:
                del self._timed[index]
            self.metrics.finished[reason] += 1
            quietly(self._measure_mean_token, request)

    def _advance_by_several(
        self, completion: Completion, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> None:
        """Give it the accepted drafts and the token after them, until one ends it; the cache forgets other drafts."""
        ran_to = completion.item.pos_offset + len(completion.item.q_tokens)
        before, is_done = len(completion.token_ids), False
        for token in token_ids:
            is_done = completion.advance(token) and self._finish_if_done(completion)
            if is_done:
                break
        # One that was no token is not there any more.
        count = len(completion.token_ids) - before
        if completion.output.growth.logprobs is not None:
            completion.output.growth.logprobs.extend(logprobs[:count])
        self.metrics.generated_tokens += count
        self.metrics.accepted_tokens += max(count - 1, 0)
        if not is_done and completion.cached < ran_to:
            fail = partial(self.fail, completion)
            attempt(fail, self._executor.truncate_kv, completion.handle, completion.cached)

    def _finish_if_done(self, completion: Completion) -> bool:
        reason = attempt(partial(self.fail, completion), completion.finish_reason)
        if reason == "error":
            self.fail(completion, "the logits left no token to choose")
        elif reason is not None:
            self.finish(completion, reason)
        return completion.state is State.FINISHED

    def _measure_first_token(self, request: Request) -> None:
        seconds = self._sampled - request.arrived
        _measure(request, first_token_s=seconds)
        self.metrics.time_to_first_token.observe(seconds)

    def _measure_mean_token(self, request: Request) -> None:
        between = sum(max(len(one.token_ids) - 1, 0) for one in request.completions)
        if between:
            mean = request.generating_s / between
            _measure(request, mean_token_s=mean)
            self.metrics.time_per_output_token.observe(mean)


def _deadline(request: Request) -> tuple[float, tuple[int, int]]:
    """Unlike that of any other request, whose arrival is in its rank."""
    return request.deadline, request.rank


def _measure(request: Request, **seconds: float) -> None:
    request.output.metrics = replace(request.output.metrics, **seconds)
