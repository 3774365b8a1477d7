"""The engine's step: schedule, run, sample, and give completions their tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
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
from paged.executors.engine.runner import AnswerRows, CallResults, StepRunner, answer_rows
from paged.executors.engine.scheduler import Scheduler
from paged.executors.engine.unfinished_requests import UnfinishedRequests, measure
from paged.executors.isolation import attempt, describe, once_more, quietly, raise_exit
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import NO_TOKEN, Completion, State
from paged.executors.sampling.logprobs import prompt_logprobs
from paged.executors.sampling.sampler import Sampled, SampledOnDevice, Sampler
from paged.executors.speculation.drafting import Drafter, Proposer
from paged.executors.unified_executor import Answers
from paged.seq_id import SeqId

_LOG = logging.getLogger("paged")
# Most logits of prompt tokens in a step, for prompt_logprobs. Each takes 12 bytes: in the weights' dtype, in float32
# and normalised. That is 147 rows of a vocabulary of 152,000.
_PROMPT_LOGITS = (256 << 20) // 12


class EngineCore:
    """The step that runs requests; `Engine` is its public face.

    _requests: those that are unfinished. _in_flight: the step whose tokens are not read yet. _unreported: outputs that
    changed between steps.
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
        self._vocab_size = info.vocab_size
        if manager is None:
            self._space: BlockSpace | TokenSpace = TokenSpace(executor)
        else:
            if config.preemption == "swap" and not manager.config.num_swap_blocks:
                raise InvalidInputError(
                    "preemption: 'swap', but the cache has no num_swap_blocks; expected 'recompute'"
                )
            self._space = BlockSpace(
                executor, manager, config.admission_tokens, runs_fixed_chunks=config.batch_invariant
            )
        self._sampler = Sampler(info.vocab_size, info.device, has_raw_logprobs=config.logprobs_mode == "raw")
        self._drafter = None if proposer is None else Drafter(proposer, info.vocab_size, manager)
        self._is_unified = is_unified = executor.supports_native_unified_decode()
        capabilities = executor.capabilities()
        ask_for_tokens = self._ask_for_tokens if is_unified and capabilities.prefers_tokens else None
        self._scheduler = Scheduler(
            config,
            self._space,
            self.metrics,
            self._drafter,
            ask_for_tokens,
            decode_cost=decode_cost,
            prompt_rows=max(_PROMPT_LOGITS // info.vocab_size, 1),
        )
        self._runner = StepRunner(executor, self._space, self._sampler, self.metrics)
        overlaps = config.overlap
        if overlaps is None:
            overlaps = info.device.type == "cuda"
        can_overlap = is_unified and capabilities.supports_device_ids and manager is not None
        self._overlaps = overlaps and can_overlap and proposer is None and not config.batch_invariant
        self._in_flight: StepOutput | None = None
        self._unreported: dict[RequestOutput, None] = {}
        self._last_taken = 0.0
        forgetting: list[Callable[[Completion], object]] = [self._sampler.forget]
        if self._drafter is not None:
            forgetting.append(self._drafter.forget)
        self._requests = UnfinishedRequests(
            self._scheduler, self.metrics, can_fork=self._space.can_fork, on_finish=forgetting
        )
        if config.profiler_ranges:
            _mark_range(self._scheduler, "schedule", "paged.schedule")
            _mark_range(self._runner, "run", "paged.forward")
            _mark_range(self, "_sample_step", "paged.sample")
            _mark_range(self, "_update", "paged.update")
        self._num_updates = 0
        self._generation = self.generation
        # Sequences of embedding forwards, which belong to no request; an update of the weights frees them.
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
        requests = self._requests
        if requests.is_stepping:
            raise UnsupportedError("step: called within a step")
        requests.changed, self._unreported = self._unreported, {}
        try:
            requests.is_stepping = True
            run()
            requests.is_stepping = False  # here, too: an interrupt may come before the `finally` block
        except BaseException as error:  # not an error of one request, which would end that request alone
            self._in_flight = None
            for request in list(requests.by_id.values()):
                requests.end(request, "error", describe(error))
            raise
        finally:
            requests.is_stepping = False
            requests.end_aborted()
        return list(requests.changed)

    def run_now(self, batch: UnifiedBatch) -> Answers:
        """Run a batch that belongs to no request between two steps; if blocks run out, preempt all requests but one."""
        while True:
            try:
                return self.executor.unified_decode(batch)
            except OutOfBlocksError:
                self._unreported = dict.fromkeys(self.drain())  # tokens must be known before a preemption
                if not self._scheduler.make_room():
                    raise

    def _step(self) -> None:
        """Launch the next forward, then read the tokens of the one before; the first forward is launched before."""
        self._requests.expire()
        if self._scheduler.waiting:  # as all do whose prompts have begun before the weights were replaced
            self._begin_prompts_again()
        if self._in_flight is None:
            self._in_flight = self._launch()
        following = None
        if self._in_flight is not None:
            if self._overlaps:
                following = self._launch()
            else:
                self._scheduler.publish()
        self._update()
        if following is not None:
            self._in_flight = following
            self._scheduler.publish()
            if not self._requests:
                self._update()  # nobody waits for it

    def _begin_prompts_again(self) -> None:
        """Drop the prompts' log probabilities if the weights have been replaced since the last call."""
        generation = self.generation
        if self._generation != generation:
            self._generation = generation
            for request in self._requests.by_id.values():
                request.begin_prompt_again()

    def _launch(self) -> StepOutput | None:
        """Launch the next step's forward and its sampling; return None if nothing can run."""
        started = perf_counter()
        step = self._scheduler.schedule(self._in_flight)
        if self._scheduler.refused:
            self._requests.fail_all(self._scheduler.refused)
        if step is None:
            return None
        if step.chunks:
            self._requests.begin(step.chunks, perf_counter())
        calls = self._runner.run(step)
        if self._runner.failed:
            self._requests.fail_all(self._runner.failed)
        if not calls:
            return None
        self.metrics.overlapped_steps += step.is_ahead
        output = StepOutput(step, started)
        self._count(step, calls)
        self._sample_step(calls, output)
        return output

    def _count(self, step: StepBatch, calls: Sequence[CallResults]) -> None:
        num_rows = sum(len(completions) for completions, _ in calls)
        prefill_tokens = 0
        if step.num_prefill_tokens or step.drafts is not None:
            num_rows = 0
            for completions, _ in calls:
                for completion in completions:
                    num_rows += len(completion.chunk)
                    if completion.state is State.PREFILL:
                        prefill_tokens += len(completion.chunk)
        if num_rows:
            self.metrics.steps += 1
            self.metrics.step_tokens.observe(num_rows)
        self.metrics.mixed_steps += 0 < prefill_tokens < num_rows
        self.metrics.prefill_tokens += prefill_tokens
        self.metrics.decode_tokens += num_rows - prefill_tokens

    def _ask_for_tokens(self, completions: Sequence[Completion]) -> None:
        """Let the executor choose the tokens of a step if it supports the sampling parameters of all completions."""
        final = [completion for completion in completions if completion.is_final]
        for completion in final:
            # The other completions of a request start from the prompt's logits.
            if completion.request.params.n > 1 or completion.wants_prompt_rows:
                return
        draws = self._sampler.draws(final)
        policies: Sequence[LogitsPolicy] = draws or [FullLogits()] * len(final)
        for completion, policy in zip(final, policies, strict=True):
            completion.policy = policy

    def _sample_step(self, calls: Sequence[CallResults], output: StepOutput) -> None:
        """Sample for all completions whose answers have come."""
        completions, answers = calls[0]
        if len(calls) == 1 and not output.step.chunks and isinstance(answers, torch.Tensor):
            self._sample(completions, answers, output)
            return
        completions, parts = self._final_rows(calls, output)
        if completions:
            self._sample(completions, parts, output)

    def _final_rows(
        self, calls: Sequence[CallResults], output: StepOutput
    ) -> tuple[list[Completion], list[AnswerRows]]:
        """Count the prompt tokens that ran; return the completions to sample for, forks too, and their answers."""
        completions: list[Completion] = []
        parts: list[AnswerRows] = []
        for group, answers in calls:
            for completion, rows in zip(group, answer_rows(group, answers, output.step), strict=True):
                is_prompt = completion.state is State.PREFILL
                if is_prompt:
                    completion.prefilled = completion.chunk_start + len(completion.chunk)
                    if completion.num_ran > completion.chunk_start:
                        quietly(_note_recomputed, completion)
                if rows.begin == rows.end:
                    continue
                if is_prompt and isinstance(completion.policy, VerifyLogits):
                    fail = partial(self._requests.fail, completion)
                    attempt(fail, once_more, self._score_prompt, completion, rows, output)
                    rows = rows.last
                if is_prompt and (completion.num_to_prefill or completion.state is State.FINISHED):
                    continue
                started = self._end_prefill(completion) if is_prompt else [completion]
                completions += started
                parts += [rows] * len(started)
        return completions, parts

    def _sample(
        self, completions: list[Completion], answers: torch.Tensor | list[AnswerRows], output: StepOutput
    ) -> None:
        """Sample and start the copy of the tokens. After an error, sample each completion alone."""
        rows = self._scheduler.rows_of(completions)
        if rows.reads_tokens:
            self._update()  # the last step's tokens, while the device runs this one
        try:
            sampled = self._runner.sample(completions, answers, output.step)
        except BaseException as error:
            raise_exit(error)
            self._update()  # the sampler's state is built again from tokens that only the device may know
            self._scheduler.drop_rows()
            if isinstance(answers, torch.Tensor):
                answers = answer_rows(completions, answers, output.step)
            for completion, sampled in self._runner.sample_apart(completions, answers, output.step):
                self._keep(Rows([completion]), sampled, output)
            self._requests.fail_all(self._runner.failed)
        else:
            self._keep(rows, sampled, output)

    def _keep(self, rows: Rows, sampled: SampledOnDevice, output: StepOutput) -> None:
        output.parts.append((rows, sampled))
        rows.steps_left -= 1
        for completion in rows.completions:
            completion.num_sampled += 1

    def _score_prompt(self, completion: Completion, rows: AnswerRows, output: StepOutput) -> None:
        """Start the copy of the log probabilities of the prompt tokens after a chunk's; each is computed once."""
        request, count = completion.request, completion.params.prompt_logprobs
        begin = request.num_prompt_rows
        end = min(completion.cached, len(request.prompt) - 1)
        if end > begin:  # else it runs again after a preemption
            assert count is not None
            logits = rows.read(self._vocab_size)[begin - completion.chunk_start : end - completion.chunk_start]
            read = prompt_logprobs(logits.float(), request.prompt[begin + 1 : end + 1], count)
            output.prompts.append((request, read))
            request.num_prompt_rows = end

    def _update(self) -> None:
        """Read the tokens of the step in flight, and give them to completions that have not ended meanwhile."""
        output, self._in_flight = self._in_flight, None
        if output is None:
            return
        for request, read in output.prompts:
            table = attempt(partial(self._requests.end, request, "error"), once_more, read)
            if table is not None and not request.output.finished:
                assert request.output.prompt_table is not None
                request.output.prompt_table += table
        for rows, on_device in output.parts:
            try:
                sampled = on_device.read()
            except BaseException as error:
                raise_exit(error)
                self._read_again(rows, on_device, output.step)
            else:
                self._advance(rows, sampled, output.step)
        now = perf_counter()
        seconds = now - max(output.started, self._last_taken)
        self._last_taken = now
        self.metrics.step_time.observe(seconds)
        if output.step.chunks:
            self._space.observe_prefill(output.step.num_prefill_tokens, seconds)
        if self._scheduler.pacer is not None and output.step.decodes:
            self._scheduler.pacer.observe(seconds, output.step.num_prefill_tokens)

    def _read_again(self, rows: Rows, on_device: SampledOnDevice, step: StepBatch) -> None:
        """Read the tokens again after that has raised; if it does once more, all fail: they come in one copy."""

        def fail(reason: str) -> None:
            self._requests.fail_all([(completion, reason) for completion in rows.completions])

        sampled = attempt(fail, on_device.read)
        if sampled is not None:
            self._advance(rows, sampled, step)

    def _end_prefill(self, completion: Completion) -> list[Completion]:
        """Start decoding a completion and those that fork from its prompt; return all that decode."""
        request = completion.request
        self._scheduler.to_decoding(completion)
        if request.first_token is None:
            self.metrics.cached_tokens += request.num_cached_tokens
        forks = request.completions[request.num_begun :]
        request.num_begun += len(forks)
        for fork in forks:
            self._scheduler.add_decoding(fork)
            attempt(partial(self._requests.fail, fork), once_more, self._space.fork, completion, fork)
            if completion.states is not None and fork.states is not None:
                fork.states.begin_as(completion.states)
        decoding = [fork for fork in forks if fork.state is State.DECODE]
        return [completion, *decoding]

    def _advance(self, rows: Rows, sampled: Sampled, step: StepBatch) -> None:
        """Give completions the tokens that were sampled for them, and end those that are done."""
        self._requests.sampled = perf_counter()
        token_ids, logprobs = sampled
        if not self._scheduler.are_current(rows):
            unfinished = []
            for row, completion in enumerate(rows.completions):
                if completion.state is not State.FINISHED:
                    unfinished.append(row)
            if len(unfinished) < len(token_ids):  # some ended while the step was under way
                self.metrics.dropped_tokens += len(token_ids) - len(unfinished)
                rows = Rows([rows.completions[row] for row in unfinished])
                token_ids = [token_ids[row] for row in unfinished]
                if logprobs is not None:
                    logprobs = [logprobs[row] for row in unfinished]
        completions = rows.completions
        if step.num_prefill_tokens:
            for request in {completion.request for completion in completions}:
                if request.first_token is None:
                    request.first_token = self._requests.sampled
                    quietly(self._requests.measure_first_token, request)
        self._requests.changed.update(rows.outputs)
        if step.drafts is not None:
            rows.steps_left = 0
            tables = logprobs or [[]] * len(completions)
            for completion, ids, table in zip(completions, token_ids, tables, strict=True):
                self._advance_by_several(completion, ids, table)
            return
        if logprobs:
            for completion, table, (token,) in zip(completions, logprobs, token_ids, strict=True):
                if completion.output.growth.logprobs is not None and token != NO_TOKEN:
                    completion.output.growth.logprobs.extend(table)
        ending = rows.advance(token_ids)
        num_no_tokens = sum(completion.token_ids[-1] == NO_TOKEN for completion in ending)
        self.metrics.generated_tokens += len(completions) - num_no_tokens
        for completion in ending:
            self._finish_if_done(completion)

    def _advance_by_several(
        self, completion: Completion, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> None:
        """Give a completion its accepted drafts and one token more, until one ends it; roll back the others."""
        ran_to, before = completion.chunk_start + len(completion.chunk), len(completion.token_ids)
        for token in token_ids:
            completion.token_ids.append(token)
            if self._finish_if_done(completion):
                break
        # NO_TOKEN does not count: `finish_reason` has removed it.
        count = len(completion.token_ids) - before
        if completion.output.growth.logprobs is not None:
            completion.output.growth.logprobs.extend(logprobs[:count])
        self.metrics.generated_tokens += count
        self.metrics.accepted_tokens += max(count - 1, 0)
        completion.num_sampled = len(completion.token_ids)
        if completion.state is not State.FINISHED and completion.cached < ran_to:
            fail = partial(self._requests.fail, completion)
            attempt(fail, once_more, self.executor.truncate_kv, completion.handle, completion.cached)

    def _finish_if_done(self, completion: Completion) -> bool:
        reason = attempt(partial(self._requests.fail, completion), completion.finish_reason)
        if reason == "error":
            self._requests.fail(completion, "the logits left no token to choose")
        elif reason is not None:
            self._space.publish([completion])
            self._requests.finish(completion, reason)
        return completion.state is State.FINISHED


def _decode_cost(executor: ModelExecutor, config: EngineConfig, proposer: Proposer | None) -> int:
    """Check that drafts can run; return the most tokens that a decoding sequence runs in a step, drafts included."""
    if proposer is None:
        return 1
    info, cost = executor.info(), 1 + proposer.num_tokens
    is_managed = executor.kv_manager is not None or not executor.supports_native_unified_decode()
    if not (is_managed and executor.capabilities().supports_truncate):
        raise UnsupportedError(f"{info.model_id}: speculation needs a cache that can be truncated")
    manager = executor.kv_manager
    if manager is not None and manager.config.recurrent is not None and cost > manager.config.recurrent.max_append:
        recurrent = manager.config.recurrent
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


def _note_recomputed(completion: Completion) -> None:
    """Count the tokens of this chunk that had run before a preemption."""
    request = completion.request
    end = min(completion.chunk_start + len(completion.chunk), completion.num_ran)
    request.num_recomputed += end - completion.chunk_start
    measure(request, recomputed_tokens=request.num_recomputed)
