"""The engine's step: plan, run, sample, and give completions their tokens."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import torch

from paged.batch import FullLogits, LogitsPolicy, UnifiedBatch, VerifyLogits
from paged.errors import InvalidInputError, OutOfBlocksError, UnsupportedError
from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.launched_step import LaunchedStep, StepSampler
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.engine.step_runner import CallResults, StepRunner, WrongResultsError, answer_rows
from paged.executors.isolation import attempt, describe, quietly
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import NO_TOKEN, Completion, Request, Rows, State
from paged.executors.sampling.logprobs import prompt_logprobs
from paged.executors.sampling.rows import index_tensor
from paged.executors.sampling.sampler import Sampled, Sampler
from paged.executors.speculation.drafting import Proposer, draft
from paged.executors.unified_executor import Answers
from paged.seq_id import SeqId

_LOG = logging.getLogger("paged")
# Logits of a step's prompt tokens whose log probabilities are wanted. At 12 bytes each, in the weights' dtype, in
# float32 and normalised, 147 rows of a vocabulary of 152,000.
_PROMPT_LOGITS = (256 << 20) // 12


class EngineCore:
    """Checked requests and the step that runs them; `Engine` is its public face.

    _requests: unfinished requests, by id. _changed: outputs that gained tokens or ended in this step. _unreported:
    those that did so between steps. _on_finish: called with every completion that ends, while it still holds its cache;
    errors are logged.
    """

    def __init__(self, executor: ModelExecutor, config: EngineConfig, proposer: Proposer | None) -> None:
        decode_cost = _decode_cost(executor, config, proposer)
        info, manager = executor.info(), executor.kv_manager
        is_recurrent = manager is not None and manager.config.recurrent is not None
        if config.batch_invariant and (proposer is not None or is_recurrent):
            what = "recurrent layers" if is_recurrent else "a proposer"
            raise UnsupportedError(f"{info.model_id}: batch_invariant is not supported with {what}")
        self.executor = executor
        self.config = config
        self.metrics = EngineMetrics()
        self._proposer = proposer
        if manager is None:
            self._space: BlockSpace | TokenSpace = TokenSpace(executor)
        else:
            if config.preemption == "swap" and not manager.config.num_swap_blocks:
                raise InvalidInputError(
                    "preemption: 'swap', but the cache has no num_swap_blocks; expected 'recompute'"
                )
            takes_prefixes = not config.batch_invariant  # another's decodes may have computed them
            self._space = BlockSpace(executor, manager, config.admission_tokens, takes_prefixes=takes_prefixes)
        self._requests: dict[SeqId, Request] = {}
        self._changed: dict[RequestOutput, None] = {}
        self._unreported: dict[RequestOutput, None] = {}
        self._timed: list[Request] = []  # those that have to end at some time, the earliest first
        self._sampled = self._last_taken = 0.0
        prompt_rows = max(_PROMPT_LOGITS // info.vocab_size, 1)
        self._scheduler = Scheduler(config, self._space, self._fail, decode_cost=decode_cost, prompt_rows=prompt_rows)
        self._runner = StepRunner(
            executor, self._make_room, self._fail, self._space.release, self.metrics, runs_apart=config.batch_invariant
        )
        self._is_unified = is_unified = executor.supports_native_unified_decode()
        self._prefers_tokens = is_unified and executor.capabilities().prefers_tokens
        self._vocab_size, self._device = info.vocab_size, info.device
        is_raw = config.logprobs_mode == "raw"
        self._sampler = Sampler(info.vocab_size, info.device, has_raw_logprobs=is_raw)
        self._step_sampler = StepSampler(self._sampler, info.vocab_size, self._fail, self._take_launched)
        overlaps = info.device.type == "cuda" if config.overlap is None else config.overlap
        can_overlap = is_unified and executor.capabilities().supports_device_ids and manager is not None
        self._overlaps = overlaps and can_overlap and proposer is None and not config.batch_invariant
        self._launched: LaunchedStep | None = None
        self._on_finish: list[Callable[[Completion], object]] = [self._sampler.forget, Completion.close_mask]
        if proposer is not None:
            self._on_finish.append(proposer.forget)
        self._is_stepping = False
        self._aborted: list[Request] = []
        self._num_updates = 0
        self._generation = self.generation
        # Sequences of forwards of no request that go on after other steps; an update of the weights frees them.
        self.own_seq_ids: set[SeqId] = set()

    @property
    def generation(self) -> tuple[int, int]:
        """Grows whenever the weights may have been replaced, by this engine or another caller of the executor."""
        return self.executor.weights_generation, self._num_updates

    def _begin_update(self) -> None:
        """Free everything that holds K/V of the weights; requests compute it again."""
        self._unreported = dict.fromkeys(self.drain())
        self._num_updates += 1
        self._scheduler.preempt_all()
        if self._proposer is not None and self.executor.kv_manager is not None:
            self._proposer.make_room(self.executor.kv_manager)
        for seq_id in self.own_seq_ids:
            self.executor.release_cache(seq_id)
        self.own_seq_ids.clear()

    def step(self) -> list[RequestOutput]:
        """Run one forward over everything that can run; return the requests that gained tokens or ended.

        The list is empty if there are no requests. An error of one completion ends only that one, with finish_reason
        "error". A tokenizer or an executor that the step calls may add, abort and discard requests; aborted ones end
        after the step. Under `EngineConfig.overlap` the next forward is under way when this returns.

        Raises:
            ExecutorShutDownError, RankFailedError: nothing can run any more. Every request has ended, so it is raised
                once.
            UnsupportedError: called within a step.
        """
        return self._run_step(self._step)

    def drain(self) -> list[RequestOutput]:
        """Read the tokens of a forward that is under way, and launch none; return and raise as `step`."""
        return self._run_step(self._take_launched)

    def _run_step(self, run: Callable[[], object]) -> list[RequestOutput]:
        if self._is_stepping:
            raise UnsupportedError("step: called within a step")
        self._changed, self._unreported = self._unreported, {}
        try:
            self._is_stepping = True
            run()
            self._is_stepping = False  # here, too: an interrupt may come before the last line below
        except BaseException as error:  # not of one request: those of its own end it
            self._launched = None
            for request in list(self._requests.values()):
                self._end(request, "error", describe(error))
            raise
        finally:
            self._is_stepping = False
            self._end_aborted()
        return list(self._changed)

    def run_now(self, batch: UnifiedBatch) -> Answers:
        """Run a batch of no request between two steps; if blocks run out, preempt requests, all but one."""
        while True:
            try:
                return self.executor.unified_decode(batch)
            except OutOfBlocksError:
                self._unreported = dict.fromkeys(self.drain())  # tokens must be known before a preemption
                if not self._make_room(()):
                    raise

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
        """Launch the next forward, then read the tokens of the one before; the first forward is launched before."""
        self._expire(perf_counter())
        if self._generation != self.generation:
            self._generation = self.generation
            for request in self._requests.values():
                request.begin_prompt_again()
        if self._launched is None:
            self._launched = self._launch()
        ahead = self._launch() if self._overlaps and self._launched is not None else None
        self._take_launched()
        if ahead is not None:
            self._launched = ahead
            self._note_known(ahead)

    def _launch(self) -> LaunchedStep | None:
        """Launch what can run, and what samples from it; None if nothing does.

        Behind a step whose tokens are not known yet, nothing is preempted and no error ends a completion: what cannot
        run then runs once they are.
        """
        started, plan, before = perf_counter(), self._scheduler.plan(), self._launched
        while before is None and self._scheduler.prefilling and not (plan.decodes or plan.chunks):
            if not self._make_room(()):
                break
            plan = self._scheduler.plan()
        if not (plan.decodes or plan.chunks):
            is_idle = before is None and not self._scheduler.awaits_masks
            if is_idle and self._scheduler.waiting and self._scheduler.preempt() is None:
                first = self._scheduler.waiting[0]
                self._fail(first, "the cache has no room for it, and no request here holds any")
            return None
        self._begin(plan.chunks)
        is_new = before is None or plan.chunks or self._runner.num_capturing
        batch = None if is_new or before is None else before.following(plan.decodes)
        drafts = None if batch is not None else draft(self._proposer, plan.decodes, self._vocab_size)
        self.metrics.draft_tokens += 0 if drafts is None else sum(map(len, drafts.token_ids))
        completions = [*plan.decodes, *plan.chunks]
        if self._prefers_tokens and drafts is None:
            self._ask_for_tokens(completions)
        if before is None:
            calls = self._runner.run(completions)
        else:
            if batch is None:
                completions, batch = before.next_batch(completions, self._device)
            calls = self._runner.run_ahead(completions, batch)
            self.metrics.overlapped_steps += bool(calls)
        if not calls:
            return None
        if drafts is not None:  # without blocks for them, completions ran without drafts
            ran = [len(one.item.q_tokens) > 1 for one in plan.decodes]
            kept = [ids if has_run else [] for ids, has_run in zip(drafts.token_ids, ran, strict=True)]
            drafts = drafts._replace(token_ids=kept)
        prefill_tokens, is_drafted = _num_rows(plan.chunks), drafts is not None
        launched = LaunchedStep(started, bool(plan.decodes), prefill_tokens, is_drafted, batch)
        self._count(calls, launched)
        completions, rows = self._final_rows(calls, launched, has_chunks=bool(plan.chunks))
        self._step_sampler.sample(completions, rows, launched, drafts and (drafts, plan.decodes))
        return launched

    def _count(self, calls: Sequence[CallResults], launched: LaunchedStep) -> None:
        num_rows, prefill_tokens = sum(len(call.completions) for call in calls), 0
        if launched.num_prefill_tokens or launched.is_drafted:
            ran = [one for call in calls for one in call.completions]
            num_rows = _num_rows(ran)
            prefill_tokens = _num_rows(one for one in ran if one.state is State.PREFILL)
        self.metrics.steps += num_rows > 0
        self.metrics.mixed_steps += 0 < prefill_tokens < num_rows
        self.metrics.prefill_tokens += prefill_tokens
        self.metrics.decode_tokens += num_rows - prefill_tokens

    def _ask_for_tokens(self, completions: Sequence[Completion]) -> None:
        """Let the executor choose the tokens of a step if no completion asks for more than it can do."""
        final = [one for one in completions if one.item.is_final_chunk]
        # Others of a request begin with the logits of the first one's prompt.
        is_single = all(one.request.params.n == 1 and not one.wants_prompt_rows for one in final)
        draws = self._sampler.draws(final) if is_single else None
        policies: Sequence[LogitsPolicy] = draws or [FullLogits()] * len(final)
        for one, policy in zip(final, policies, strict=True):
            if not one.wants_prompt_rows:
                one.item.ask(policy)

    def _final_rows(
        self, calls: Sequence[CallResults], launched: LaunchedStep, *, has_chunks: bool
    ) -> tuple[list[Completion], Answers]:
        """Count the prompt tokens that ran; return the completions to sample for, forks too, and their answers."""
        completions: list[Completion] = []
        parts: list[Answers] = []
        for group, answers in calls:
            if not has_chunks:
                completions += group
                parts.append(answers)
                continue
            rows: list[int] = []  # of `answers`, for the completions
            entries: list[torch.Tensor | None] = []
            end = 0
            for index, completion in enumerate(group):
                is_prompt, size = completion.state is State.PREFILL, answer_rows(completion.item)
                begin, end = end, end + size
                if is_prompt:
                    completion.prefilled = completion.item.pos_offset + len(completion.item.q_tokens)
                    if completion.num_ran > completion.item.pos_offset:
                        quietly(_note_recomputed, completion)
                if not size:
                    continue
                entry = None if isinstance(answers, torch.Tensor) else answers[index]
                if is_prompt and isinstance(completion.item.logits_policy, VerifyLogits):
                    logits = answers[begin:end] if isinstance(answers, torch.Tensor) else entry
                    assert logits is not None
                    attempt(partial(self._fail, completion), self._score_prompt, completion, logits, launched)
                    if completion.num_to_prefill or completion.state is State.FINISHED:
                        continue
                    begin, entry = end - 1, logits[-1]
                elif is_prompt and completion.num_to_prefill:
                    continue
                started = self._end_prefill(completion) if is_prompt else [completion]
                completions += started
                rows += [*range(begin, end)] * len(started)
                entries += [entry] * len(started)
            if isinstance(answers, torch.Tensor):
                is_whole = rows == [*range(len(answers))]
                parts.append(answers if is_whole else answers[index_tensor(rows, answers.device)])
            else:
                parts.append(entries)
        if len(parts) == 1:
            return completions, parts[0]
        return completions, [row for part in parts for row in part]

    def _score_prompt(self, completion: Completion, logits: torch.Tensor, launched: LaunchedStep) -> None:
        """Begin to copy the log probabilities of the prompt tokens that follow a chunk's, each of them once."""
        request, item = completion.request, completion.item
        if logits.shape != (shape := (len(item.q_tokens), self._vocab_size)):
            raise WrongResultsError(f"logits {tuple(logits.shape)}, expected {shape}")
        item.ask(FullLogits())
        start, begin = completion.cached - len(logits), request.num_prompt_rows
        end = min(completion.cached, len(request.prompt) - 1)
        if end > begin:  # else it runs again after a preemption
            count, rows = request.params.prompt_logprobs, logits[begin - start : end - start].float()
            assert count is not None
            request.num_prompt_rows = end
            launched.prompts.append((request, prompt_logprobs(rows, request.prompt[begin + 1 : end + 1], count)))

    def _take_launched(self) -> None:
        """Read the tokens of the launched step, and give them to completions that have not ended meanwhile."""
        step, self._launched = self._launched, None
        if step is None:
            return
        for request, read in step.prompts:
            table = attempt(partial(self._end, request, "error"), read)
            if table is not None and not request.output.finished:
                assert request.output.prompt_table is not None
                request.output.prompt_table += table
        for rows, on_device in step.parts:
            sampled = attempt(partial(self._fail_all, rows.completions), on_device.read)
            if sampled is not None:
                self._advance(rows, sampled, step)
        now = perf_counter()
        seconds = now - max(step.started, self._last_taken)
        self._last_taken = now
        self.metrics.step_time.observe(seconds)
        if self._scheduler.pacer is not None and step.has_decodes:
            self._scheduler.pacer.observe(seconds, step.num_prefill_tokens)

    def _note_known(self, ahead: LaunchedStep) -> None:
        """Tell the cache the tokens of the blocks that a step has filled; leave a step without requests.

        An error leaves blocks unpublished.
        """
        manager = self.executor.kv_manager
        assert manager is not None
        size = manager.config.block_size
        known = [
            (one.handle, one.tokens_from(one.handle.num_known_tokens))
            for rows, _ in ahead.parts
            for one in rows.completions
            if (one.last_of_prompt + one.num_sampled) % size == 0  # `cached`, in an eighth of its time
            and one.state is State.DECODE
            and one.handle is not None
        ]
        if known:
            attempt(partial(_LOG.warning, "blocks were not published: %s"), manager.append_tokens, known)
        if not self._requests:
            self._take_launched()

    def _make_room(self, spared: Collection[Completion], num_needed: int = 1) -> bool:
        """Free blocks: first those of drafts, then those of the completion that ranks last."""
        proposer, manager = self._proposer, self.executor.kv_manager
        if proposer is not None and manager is not None:
            warn = partial(_LOG.warning, "drafts gave no room: %s")
            if attempt(warn, proposer.make_room, manager):
                return True
        stats = None if manager is None else manager.stats()
        victim = self._scheduler.preempt(spared)
        if victim is None:
            return False
        kind = "swap" if victim.is_swapped else "recompute"
        if (
            stats is not None and not self.metrics.preempted.total()
        ):  # once: a cache that is too small preempts at every step
            text = "%r was preempted (%s): needs %d block%s, %d of %d free; see admission_tokens"
            plural = "" if num_needed == 1 else "s"
            _LOG.warning(text, victim, kind, num_needed, plural, stats.free_blocks, stats.num_blocks)
        self.metrics.preempted[kind] += 1
        victim.request.num_preemptions += 1
        quietly(_measure, victim.request, preemptions=victim.request.num_preemptions)
        if proposer is not None:
            quietly(proposer.forget, victim)
        return True

    def _add(self, request: Request) -> None:
        """Queue a request's completions; if the cache can fork, only the first one, whose prompt serves them all."""
        self.metrics.requests += 1
        self._requests[request.request_id] = request
        self._runner.num_capturing += request.params.returns_states
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
            if completion.states is not None and fork.states is not None:
                fork.states.begin_as(completion.states)
        return [completion, *(fork for fork in forks if fork.state is State.DECODE)]

    def _advance(self, rows: Rows, sampled: Sampled, step: LaunchedStep) -> None:
        """Give completions the tokens that were sampled for them, and end those that are done."""
        self._sampled = perf_counter()
        token_ids, logprobs = sampled
        if State.FINISHED in [one.state for one in rows.completions]:  # while the step was under way
            left = [row for row, one in enumerate(rows.completions) if one.state is not State.FINISHED]
            self.metrics.dropped_tokens += len(token_ids) - len(left)
            rows, token_ids = Rows([rows.completions[row] for row in left]), [token_ids[row] for row in left]
            logprobs = logprobs and [logprobs[row] for row in left]
        completions = rows.completions
        if step.num_prefill_tokens:
            for request in {completion.request for completion in completions}:
                if request.first_token is None:
                    request.first_token = self._sampled
                    quietly(self._measure_first_token, request)
        self._changed.update(rows.outputs)
        if step.is_drafted:
            tables = logprobs or [[]] * len(completions)
            for completion, ids, table in zip(completions, token_ids, tables, strict=True):
                self._advance_by_several(completion, ids, table)
            return
        if logprobs:
            for completion, table, (token,) in zip(completions, logprobs, token_ids, strict=True):
                if completion.output.growth.logprobs is not None and token != NO_TOKEN:
                    completion.output.growth.logprobs.extend(table)
        ending = rows.advance(token_ids)
        self.metrics.generated_tokens += len(completions) - sum(one.token_ids[-1] == NO_TOKEN for one in ending)
        for completion in ending:
            self._finish_if_done(completion)

    def _fail_all(self, completions: Iterable[Completion], reason: str) -> None:
        for completion in completions:
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
            self._runner.num_capturing -= request.params.returns_states
            del self._requests[request.request_id]

    def _advance_by_several(
        self, completion: Completion, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> None:
        """Give a completion its accepted drafts and one token more, until one ends it; roll back the others."""
        ran_to, before = completion.item.pos_offset + len(completion.item.q_tokens), len(completion.token_ids)
        for token in token_ids:
            completion.token_ids.append(token)
            if self._finish_if_done(completion):
                break
        # One that was no token is not there any more.
        count = len(completion.token_ids) - before
        if completion.output.growth.logprobs is not None:
            completion.output.growth.logprobs.extend(logprobs[:count])
        self.metrics.generated_tokens += count
        self.metrics.accepted_tokens += max(count - 1, 0)
        completion.num_sampled = len(completion.token_ids)
        if completion.state is not State.FINISHED and completion.cached < ran_to:
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
    manager = executor.kv_manager
    recurrent = None if manager is None else manager.config.recurrent
    if recurrent is not None and cost > recurrent.max_append:
        raise UnsupportedError(
            f"{info.model_id}: {proposer.num_tokens} drafts, expected at most {recurrent.max_append - 1} beside "
            f"recurrent layers; load the model with max_drafts={proposer.num_tokens}"
        )
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


def _note_recomputed(completion: Completion) -> None:
    """Count the tokens of its item that had run before a preemption."""
    request, item = completion.request, completion.item
    end = min(item.pos_offset + len(item.q_tokens), completion.num_ran)
    request.num_recomputed += end - item.pos_offset
    _measure(request, recomputed_tokens=request.num_recomputed)


def _measure(request: Request, **values: Any) -> None:
    request.output.metrics = replace(request.output.metrics, **values)
