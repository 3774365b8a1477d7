"""The heart of the engine: plans a step, runs it, samples, and moves every completion on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from time import perf_counter

from paged.errors import InvalidInputError, UnsupportedError
from paged.executors.batch_runner import HandleRunner, UnifiedRunner
from paged.executors.cache_space import BlockSpace, TokenSpace
from paged.executors.drafting import aligned_drafts, draft
from paged.executors.engine_config import EngineConfig
from paged.executors.engine_metrics import EngineMetrics
from paged.executors.model_executor import ModelExecutor
from paged.executors.proposer import Proposer
from paged.executors.request import Completion, Request, RequestOutput, State
from paged.executors.row_matrix import row_matrix
from paged.executors.sampler import Drafts, Sampled, Sampler
from paged.executors.scheduler import Plan, Scheduler
from paged.executors.step_pacer import StepPacer
from paged.executors.step_runner import Ran, StepRunner
from paged.executors.steps_ahead import StepsAhead
from paged.executors.unified_executor import UnifiedExecutor
from paged.seq_id import SeqId


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
        self._scheduler = Scheduler(config, space, decode_cost=decode_cost)
        self._runner = StepRunner(
            UnifiedRunner(executor) if is_unified else HandleRunner(executor), self._make_room, self._fail, self.metrics
        )
        self._sampler = Sampler(info.vocab_size, info.device)
        is_ahead = info.device.type == "cuda" if config.prepare_ahead is None else config.prepare_ahead
        can_prepare = is_ahead and manager is not None and proposer is None
        self._ahead = StepsAhead(
            executor if can_prepare and isinstance(executor, UnifiedExecutor) else None, self._scheduler, self.metrics
        )
        self._pacer = None if config.decode_stretch is None else StepPacer(config.decode_stretch)
        self._requests: dict[SeqId, Request] = {}
        self._changed: dict[SeqId, RequestOutput] = {}

    def step(self) -> list[RequestOutput]:
        """One forward over what can run; the requests that gained tokens or ended. Empty when there is none."""
        started = perf_counter()
        self._changed = {}
        limit = None if self._pacer is None else self._pacer.max_prefill_tokens
        plan = self._scheduler.plan(max_prefill_tokens=limit)
        if plan.decodes or plan.chunks:
            drafts = draft(self._proposer, plan.decodes)
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
        return list(self._changed.values())

    def _add(self, request: Request) -> None:
        self._requests[request.request_id] = request
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
        completions = ran.completions
        if not completions:
            return
        logits = row_matrix([row for row in ran.rows if row is not None])
        if drafts is None:
            sampled = self._sampler.sample(logits, completions, self._ahead.prepare)
        else:
            sampled = self._sampler.verify(logits, completions, aligned_drafts(drafts, plan.decodes, completions))
        if plan.chunks:
            self._note_first_tokens(completions)
        self._append(completions, sampled, is_plain=drafts is None and sampled.logprobs is None)

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
            self.metrics.cached_tokens += request.output.num_cached_tokens
        forks = request.completions[request.num_begun :]
        request.num_begun += len(forks)
        for fork in forks:
            assert self._blocks is not None
            self._blocks.fork(completion, fork)
            self._scheduler.add_decoding(fork)
        return [completion, *forks]

    def _note_first_tokens(self, completions: Sequence[Completion]) -> None:
        now = perf_counter()
        for request in {completion.request for completion in completions}:
            if request.first_token is None:
                request.first_token = now
                self.metrics.time_to_first_token.observe(now - request.arrived)

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
        count, is_done = 0, False
        while not is_done and count < len(token_ids):
            is_done = completion.advance(token_ids[count]) and self._end_if_done(completion)
            count += 1
        if completion.output.logprobs is not None:
            completion.output.logprobs += logprobs[:count]
        if not is_done and completion.cached < ran_to:
            self.executor.truncate_kv(completion.handle, completion.cached)
        self.metrics.generated_tokens += count
        self.metrics.accepted_tokens += count - 1

    def _end_if_done(self, completion: Completion) -> bool:
        reason = completion.finish_reason()
        if reason == "error":
            self._fail(completion, "the logits left no token to choose")
        elif reason is not None:
            self._finish(completion, reason)
        return reason is not None

    def _make_room(self, spared: Collection[Completion]) -> bool:
        """Free blocks: those of drafts first, then those of the completion that ranks last."""
        manager = self.executor.kv_manager
        if self._proposer is not None and manager is not None and self._proposer.make_room(manager):
            return True
        victim = self._scheduler.preempt(spared)
        if victim is None:
            return False
        self.metrics.preempted["swap" if victim.is_swapped else "recompute"] += 1
        if self._proposer is not None:
            self._proposer.forget(victim)
        return True

    def _fail(self, completion: Completion, reason: str) -> None:
        request = completion.request
        request.output.error = reason
        if request.num_begun < len(request.completions):
            self._end(request, "error")  # those that were to fork from it
        else:
            self._finish(completion, "error")

    def _end(self, request: Request, reason: str) -> None:
        for completion in request.completions:
            if completion.state is not State.FINISHED:
                self._finish(completion, reason)

    def _finish(self, completion: Completion, reason: str) -> None:
        request, output = completion.request, completion.request.output
        completion.output.finish_reason = reason
        self._ahead.leave(completion)
        if completion.index < request.num_begun:
            self._scheduler.remove(completion)
        completion.state = State.FINISHED
        self._sampler.forget(completion)
        if self._proposer is not None:
            self._proposer.forget(completion)
        self._changed[request.request_id] = output
        output.finished = all(one.state is State.FINISHED for one in request.completions)
        if output.finished:
            del self._requests[request.request_id]
            self.metrics.finished[reason] += 1
            first, count = request.first_token, len(request.completions[0].output.token_ids)
            if first is not None and count > 1:
                self.metrics.time_per_output_token.observe((perf_counter() - first) / (count - 1))


def _num_rows(completions: Iterable[Completion]) -> int:
    return sum(len(completion.item.q_tokens) for completion in completions)
