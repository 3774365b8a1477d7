"""The engine's step: schedule, run, sample, and give completions their tokens."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from paged.batch import FullLogits, LogitsPolicy, UnifiedBatch, VerifyLogits
from paged.errors import InvalidInputError, OutOfBlocksError, UnsupportedError
from paged.executors.engine.batch import Rows, StepBatch, StepOutput
from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.runner import CallResults, StepRunner
from paged.executors.engine.scheduler import Scheduler
from paged.executors.engine.serial_calls import WrongResultsError
from paged.executors.isolation import attempt, describe, quietly, raise_exit
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import NO_TOKEN, Completion, Request, State
from paged.executors.sampling.logprobs import prompt_logprobs
from paged.executors.sampling.rows import row_matrix
from paged.executors.sampling.sampler import Drafts, Sampled, SampledOnDevice, Sampler
from paged.executors.speculation.drafting import Drafter, Proposer, aligned_drafts
from paged.executors.unified_executor import Answers
from paged.seq_id import SeqId

_LOG = logging.getLogger("paged")
# Logits of a step's prompt tokens whose log probabilities are wanted. At 12 bytes each, in the weights' dtype, in
# float32 and normalised, 147 rows of a vocabulary of 152,000.
_PROMPT_LOGITS = (256 << 20) // 12


class EngineCore:
    """Checked requests and the step that runs them; `Engine` is its public face.

    _requests: unfinished requests, by id. _changed: outputs that gained tokens or ended in this step. _unreported:
    those that did so between steps. _in_flight: the step whose tokens are not read yet. _on_finish: called with every
    completion that ends, while it still holds its cache; errors are logged.
    """

    def __init__(self, executor: ModelExecutor, config: EngineConfig, proposer: Proposer | None) -> None:
        decode_cost = _decode_cost(executor, config, proposer)
        info, manager = executor.info(), executor.kv_manager
        is_recurrent = manager is not None and manager.config.recurrent is not None
        if config.batch_invariant and (proposer is not None or is_recurrent):
            lacking = "recurrent layers" if is_recurrent else "a proposer"
            raise UnsupportedError(f"{info.model_id}: batch_invariant is not supported with {lacking}")
        self.executor = executor
        self.config = config
        self.metrics = EngineMetrics()
        self._vocab_size, self._device = info.vocab_size, info.device
        if manager is None:
            self._space: BlockSpace | TokenSpace = TokenSpace(executor)
        else:
            if config.preemption == "swap" and not manager.config.num_swap_blocks:
                raise InvalidInputError(
                    "preemption: 'swap', but the cache has no num_swap_blocks; expected 'recompute'"
                )
            runs_apart = config.batch_invariant
            self._space = BlockSpace(executor, manager, config.admission_tokens, runs_apart=runs_apart)
        self._sampler = Sampler(info.vocab_size, info.device, has_raw_logprobs=config.logprobs_mode == "raw")
        self._drafter = None if proposer is None else Drafter(proposer, info.vocab_size, manager)
        self._is_unified = is_unified = executor.supports_native_unified_decode()
        capabilities = executor.capabilities()
        self._scheduler = Scheduler(
            config,
            self._space,
            self.metrics,
            self._drafter,
            self._ask_for_tokens if is_unified and capabilities.prefers_tokens else None,
            decode_cost=decode_cost,
            prompt_rows=max(_PROMPT_LOGITS // info.vocab_size, 1),
        )
        self._runner = StepRunner(executor, self._space, self.metrics)
        overlaps = info.device.type == "cuda" if config.overlap is None else config.overlap
        can_overlap = is_unified and capabilities.supports_device_ids and manager is not None
        self._overlaps = overlaps and can_overlap and proposer is None and not config.batch_invariant
        self._in_flight: StepOutput | None = None
        self._requests: dict[SeqId, Request] = {}
        self._changed: dict[RequestOutput, None] = {}
        self._unreported: dict[RequestOutput, None] = {}
        self._timed: list[Request] = []  # those that have to end at some time, the earliest first
        self._sampled = self._last_taken = 0.0
        self._on_finish: list[Callable[[Completion], object]] = [self._sampler.forget, Completion.close_mask]
        if self._drafter is not None:
            self._on_finish.append(self._drafter.forget)
        if config.profiler_ranges:
            _mark_range(self._scheduler, "schedule", "paged.schedule")
            _mark_range(self._runner, "run", "paged.forward")
            _mark_range(self, "_sample_step", "paged.sample")
            _mark_range(self, "_update", "paged.update")
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
        if self._drafter is not None:
            self._drafter.make_room()
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
        return self._run_step(self._update)

    def _run_step(self, run: Callable[[], object]) -> list[RequestOutput]:
        if self._is_stepping:
            raise UnsupportedError("step: called within a step")
        self._changed, self._unreported = self._unreported, {}
        try:
            self._is_stepping = True
            run()
            self._is_stepping = False  # here, too: an interrupt may come before the last line below
        except BaseException as error:  # not of one request: those of its own end it
            self._in_flight = None
            for request in list(self._requests.values()):
                self._end(request, "error", describe(error))
            raise
        finally:
            self._is_stepping = False
            if self._aborted:
                self._end_aborted()
        return list(self._changed)

    def run_now(self, batch: UnifiedBatch) -> Answers:
        """Run a batch of no request between two steps; if blocks run out, preempt requests, all but one."""
        while True:
            try:
                return self.executor.unified_decode(batch)
            except OutOfBlocksError:
                self._unreported = dict.fromkeys(self.drain())  # tokens must be known before a preemption
                if not self._scheduler.make_room():
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
        if self._timed:
            self._expire(perf_counter())
        generation = self.generation
        if self._generation != generation:
            self._generation = generation
            for request in self._requests.values():
                request.begin_prompt_again()
        if self._in_flight is None:
            self._in_flight = self._launch()
        following = None
        if self._in_flight is not None:
            if self._overlaps:
                following = self._launch()
            else:
                self._publish(self._in_flight)
        self._update()
        if following is not None:
            self._in_flight = following
            self._publish(following)
            if not self._requests:
                self._update()  # nobody waits for it

    def _launch(self) -> StepOutput | None:
        """Launch what can run, and what samples from it; None if nothing does."""
        started = perf_counter()
        step = self._scheduler.schedule(self._in_flight)
        if self._scheduler.refused:
            self._fail_all(self._scheduler.refused)
        if step is None:
            return None
        if step.chunks:
            self._begin(step.chunks)
        if step.drafts is not None:
            self.metrics.draft_tokens += sum(map(len, step.drafts.token_ids))
        calls = self._runner.run(step)
        if self._runner.failed:
            self._fail_all(self._runner.failed)
        if not calls:
            return None
        self.metrics.overlapped_steps += step.is_ahead
        output = StepOutput(step, started)
        self._count(step, calls)
        self._sample_step(calls, output)
        return output

    def _count(self, step: StepBatch, calls: Sequence[CallResults]) -> None:
        num_rows = sum(len(call.completions) for call in calls)
        prefill_tokens = 0
        if step.num_prefill_tokens or step.drafts is not None:
            ran = [completion for call in calls for completion in call.completions]
            num_rows = sum(len(completion.chunk) for completion in ran)
            prefill_tokens = sum(len(completion.chunk) for completion in ran if completion.state is State.PREFILL)
        self.metrics.steps += num_rows > 0
        self.metrics.mixed_steps += 0 < prefill_tokens < num_rows
        self.metrics.prefill_tokens += prefill_tokens
        self.metrics.decode_tokens += num_rows - prefill_tokens

    def _ask_for_tokens(self, completions: Sequence[Completion]) -> None:
        """Let the executor choose the tokens of a step if no completion asks for more than it can do."""
        final = [completion for completion in completions if completion.is_final]
        for completion in final:
            # Others of a request begin with the logits of the first one's prompt.
            if completion.request.params.n > 1 or completion.wants_prompt_rows:
                return
        draws = self._sampler.draws(final)
        policies: Sequence[LogitsPolicy] = draws or [FullLogits()] * len(final)
        for completion, policy in zip(final, policies, strict=True):
            completion.policy = policy

    def _sample_step(self, calls: Sequence[CallResults], output: StepOutput) -> None:
        """Sample for all completions whose answers have come."""
        if output.step.chunks or len(calls) > 1:
            completions, answers = self._final_rows(calls, output)
        else:
            completions, answers = calls[0]
        if completions:
            self._sample(completions, answers, output)

    def _final_rows(self, calls: Sequence[CallResults], output: StepOutput) -> tuple[list[Completion], Answers]:
        """Count the prompt tokens that ran; return the completions to sample for, forks too, and their answers."""
        completions: list[Completion] = []
        parts: list[torch.Tensor] = []
        for group, answers in calls:
            end = 0
            for index, completion in enumerate(group):
                begin = end
                is_verified = isinstance(completion.policy, VerifyLogits)
                end += len(completion.chunk) if is_verified else completion.is_final
                is_prompt = completion.state is State.PREFILL
                if is_prompt:
                    completion.prefilled = completion.chunk_start + len(completion.chunk)
                    if completion.num_ran > completion.chunk_start:
                        quietly(_note_recomputed, completion)
                if begin == end:
                    continue
                rows = answers[begin:end] if isinstance(answers, torch.Tensor) else _as_rows(answers[index])
                if rows.is_floating_point() and rows.shape != (end - begin, self._vocab_size):
                    error = WrongResultsError(f"logits {tuple(rows.shape)}, expected {end - begin, self._vocab_size}")
                    self._fail(completion, describe(error))
                    continue
                if is_prompt and is_verified:
                    attempt(partial(self._fail, completion), self._score_prompt, completion, rows, output)
                    rows = rows[-1:]
                if is_prompt and (completion.num_to_prefill or completion.state is State.FINISHED):
                    continue
                started = self._end_prefill(completion) if is_prompt else [completion]
                completions += started
                parts += [rows] * len(started)
        return completions, _joined(parts) if parts else []

    def _sample(self, completions: list[Completion], answers: Answers, output: StepOutput) -> None:
        """Sample and begin to copy the tokens; after an error for each completion alone."""
        rows = self._scheduler.rows_of(completions)
        if rows.reads_tokens:
            self._update()  # while the device runs this one
        drafts = None
        if output.step.drafts is not None:
            drafts = aligned_drafts(output.step.drafts, output.step.decodes, completions)
        try:
            sampled = self._sampled_of(completions, answers, drafts)
        except BaseException as error:
            raise_exit(error)
            self._update()  # what is built anew depends on tokens that the device alone may know
            self._sampler.reset()
            if len(completions) == 1:
                self._fail(completions[0], describe(error))
                return
            self._sample_apart(completions, answers, drafts, output)
            return
        self._keep(rows, sampled, output)

    def _sample_apart(
        self, completions: list[Completion], answers: Answers, drafts: Drafts | None, output: StepOutput
    ) -> None:
        """Sample for each completion alone; those that raise fail."""
        begin = 0
        for index, completion in enumerate(completions):
            size = 1 if drafts is None else 1 + len(drafts.token_ids[index])
            own_drafts = None
            if drafts is not None:
                probs = None if drafts.probs is None else drafts.probs[index : index + 1]
                own_drafts = Drafts([drafts.token_ids[index]], probs)
            is_stacked = isinstance(answers, torch.Tensor)
            own = answers[begin : begin + size] if is_stacked else [answers[index]]
            begin += size
            fail = partial(self._fail, completion)
            sampled = attempt(fail, self._sampled_of, [completion], own, own_drafts)
            if sampled is None:
                self._sampler.reset()
            else:
                self._keep(Rows([completion]), sampled, output)

    def _sampled_of(self, completions: list[Completion], answers: Answers, drafts: Drafts | None) -> SampledOnDevice:
        """Sample from logits [num_rows, V], or take the tokens [n] that the executor has chosen."""
        if not isinstance(answers, torch.Tensor):
            answers = _joined([row for row in answers if row is not None])
        num_rows = len(completions)
        if drafts is not None:
            num_rows += sum(map(len, drafts.token_ids))
        if answers.shape == (num_rows,) and not answers.is_floating_point():
            return SampledOnDevice.of(answers)
        if answers.shape != (num_rows, self._vocab_size):
            raise WrongResultsError(f"logits {tuple(answers.shape)}, expected {(num_rows, self._vocab_size)}")
        logits = answers.float()
        if num_rows == len(completions):
            return self._sampler.sample(logits, completions)
        assert drafts is not None
        return self._sampler.verify(logits, completions, drafts)

    def _keep(self, rows: Rows, sampled: SampledOnDevice, output: StepOutput) -> None:
        output.parts.append((rows, sampled))
        for completion in rows.completions:
            completion.num_sampled += 1

    def _score_prompt(self, completion: Completion, logits: torch.Tensor, output: StepOutput) -> None:
        """Begin to copy the log probabilities of the prompt tokens that follow a chunk's, each of them once."""
        request, count = completion.request, completion.params.prompt_logprobs
        begin = request.num_prompt_rows
        end = min(completion.cached, len(request.prompt) - 1)
        if end > begin:  # else it runs again after a preemption
            assert count is not None
            rows = logits[begin - completion.chunk_start : end - completion.chunk_start].float()
            request.num_prompt_rows = end
            output.prompts.append((request, prompt_logprobs(rows, request.prompt[begin + 1 : end + 1], count)))

    def _update(self) -> None:
        """Read the tokens of the step in flight, and give them to completions that have not ended meanwhile."""
        output, self._in_flight = self._in_flight, None
        if output is None:
            return
        for request, read in output.prompts:
            table = attempt(partial(self._end, request, "error"), read)
            if table is not None and not request.output.finished:
                assert request.output.prompt_table is not None
                request.output.prompt_table += table
        for rows, on_device in output.parts:
            try:
                sampled = on_device.read()
            except BaseException as error:
                raise_exit(error)
                self._fail_rows(rows, describe(error))
            else:
                self._advance(rows, sampled, output.step)
        now = perf_counter()
        seconds = now - max(output.started, self._last_taken)
        self._last_taken = now
        self.metrics.step_time.observe(seconds)
        if self._scheduler.pacer is not None and output.step.decodes:
            self._scheduler.pacer.observe(seconds, output.step.num_prefill_tokens)

    def _publish(self, output: StepOutput) -> None:
        """Tell the cache the tokens of the blocks that a step has filled. An error leaves blocks unpublished."""
        manager = self.executor.kv_manager
        if manager is None:
            return
        size = manager.config.block_size
        known = []
        for rows, _ in output.parts:
            for completion in rows.completions:
                is_full = (completion.last_of_prompt + completion.num_sampled) % size == 0  # `cached`, in an eighth
                handle = completion.handle
                if is_full and handle is not None and completion.state is State.DECODE:
                    known.append((handle, completion.tokens_from(handle.num_known_tokens)))
        if known:
            attempt(partial(_LOG.warning, "blocks were not published: %s"), manager.append_tokens, known)

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
            if completion.states is not None and fork.states is not None:
                fork.states.begin_as(completion.states)
        return [completion, *(fork for fork in forks if fork.state is State.DECODE)]

    def _advance(self, rows: Rows, sampled: Sampled, step: StepBatch) -> None:
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
        if step.drafts is not None:
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

    def _fail_all(self, failed: list[tuple[Completion, str]]) -> None:
        """End completions that could not be run, and empty the list."""
        while failed:
            completion, reason = failed.pop(0)
            if completion.state is not State.FINISHED:
                self._fail(completion, reason)

    def _fail_rows(self, rows: Rows, reason: str) -> None:
        for completion in rows.completions:
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
            del self._requests[request.request_id]

    def _advance_by_several(
        self, completion: Completion, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> None:
        """Give a completion its accepted drafts and one token more, until one ends it; roll back the others."""
        ran_to, before = completion.chunk_start + len(completion.chunk), len(completion.token_ids)
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


def _mark_range(owner: object, name: str, label: str) -> None:
    """Let a method of `owner` mark its time for PyTorch's profiler."""
    method = getattr(owner, name)

    @wraps(method)
    def marked(*args: Any) -> Any:
        with record_function(label):
            return method(*args)

    setattr(owner, name, marked)


def _deadline(request: Request) -> tuple[float, tuple[int, int]]:
    """Return the sort key of a deadline; the rank makes it unique."""
    return request.deadline, request.rank


def _note_recomputed(completion: Completion) -> None:
    """Count the tokens that have run now and had run before a preemption."""
    request = completion.request
    end = min(completion.chunk_start + len(completion.chunk), completion.num_ran)
    request.num_recomputed += end - completion.chunk_start
    _measure(request, recomputed_tokens=request.num_recomputed)


def _measure(request: Request, **values: Any) -> None:
    request.output.metrics = replace(request.output.metrics, **values)


def _as_rows(answer: torch.Tensor | None) -> torch.Tensor:
    """Return the logits of an item, [V] or [n, V], or its token, as rows."""
    assert answer is not None
    return answer if answer.dim() == 2 else answer[None]


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tokens as int64 [n], or logits as one matrix."""
    if rows[0].is_floating_point():
        return row_matrix(rows)
    return torch.cat([row.reshape(-1) for row in rows])
