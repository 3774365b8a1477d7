"""The heart of the engine: plans a step, runs it, samples, and moves every completion on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

import torch

from paged.batch import SeqId
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
from paged.executors.step_runner import StepRunner


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
            self._take(plan, self._runner.run([*plan.decodes, *plan.chunks]), drafts)
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

    def _take(self, plan: Plan, ran: Sequence[tuple[Completion, torch.Tensor | None]], drafts: Drafts | None) -> None:
        """Count what ran, sample what ended with logits, and move those completions on."""
        completions: list[Completion] = []
        rows: list[torch.Tensor] = []
        prefill_tokens = total = 0
        for completion, row in ran:
            item = completion.item
            count = len(item.q_tokens)
            total += count
            completion.cached = item.pos_offset + count
            is_prefill = completion.state is State.PREFILL
            if is_prefill:
                prefill_tokens += count
            if row is not None:
                started = self._end_prefill(completion) if is_prefill else (completion,)
                completions += started
                rows += [row] * len(started)
        self.metrics.steps += bool(ran)
        self.metrics.prefill_tokens += prefill_tokens
        self.metrics.decode_tokens += total - prefill_tokens
        self.metrics.mixed_steps += 0 < prefill_tokens < total
        if not completions:
            return
        logits = row_matrix(rows)
        if drafts is None:
            sampled = self._sampler.sample(logits, completions)
        else:
            sampled = self._sampler.verify(logits, completions, aligned_drafts(drafts, plan.decodes, completions))
        self._append(completions, sampled)

    def _end_prefill(self, completion: Completion) -> list[Completion]:
        """It decodes from here on, and so do the other completions of its prompt."""
        request = completion.request
        self._scheduler.to_decoding(completion)
        if request.first_token is None and completion.handle is not None:
            request.output.num_cached_tokens = completion.handle.num_cached_tokens
            self.metrics.cached_tokens += completion.handle.num_cached_tokens
        forks = request.completions[request.num_begun :]
        request.num_begun += len(forks)
        for fork in forks:
            assert self._blocks is not None
            self._blocks.fork(completion, fork)
            self._scheduler.add_decoding(fork)
        return [completion, *forks]

    def _append(self, completions: Sequence[Completion], sampled: Sampled) -> None:
        now = perf_counter()
        generated = 0
        for index, (completion, token_ids) in enumerate(zip(completions, sampled.token_ids, strict=True)):
            request = completion.request
            self._changed[request.request_id] = request.output
            if request.first_token is None:
                request.first_token = now
                self.metrics.time_to_first_token.observe(now - request.arrived)
            reason, place = None, 0
            for place, token in enumerate(token_ids):
                if token < 0:
                    self._fail(completion, "the logits left no token to choose")
                    break
                reason = completion.append(token)
                generated += 1
                if completion.output.logprobs is not None and sampled.logprobs is not None:
                    completion.output.logprobs.append(sampled.logprobs[index][place])
                if reason is not None:
                    break
            self.metrics.accepted_tokens += place
            if reason is not None:
                self._finish(completion, reason)
            elif completion.state is State.DECODE:
                self._move_on(completion)
        self.metrics.generated_tokens += generated

    def _move_on(self, completion: Completion) -> None:
        """Its next step begins with its newest token; rejected drafts leave the cache."""
        length = completion.num_tokens - 1
        if length < completion.cached:
            self.executor.truncate_kv(completion.handle, length)
            completion.cached = length
        completion.follow()

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
