"""The heart of the engine: plans a step, runs it, samples, and moves every completion on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.engine.batch_runner import HandleRunner, UnifiedRunner, WrongResultsError
from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Plan, Scheduler
from paged.executors.engine.step_pacer import StepPacer
from paged.executors.engine.step_runner import Ran, StepRunner
from paged.executors.engine.steps_ahead import StepsAhead
from paged.executors.isolation import describe, quietly, raise_exit
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.deadlines import Deadlines
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import Completion, Request, State
from paged.executors.sampling.row_matrix import row_matrix
from paged.executors.sampling.sampler import Drafts, Sampled, Sampler
from paged.executors.speculation.drafting import aligned_drafts, draft
from paged.executors.speculation.proposer import Proposer
from paged.executors.unified_executor import UnifiedExecutor
from paged.seq_id import SeqId

_LOG = logging.getLogger("paged")


class EngineCore:
    """Requests that were checked, and the step that runs them. `Engine` is what callers use."""

    def __init__(self, executor: ModelExecutor, config: EngineConfig, proposer: Proposer | None) -> None:
        self.executor = executor
        self.config = config
        self.metrics = EngineMetrics()
        info, manager = executor.info(), executor.kv_manager
        is_unified = executor.supports_native_unified_decode()
        decode_cost = 1
        if proposer is not None:
            decode_cost += proposer.num_tokens
            can_roll_back = executor.capabilities().supports_truncate and (manager is not None or not is_unified)
            if not can_roll_back:
                raise UnsupportedError(f"{info.model_id}: speculation needs a cache that can be truncated")
            if proposer.vocab_size not in (None, info.vocab_size):
                raise InvalidInputError(f"proposer: a vocabulary of {proposer.vocab_size}, expected {info.vocab_size}")
        if config.token_budget < decode_cost:
            raise InvalidInputError(
                f"token_budget: {config.token_budget}, expected at least {decode_cost}, with drafts"
            )
        self._proposer = proposer
        self._blocks = None if manager is None else BlockSpace(executor, manager, config.admission_tokens)
        space = TokenSpace(executor) if self._blocks is None else self._blocks
        self._scheduler = Scheduler(config, space, self._fail, decode_cost=decode_cost)
        self._runner = StepRunner(
            UnifiedRunner(executor) if is_unified else HandleRunner(executor),
            self._make_room,
            self._fail,
            space.release if manager is None else None,
            self.metrics,
        )
        self._vocab_size = info.vocab_size
        self._sampler = Sampler(info.vocab_size, info.device)
        is_ahead = info.device.type == "cuda" if config.prepare_ahead is None else config.prepare_ahead
        can_prepare = is_ahead and manager is not None and proposer is None
        self._ahead = StepsAhead(
            executor if can_prepare and isinstance(executor, UnifiedExecutor) else None, self._scheduler, self.metrics
        )
        self._pacer = None if config.decode_stretch is None else StepPacer(config.decode_stretch)
        self._requests: dict[SeqId, Request] = {}
        self._deadlines = Deadlines()
        self._sampled = 0.0
        self._changed: dict[SeqId, RequestOutput] = {}
        self._is_stepping = False
        self._leaving: list[Request] = []

    def step(self) -> list[RequestOutput]:
        """One forward over what can run; the requests that gained tokens or ended. Empty when there is none.

        What goes wrong with one completion ends it alone, with finish_reason "error".

        What it calls, a tokenizer or an executor, may add requests, abort and discard; those end when the step has.

        Raises:
            ExecutorShutDownError: nothing can run any more; every request has ended, so it is raised once.
            UnsupportedError: it is called by what a step calls.
        """
        if self._is_stepping:
            raise UnsupportedError("step: called within a step")
        self._changed = {}
        self._is_stepping = True
        try:
            self._step()
        except BaseException as error:  # not of one request: those of its own end it
            for request in list(self._requests.values()):
                self._end(request, "error", describe(error))
            raise
        finally:
            self._is_stepping = False
            while self._leaving:
                self._end(self._leaving.pop(), "abort")
        return list(self._changed.values())

    def _abort(self, request: Request) -> None:
        """End a request, now or, within a step that may be at work on it, behind that: a stream that is collected as
        garbage may ask for it at any time.
        """
        if self._is_stepping:
            self._leaving.append(request)
        else:
            self._end(request, "abort")

    def _step(self) -> None:
        started = perf_counter()
        for request in self._deadlines.passed(started):
            self._end(request, "timeout", f"not done after {started - request.arrived:.3f} s")
        limit = None if self._pacer is None else self._pacer.max_prefill_tokens
        plan = self._scheduler.plan(max_prefill_tokens=limit)
        if plan.decodes or plan.chunks:
            _note_begun(plan.chunks)
            drafts = draft(self._proposer, plan.decodes, self._vocab_size)
            self.metrics.draft_tokens += 0 if drafts is None else sum(map(len, drafts.token_ids))
            ran = self._runner.run([*plan.decodes, *plan.chunks])
            self._ahead.end()
            self._take(plan, ran, drafts)
            seconds = perf_counter() - started
            self.metrics.step_time.observe(seconds)
            if self._pacer is not None and plan.decodes:
                self._pacer.observe(seconds, plan.num_prefill_tokens)
        elif self._scheduler.waiting and self._scheduler.preempt() is None:
            self._fail(self._scheduler.waiting[0], "the cache has no room for it, and no request here holds any")

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._deadlines.add(request)
        # Where the cache can fork, the others begin with the first one's prompt.
        request.num_begun = len(request.completions) if self._blocks is None else 1
        for completion in request.completions[: request.num_begun]:
            self._scheduler.add(completion)
        self.metrics.requests += 1

    def _take(self, plan: Plan, ran: Ran, drafts: Drafts | None) -> None:
        """Count what ran, sample what ended with logits, and move those completions on."""
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
            self._sample(ran, plan, drafts, self._ahead.prepare)

    def _sample(self, ran: Ran, plan: Plan, drafts: Drafts | None, meanwhile: Callable[[], None] | None) -> None:
        """Sample and move on; after an error in halves, until the completion that it comes from is alone and fails."""
        completions = ran.completions
        try:
            if drafts is None:
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
                self._sample(Ran(completions[part], ran.rows[part]), plan, drafts, None)
            return
        self._sampled = perf_counter()
        if plan.chunks:
            self._note_first_tokens(completions)
        self._append(completions, sampled, is_plain=drafts is None and sampled.logprobs is None)

    def _logits(self, ran: Ran, num_rows: int) -> torch.Tensor:
        logits = row_matrix([row for row in ran.rows if row is not None])
        if logits.shape != (num_rows, self._vocab_size):
            raise WrongResultsError(f"logits {tuple(logits.shape)}, expected {(num_rows, self._vocab_size)}")
        return logits.float()

    def _end_chunks(self, ran: Ran) -> Ran:
        """What has logits, completions that start at the end of another's prompt included."""
        sampled = Ran([], [])
        for completion, row in zip(ran.completions, ran.rows, strict=True):
            if completion.state is State.PREFILL:
                completion.cached += len(completion.item.q_tokens)
            if row is not None:
                started = self._end_prefill(completion) if completion.state is State.PREFILL else [completion]
                sampled.completions.extend(started)
                sampled.rows.extend([row] * len(started))
        return sampled

    def _end_prefill(self, completion: Completion) -> list[Completion]:
        """It decodes from here on, and so do the other completions of its prompt."""
        request = completion.request
        self._scheduler.to_decoding(completion)
        if request.first_token is None:
            self.metrics.cached_tokens += request.num_cached_tokens
        forks = request.completions[request.num_begun :]
        request.num_begun += len(forks)
        started = [completion]
        for fork in forks:
            assert self._blocks is not None
            self._scheduler.add_decoding(fork)
            try:
                self._blocks.fork(completion, fork)
            except BaseException as error:
                raise_exit(error)
                self._fail(fork, describe(error))
            else:
                started.append(fork)
        return started

    def _note_first_tokens(self, completions: Sequence[Completion]) -> None:
        for request in {completion.request for completion in completions}:
            if request.first_token is None:
                request.first_token = self._sampled
                quietly(self._measure_first_token, request)

    def _measure_first_token(self, request: Request) -> None:
        seconds = self._sampled - request.arrived
        request.output.metrics = replace(request.output.metrics, first_token_s=seconds)
        self.metrics.time_to_first_token.observe(seconds)

    def _append(self, completions: Sequence[Completion], sampled: Sampled, *, is_plain: bool) -> None:
        """Give completions their tokens; `is_plain`: one each, without log probabilities."""
        self._changed.update([completion.reported for completion in completions])
        if is_plain:
            pairs = zip(completions, sampled.token_ids, strict=True)
            for completion in [completion for completion, (token,) in pairs if completion.advance(token)]:
                self._end_if_done(completion)
            self.metrics.generated_tokens += len(completions)
        else:
            logprobs = sampled.logprobs or [[]] * len(completions)
            for completion, token_ids, tables in zip(completions, sampled.token_ids, logprobs, strict=True):
                self._append_several(completion, token_ids, tables)

    def _append_several(
        self, completion: Completion, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> None:
        """The drafts that stayed and the token after them, until one of them ends it; the others leave the cache."""
        ran_to = completion.item.pos_offset + len(completion.item.q_tokens)
        before, count, is_done = len(completion.token_ids), 0, False
        while not is_done and count < len(token_ids):
            is_done = completion.advance(token_ids[count]) and self._end_if_done(completion)
            count += 1
        # One that was no token is there no more.
        count = len(completion.token_ids) - before
        if completion.output.growth.logprobs is not None:
            completion.output.growth.logprobs.extend(logprobs[:count])
        self.metrics.generated_tokens += count
        self.metrics.accepted_tokens += max(count - 1, 0)
        if not is_done and completion.cached < ran_to:
            try:
                self.executor.truncate_kv(completion.handle, completion.cached)
            except BaseException as error:
                raise_exit(error)
                self._fail(completion, describe(error))

    def _end_if_done(self, completion: Completion) -> bool:
        try:
            reason = completion.finish_reason()
        except BaseException as error:  # of its tokenizer
            raise_exit(error)
            self._fail(completion, describe(error))
            return True
        if reason == "error":
            self._fail(completion, "the logits left no token to choose")
        elif reason is not None:
            self._finish(completion, reason)
        return reason is not None

    def _make_room(self, spared: Collection[Completion]) -> bool:
        """Free blocks: those of drafts first, then those of the completion that ranks last."""
        manager = self.executor.kv_manager
        if self._proposer is not None and manager is not None:
            try:
                if self._proposer.make_room(manager):
                    return True
            except BaseException as error:
                raise_exit(error)
                _LOG.warning("drafts gave no room: %s", describe(error))
        victim = self._scheduler.preempt(spared)
        if victim is None:
            return False
        self.metrics.preempted["swap" if victim.is_swapped else "recompute"] += 1
        if self._proposer is not None:
            quietly(self._proposer.forget, victim)
        return True

    def _fail(self, completion: Completion, reason: str) -> None:
        request = completion.request
        request.output.error = reason
        if request.num_begun < len(request.completions):
            self._end(request, "error", reason)  # those that were to fork from it
        else:
            self._finish(completion, "error")

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        request.output.error = error or request.output.error
        for completion in request.completions:
            if completion.state is not State.FINISHED:
                self._finish(completion, reason)

    def _finish(self, completion: Completion, reason: str) -> None:
        """It has ended: nobody holds anything of it any more, whatever others raise when they are to give it back."""
        request, output = completion.request, completion.request.output
        completion.output.finish_reason = reason
        quietly(self._ahead.leave, completion)
        self._scheduler.remove(completion)
        quietly(self._sampler.forget, completion)
        if self._proposer is not None:
            quietly(self._proposer.forget, completion)
        if request.first_token is not None and completion.token_ids:
            request.generating_s += self._sampled - request.first_token
        self._changed[request.request_id] = output
        request.num_left -= 1
        output.finished = request.num_left == 0
        if output.finished:
            self._requests.pop(request.request_id, None)
            self.metrics.finished[reason] += 1
            quietly(self._measure_mean_token, request)

    def _measure_mean_token(self, request: Request) -> None:
        between = sum(max(len(one.token_ids) - 1, 0) for one in request.completions)
        if between:
            mean = request.generating_s / between
            request.output.metrics = replace(request.output.metrics, mean_token_s=mean)
            self.metrics.time_per_output_token.observe(mean)


def _note_begun(completions: Iterable[Completion]) -> None:
    """The times that requests waited in the queue."""
    now = perf_counter()
    for completion in completions:
        if not completion.request.has_begun:
            completion.request.has_begun = True
            quietly(_measure_queued, completion.request, now)


def _measure_queued(request: Request, now: float) -> None:
    request.output.metrics = replace(request.output.metrics, queued_s=now - request.arrived)


def _num_rows(completions: Iterable[Completion]) -> int:
    return sum(len(completion.item.q_tokens) for completion in completions)
