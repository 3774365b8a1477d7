"""The engine's step: plan, run, sample, and give completions their tokens."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Plan, Scheduler
from paged.executors.engine.step_runner import StepResults, StepRunner, WrongResultsError
from paged.executors.isolation import attempt, describe, quietly, raise_exit
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import Completion, Request, State
from paged.executors.sampling.rows import row_matrix
from paged.executors.sampling.sampler import Drafts, Sampled, Sampler
from paged.executors.speculation.drafting import Proposer, aligned_drafts, draft
from paged.executors.unified_executor import UnifiedExecutor
from paged.forward_step import PreparedStep
from paged.seq_id import SeqId

_LOG = logging.getLogger("paged")


class EngineCore:
    """Checked requests and the step that runs them; `Engine` is its public face.

    _requests: unfinished requests, by id. _changed: outputs that gained tokens or ended in this step. _on_finish:
    called with every completion that ends, while it still holds its cache; errors are logged.
    """

    def __init__(self, executor: ModelExecutor, config: EngineConfig, proposer: Proposer | None) -> None:
        decode_cost = _decode_cost(executor, config, proposer)
        info, manager = executor.info(), executor.kv_manager
        self.executor = executor
        self.config = config
        self.metrics = EngineMetrics()
        self._proposer = proposer
        if manager is None:
            self._space: BlockSpace | TokenSpace = TokenSpace(executor)
        else:
            self._space = BlockSpace(executor, manager, config.admission_tokens)
        self._requests: dict[SeqId, Request] = {}
        self._changed: dict[RequestOutput, None] = {}
        self._timed: list[Request] = []  # those that have to end at some time, the earliest first
        self._sampled = 0.0
        self._scheduler = Scheduler(config, self._space, self._fail, decode_cost=decode_cost)
        self._runner = StepRunner(executor, self._make_room, self._fail, self._space.release, self.metrics)
        is_unified = executor.supports_native_unified_decode()
        self._prefers_tokens = is_unified and executor.capabilities().prefers_tokens
        self._vocab_size = info.vocab_size
        self._sampler = Sampler(info.vocab_size, info.device)
        is_ahead = info.device.type == "cuda" if config.prepare_ahead is None else config.prepare_ahead
        self._prepares = is_ahead and manager is not None and proposer is None
        self._prepared: PreparedStep | None = None
        self._prepared_for: list[Completion] = []
        self._on_finish: list[Callable[[Completion], object]] = [self._leave_prepared, self._sampler.forget]
        if proposer is not None:
            self._on_finish.append(proposer.forget)
        self._is_stepping = False
        self._aborted: list[Request] = []

    def step(self) -> list[RequestOutput]:
        """Run one forward over everything that can run; return the requests that gained tokens or ended.

        The list is empty if there are no requests. An error of one completion ends only that one, with finish_reason
        "error". A tokenizer or an executor that the step calls may add, abort and discard requests; aborted ones end
        after the step.

        Raises:
            ExecutorShutDownError, RankFailedError: nothing can run any more. Every request has ended, so it is raised
                once.
            UnsupportedError: called within a step.
        """
        if self._is_stepping:
            raise UnsupportedError("step: called within a step")
        self._changed = {}
        try:
            self._is_stepping = True
            self._step()
            self._is_stepping = False  # here, too: an interrupt may come before the last line below
        except BaseException as error:  # not of one request: those of its own end it
            for request in list(self._requests.values()):
                self._end(request, "error", describe(error))
            raise
        finally:
            self._is_stepping = False
            self._end_aborted()
        return list(self._changed)

    def _abort(self, request: Request) -> None:
        """End a request; within a step, after it, because a stream that is garbage-collected may ask at any time."""
        self._aborted.append(request)  # first: the next step ends one whose abort was interrupted
        if not self._is_stepping:
            self._end_aborted()

    def _end_aborted(self) -> None:
        while self._aborted:
            self._end(self._aborted[-1], "abort")
            self._aborted.pop()

    def _step(self) -> None:
        started = perf_counter()
        self._expire(started)
        plan = self._scheduler.plan()
        if plan.decodes or plan.chunks:
            self._begin(plan.chunks)
            drafts = draft(self._proposer, plan.decodes, self._vocab_size)
            self.metrics.draft_tokens += 0 if drafts is None else sum(map(len, drafts.token_ids))
            completions, num_prefill_tokens = [*plan.decodes, *plan.chunks], _num_rows(plan.chunks)
            if self._prefers_tokens and drafts is None:
                self._ask_for_tokens(completions)
            ran = self._runner.run(completions)
            self._end_prepared()
            self._take(plan, ran, drafts)
            seconds = perf_counter() - started
            self.metrics.step_time.observe(seconds)
            if self._scheduler.pacer is not None and plan.decodes:
                self._scheduler.pacer.observe(seconds, num_prefill_tokens)
        elif self._scheduler.waiting and self._scheduler.preempt() is None:
            first = self._scheduler.waiting[0]
            self._fail(first, "the cache has no room for it, and no request here holds any")

    def _ask_for_tokens(self, completions: Sequence[Completion]) -> None:
        """Let the executor choose the tokens of a step if no completion asks for more than it can do."""
        final = [one for one in completions if one.item.is_final_chunk]
        # Others of a request begin with the logits of the first one's prompt.
        is_single = all(one.request.params.n == 1 for one in final)
        for one, draw in zip(final, (is_single and self._sampler.draws(final)) or (), strict=False):
            one.item.ask(draw)

    def _take(self, plan: Plan, ran: StepResults, drafts: Drafts | None) -> None:
        """Count the tokens that ran, sample the rows with logits, and advance those completions."""
        num_rows, prefill_tokens = len(ran.completions), 0
        if plan.chunks or drafts is not None:
            num_rows = _num_rows(ran.completions)
            prefill_tokens = _num_rows(one for one in ran.completions if one.state is State.PREFILL)
            ran = self._end_chunks(ran)
        self.metrics.steps += num_rows > 0
        self.metrics.mixed_steps += 0 < prefill_tokens < num_rows
        self.metrics.prefill_tokens += prefill_tokens
        self.metrics.decode_tokens += num_rows - prefill_tokens
        if ran.completions:
            self._sample(ran, plan, drafts, self._prepare_next)

    def _sample(
        self, ran: StepResults, plan: Plan, drafts: Drafts | None, meanwhile: Callable[[], None] | None
    ) -> None:
        """Sample and advance; after an error in halves, until the failing completion is alone."""
        completions = ran.completions
        try:
            if all(row is not None and row.dim() == 0 for row in ran.rows):
                tokens = torch.stack([row for row in ran.rows if row is not None])
                if meanwhile is not None:
                    meanwhile()
                sampled = Sampled(tokens[:, None].tolist())
            elif drafts is None:
                sampled = self._sampler.sample(self._logits(ran, len(completions)), completions, meanwhile)
            else:
                drafted = aligned_drafts(drafts, plan.decodes, completions)
                num_rows = sum(len(ids) + 1 for ids in drafted.token_ids)
                sampled = self._sampler.verify(self._logits(ran, num_rows), completions, drafted)
        except BaseException as error:
            raise_exit(error)
            self._sampler.reset()
            if len(completions) == 1:
                self._fail(completions[0], describe(error))
                return
            middle = len(completions) // 2
            for part in (slice(middle), slice(middle, None)):
                self._sample(StepResults(completions[part], ran.rows[part]), plan, drafts, None)
            return
        self._advance(completions, sampled, may_be_first=bool(plan.chunks), drafted=drafts is not None)

    def _logits(self, ran: StepResults, num_rows: int) -> torch.Tensor:
        logits = row_matrix([row for row in ran.rows if row is not None])
        if logits.shape != (num_rows, self._vocab_size):
            raise WrongResultsError(f"logits {tuple(logits.shape)}, expected {(num_rows, self._vocab_size)}")
        return logits.float()

    def _prepare_next(self) -> None:
        """Prepare the next step of decodes while the device runs this one, as if no request came or ended early.

        It takes blocks only for running sequences, so none is preempted for it. If blocks are missing, nothing is
        prepared; errors are logged.
        """
        executor = self.executor
        if self._prepares and isinstance(executor, UnifiedExecutor):
            self._prepared_for = self._scheduler.predict()
            handles = [completion.handle for completion in self._prepared_for if completion.handle is not None]
            warn = partial(_LOG.warning, "the next step was not prepared: %s")
            self._prepared = attempt(warn, executor.prepare_step, handles) if handles else None

    def _leave_prepared(self, completion: Completion) -> None:
        """Cancel the prepared step if the completion, which has ended, is in it."""
        if self._prepared is not None and completion in self._prepared_for:
            self._end_prepared()

    def _end_prepared(self) -> None:
        """Release the prepared step: a step has run, which used it, or else nothing can use it any more."""
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            prepared.cancel()
            self.metrics.prepared_steps += prepared.is_used
            self.metrics.dropped_steps += not prepared.is_used

    def _end_chunks(self, ran: StepResults) -> StepResults:
        """Return the rows with logits; completions that fork at the end of a prompt get its row too."""
        sampled = StepResults([], [])
        for completion, row in zip(ran.completions, ran.rows, strict=True):
            if completion.state is State.PREFILL:
                completion.cached += len(completion.item.q_tokens)
            if row is not None:
                started = self._end_prefill(completion) if completion.state is State.PREFILL else [completion]
                sampled.completions.extend(started)
                sampled.rows.extend([row] * len(started))
        return sampled

    def _make_room(self, spared: Collection[Completion]) -> bool:
        """Free blocks: first those of drafts, then those of the completion that ranks last."""
        proposer, manager = self._proposer, self.executor.kv_manager
        if proposer is not None and manager is not None:
            warn = partial(_LOG.warning, "drafts gave no room: %s")
            if attempt(warn, proposer.make_room, manager):
                return True
        victim = self._scheduler.preempt(spared)
        if victim is None:
            return False
        self.metrics.preempted["swap" if victim.is_swapped else "recompute"] += 1
        if proposer is not None:
            quietly(proposer.forget, victim)
        return True

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

    def _begin(self, completions: Iterable[Completion]) -> None:
        """Record the time in the queue of requests that start now."""
        now = perf_counter()
        for request in (completion.request for completion in completions):
            if not request.has_begun:
                request.has_begun = True
                quietly(_measure, request, queued_s=now - request.arrived)

    def _end_prefill(self, completion: Completion) -> list[Completion]:
        """Start decoding a completion and those that fork from its prompt; return all that decode."""
        request = completion.request
        self._scheduler.to_decoding(completion)
        if request.first_token is None:
            self.metrics.cached_tokens += request.num_cached_tokens
        forks = request.completions[request.num_begun :]
        request.num_begun += len(forks)
        for fork in forks:
            assert isinstance(self._space, BlockSpace)
            self._scheduler.add_decoding(fork)
            attempt(partial(self._fail, fork), self._space.fork, completion, fork)
        return [completion, *(fork for fork in forks if fork.state is State.DECODE)]

    def _advance(
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
        self._changed.update(dict.fromkeys([completion.request_output for completion in completions]))
        if not drafted and sampled.logprobs is None:
            pairs = zip(completions, sampled.token_ids, strict=True)
            for completion in [completion for completion, (token,) in pairs if completion.advance(token)]:
                self._finish_if_done(completion)
            self.metrics.generated_tokens += len(completions)
        else:
            logprobs = sampled.logprobs or [[]] * len(completions)
            for completion, token_ids, tables in zip(completions, sampled.token_ids, logprobs, strict=True):
                self._advance_by_several(completion, token_ids, tables)

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
        for completion in list(request.left):
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
        request.left.pop(completion, None)
        self._close_if_done(request, reason)

    def _close_if_done(self, request: Request, reason: str) -> None:
        if not request.left and self._requests.get(request.request_id) is request:
            request.output.finished = True
            index = bisect_left(self._timed, _deadline(request), key=_deadline)
            if self._timed[index : index + 1] == [request]:
                del self._timed[index]
            quietly(self._measure_mean_token, request)
            self.metrics.finished[reason] += 1
            del self._requests[request.request_id]

    def _advance_by_several(
        self, completion: Completion, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> None:
        """Give a completion its accepted drafts and one token more, until one ends it; roll back the others."""
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
            fail = partial(self._fail, completion)
            attempt(fail, self.executor.truncate_kv, completion.handle, completion.cached)

    def _finish_if_done(self, completion: Completion) -> bool:
        reason = attempt(partial(self._fail, completion), completion.finish_reason)
        if reason == "error":
            self._fail(completion, "the logits left no token to choose")
        elif reason is not None:
            self._finish(completion, reason)
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


def _decode_cost(executor: ModelExecutor, config: EngineConfig, proposer: Proposer | None) -> int:
    """Return the most tokens that a decoding sequence runs in a step, drafts included, after checking that they fit."""
    if proposer is None:
        return 1
    info, cost = executor.info(), 1 + proposer.num_tokens
    is_managed = executor.kv_manager is not None or not executor.supports_native_unified_decode()
    if not (is_managed and executor.capabilities().supports_truncate):
        raise UnsupportedError(f"{info.model_id}: speculation needs a cache that can be truncated")
    if proposer.vocab_size not in (None, info.vocab_size):
        raise InvalidInputError(f"proposer: a vocabulary of {proposer.vocab_size}, expected {info.vocab_size}")
    if config.token_budget < cost:
        raise InvalidInputError(f"token_budget: {config.token_budget}, expected at least {cost}, with drafts")
    return cost


def _num_rows(completions: Iterable[Completion]) -> int:
    return sum(len(completion.item.q_tokens) for completion in completions)


def _deadline(request: Request) -> tuple[float, tuple[int, int]]:
    """Return the sort key of a deadline; the rank makes it unique."""
    return request.deadline, request.rank


def _measure(request: Request, **seconds: float) -> None:
    request.output.metrics = replace(request.output.metrics, **seconds)
