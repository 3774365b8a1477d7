"""The engine's step: plan, reserve, run, sample, publish, read, advance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from paged.errors import InvalidInputError, OutOfBlocksError, UnsupportedError
from paged.executors.engine.cache_space import BlockSpace
from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.recovery import Recovery
from paged.executors.engine.scheduler import Scheduler
from paged.executors.engine.step import AnswerRows, EngineStep, joined
from paged.executors.engine.unfinished_requests import UnfinishedRequests, measure
from paged.executors.foreign import ForeignExecutor, WrongResultsError
from paged.executors.isolation import attempt, describe, once_more, quietly, raise_exit, raise_fatal
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.request import Completion, State
from paged.executors.sampling.logprobs import prompt_logprobs
from paged.executors.sampling.sampler import Sampled, Sampler
from paged.executors.speculation.drafting import Drafter, Proposer, aligned_drafts
from paged.executors.unified_executor import Answers, UnifiedExecutor
from paged.seq_id import SeqId
from paged.step.batch import CapturedStates, FullLogits, LogitsPolicy, UnifiedBatch, VerifyLogits

_LOG = logging.getLogger("paged")
# Limit for the logits of prompt tokens in a step (prompt_logprobs). They take at most 256 MiB, see limits.md.
_PROMPT_LOGITS = (256 << 20) // 12


class EngineCore:
    """Runs the steps of requests; `Engine` is its public face.

    _requests: the unfinished requests. _in_flight: the step whose tokens are not read yet. _unreported: outputs that
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
        if manager is not None and config.preemption == "swap" and not manager.config.num_swap_blocks:
            raise InvalidInputError("preemption: 'swap', but the cache has no num_swap_blocks; expected 'recompute'")
        step_executor = executor if isinstance(executor, UnifiedExecutor) else ForeignExecutor(executor)
        self._step_executor = step_executor
        self._space = BlockSpace(step_executor, config.admission_tokens, runs_fixed_chunks=config.batch_invariant)
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
        overlaps = config.overlap
        if overlaps is None:
            overlaps = info.device.type == "cuda"
        can_overlap = is_unified and capabilities.supports_device_ids and manager is not None
        self._overlaps = overlaps and can_overlap and proposer is None and not config.batch_invariant
        self._in_flight: EngineStep | None = None
        self._unreported: dict[RequestOutput, None] = {}
        self._last_taken = 0.0
        forgetting: list[Callable[[Completion], object]] = [self._sampler.forget]
        if self._drafter is not None:
            forgetting.append(self._drafter.forget)
        self._requests = UnfinishedRequests(self._scheduler, self._space, self.metrics, on_finish=forgetting)
        if config.profiler_ranges:
            _mark_range(self._scheduler, "plan", "paged.schedule")
            _mark_range(self._scheduler, "reserve", "paged.schedule")
            _mark_range(self, "_run", "paged.forward")
            _mark_range(self, "_sample", "paged.sample")
            _mark_range(self, "_read", "paged.update")
        self._recovery = Recovery(self._space, self.metrics, self._scheduler.refused)
        self._num_updates = 0
        self._generation = self.generation
        # Sequences of embedding forwards, which belong to no request. An update of the weights frees them.
        self.own_seq_ids: set[SeqId] = set()

    @property
    def generation(self) -> tuple[int, int]:
        """Version of the weights; grows when this engine or another caller of the executor may have replaced them."""
        return self.executor.weights_generation, self._num_updates

    def _begin_update(self) -> None:
        """Free all K/V of the old weights; requests compute them again."""
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

        The list is empty if there are no requests. An error of one completion ends only this completion, with
        finish_reason "error". Tokenizers and executors called by the step may add, abort and discard requests; aborted
        requests end after the step. Under `EngineConfig.overlap`, the next forward is in progress when this returns.

        Raises:
            ExecutorShutDownError, RankFailedError: the executor cannot run any more. Every request has ended, so this
                is raised once.
            UnsupportedError: called within a step.
        """
        return self._run_step(self._step)

    def drain(self) -> list[RequestOutput]:
        """Read the tokens of the forward in progress without launching another; returns and raises like `step`."""
        return self._run_step(self._read)

    def _run_step(self, run: Callable[[], object]) -> list[RequestOutput]:
        requests = self._requests
        if requests.is_stepping:
            raise UnsupportedError("step: called within a step")
        requests.changed, self._unreported = self._unreported, {}
        try:
            requests.is_stepping = True
            run()
            requests.is_stepping = False  # also here, because an interrupt may come before the `finally` block
        except BaseException as error:  # not the error of a single request, which ends only that request
            self._in_flight = None
            self._scheduler.refused.clear()
            for request in list(requests.by_id.values()):
                requests.end(request, "error", describe(error))
            raise
        finally:
            requests.is_stepping = False
            requests.end_aborted()
        return list(requests.changed)

    def run_now(self, batch: UnifiedBatch) -> Answers:
        """Run a batch of no request between two steps; if blocks run out, preempt up to all requests but one."""
        while True:
            try:
                return self.executor.unified_decode(batch)
            except OutOfBlocksError:
                # Read the tokens on the device first, because a preempted request may run them again.
                self._unreported = dict.fromkeys(self.drain())
                if not self._scheduler.make_room():
                    raise

    def _step(self) -> None:
        """Run one step: plan, reserve, run, sample; then publish, read, advance."""
        self._requests.expire()
        if self._scheduler.waiting:  # an update of the weights has queued all requests again
            self._begin_prompts_again()
        if self._overlaps:
            self._overlap()
            return
        self._in_flight = self._launch()
        if self._in_flight is not None:
            self._scheduler.publish()  # blocks that decodes have filled, while the device runs
            self._read()  # tokens; every completion advances by them, or ends

    def _overlap(self) -> None:
        """Launch the next step, then read the tokens of the last one, which is launched first if there is none."""
        if self._in_flight is None:
            self._in_flight = self._launch()
        if self._in_flight is None:
            return
        following = self._launch(self._in_flight)
        self._read()
        if following is not None:
            self.metrics.overlapped_steps += 1
            self._in_flight = following
            self._scheduler.publish()
            if not self._requests:
                self._read()  # no request is left, so read the last forward now

    def _launch(self, last: EngineStep | None = None) -> EngineStep | None:
        """Plan a step, reserve its capacity, run it and sample; return None if nothing ran.

        last: the step before if its tokens are not read yet. Then nothing is preempted, refused or run again.
        """
        scheduler, started, is_ahead = self._scheduler, perf_counter(), last is not None
        step = scheduler.plan(is_ahead=is_ahead)  # which completions run, and how many tokens of each
        planned = perf_counter()
        forwards: list[EngineStep] = []
        while step is not None:
            try:
                if scheduler.reserve(step, last):  # capacity for all of its tokens or for none
                    forwards = self._run(step)
                    break
            except BaseException as error:
                raise_fatal(error)
                # Each completion runs alone, once.
                forwards = self._recovery.run_again(step, error, self._run, is_ahead=is_ahead)
                break
            step = None if is_ahead else scheduler.shrink(step)  # preempt a completion
        if step is not None and step.num_prefill_tokens:
            self._requests.begin(step.chunks, planned)
        self._requests.fail_all(scheduler.refused)
        if step is None or not forwards:
            return None
        step.started = started
        self._count(step, forwards)
        self._sample(step, forwards)  # the tokens stay on the device
        return step

    def _run(self, step: EngineStep) -> list[EngineStep]:
        """Run a step with reserved capacity in one forward, and set its answers; return the forwards.

        A step that `runs_apart` has a forward for each completion.
        """
        if step.runs_apart:
            return self._recovery.run_each(step, step.completions, self._run, is_again=False)
        rows = self._step_executor.run(step)
        assert isinstance(rows, torch.Tensor)
        step.answers = rows
        if step.captured is not None:
            self._keep_states(step, step.captured)
        return [step]

    def _keep_states(self, step: EngineStep, captured: CapturedStates) -> None:
        """Give completions that ask for states the states of their tokens; who gets none fails."""
        end = 0
        for completion in step.completions:
            begin = end
            end += len(completion.chunk)
            if completion.states is not None:
                fail = partial(self._requests.fail, completion)
                attempt(fail, once_more, self._keep_states_of, completion, captured, begin, end)

    def _keep_states_of(self, completion: Completion, captured: CapturedStates, begin: int, end: int) -> None:
        assert completion.states is not None
        assert captured.hidden_states is not None
        rows = {"hidden_states": captured.hidden_states[begin:end].to(torch.float32, copy=True)}
        if captured.routed_experts is not None:
            rows["routed_experts"] = captured.routed_experts[begin:end].clone()
        completion.states.add(completion.chunk_start, rows, self._step_executor.weights_generation)

    def _begin_prompts_again(self) -> None:
        """Drop the log probabilities of prompts if the weights have been replaced since the last call."""
        generation = self.generation
        if self._generation != generation:
            self._generation = generation
            for request in self._requests.by_id.values():
                request.begin_prompt_again()

    def _count(self, step: EngineStep, ran: Sequence[EngineStep]) -> None:
        num_rows = sum(len(forward.completions) for forward in ran)
        prefill_tokens = 0
        if step.num_prefill_tokens or step.drafts is not None:
            num_rows = 0
            for forward in ran:
                for completion in forward.completions:
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
            # All completions of a request sample from the prompt's logits.
            if completion.request.params.n > 1 or completion.wants_prompt_rows:
                return
        draws = self._sampler.draws(final)
        policies: Sequence[LogitsPolicy] = draws or [FullLogits()] * len(final)
        for completion, policy in zip(final, policies, strict=True):
            completion.policy = policy

    def _sample(self, step: EngineStep, forwards: Sequence[EngineStep]) -> None:
        """Sample for all completions with answers, and start the copy of the tokens.

        After an error, sample each completion alone. forwards: the forwards of the step that succeeded.
        """
        answers: torch.Tensor | list[AnswerRows]
        if forwards[0] is step and not step.num_prefill_tokens:
            assert step.answers is not None
            completions, answers = step.completions, step.answers
        else:
            completions, answers = self._final_rows(step, forwards)
        if not completions:
            return
        group = self._scheduler.group_of(completions)
        if group.reads_tokens:
            self._read()  # the last step's tokens, while the device runs this step
        try:
            sampled = self._sampled(completions, answers, step)
        except BaseException as error:
            raise_exit(error)
            self._read()  # the sampler rebuilds its state from tokens that may be only on the device
            self._scheduler.drop_group()
            if isinstance(answers, torch.Tensor):
                answers = step.answer_rows()
            for sampled in self._recovery.sample_each(completions, answers, partial(self._sampled, step=step)):
                _keep(sampled, step)
            self._requests.fail_all(self._scheduler.refused)
        else:
            group.steps_left -= 1
            _keep(sampled, step)

    def _sampled(
        self, completions: list[Completion], answers: torch.Tensor | Sequence[AnswerRows], step: EngineStep
    ) -> Sampled:
        """Sample from logits [num_rows, V], or take the tokens [n] that the executor has chosen.

        answers: one row for each completion, plus one for each draft of `step`.
        """
        num_rows = len(completions)
        try:
            if not isinstance(answers, torch.Tensor):
                answers = joined([rows.read(self._vocab_size) for rows in answers])
            drafts = None
            if step.drafts is not None:
                drafts = aligned_drafts(step.drafts, step.decodes, completions)
                num_rows += sum(map(len, drafts.token_ids))
            if answers.shape == (num_rows,) and not answers.is_floating_point():
                return Sampled.of(completions, answers)
            if answers.shape != (num_rows, self._vocab_size):
                raise WrongResultsError(f"logits {tuple(answers.shape)}, expected {(num_rows, self._vocab_size)}")
            if drafts is None or num_rows == len(completions):
                return self._sampler.sample(answers.float(), completions)
            return self._sampler.verify(answers.float(), completions, drafts)
        except BaseException:
            self._sampler.reset()  # its state may be inconsistent
            raise

    def _final_rows(self, step: EngineStep, ran: Sequence[EngineStep]) -> tuple[list[Completion], list[AnswerRows]]:
        """Count the prompt tokens that ran; return the completions to sample for (with forks) and their answers."""
        completions: list[Completion] = []
        parts: list[AnswerRows] = []
        for forward in ran:
            for completion, rows in zip(forward.completions, forward.answer_rows(), strict=True):
                is_prompt = completion.state is State.PREFILL
                if is_prompt:
                    completion.prefilled = completion.chunk_start + len(completion.chunk)
                    if completion.num_ran > completion.chunk_start:
                        quietly(_note_recomputed, completion)
                if rows.begin == rows.end:
                    continue
                if is_prompt and isinstance(completion.policy, VerifyLogits):
                    fail = partial(self._requests.fail, completion)
                    attempt(fail, once_more, self._score_prompt, completion, rows, step)
                    rows = rows.last
                if is_prompt and (completion.num_to_prefill or completion.state is State.FINISHED):
                    continue
                started = self._end_prefill(completion) if is_prompt else [completion]
                completions += started
                parts += [rows] * len(started)
        return completions, parts

    def _score_prompt(self, completion: Completion, rows: AnswerRows, step: EngineStep) -> None:
        """Start to copy the log probabilities of the prompt tokens that a chunk predicts; each is computed once."""
        request, count = completion.request, completion.params.prompt_logprobs
        begin = request.num_prompt_rows
        end = min(completion.cached, len(request.prompt) - 1)
        if end > begin:  # if not, the chunk runs again after a preemption, and its tokens have scores
            assert count is not None
            logits = rows.read(self._vocab_size)[begin - completion.chunk_start : end - completion.chunk_start]
            read = prompt_logprobs(logits.float(), request.prompt[begin + 1 : end + 1], count)
            step.scores.append((request, read))
            request.num_prompt_rows = end

    def _read(self) -> None:
        """Read the tokens of the step in flight and give them to the unfinished completions."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        for request, read in step.scores:
            table = attempt(partial(self._requests.end, request, "error"), once_more, read)
            if table is not None and not request.output.finished:
                assert request.output.prompt_table is not None
                request.output.prompt_table += table
        for sampled in step.sampled:
            try:
                sampled.read()
            except BaseException as error:
                raise_exit(error)
                # If it fails again, all completions fail, because their tokens are one copy.
                if attempt(partial(self._fail_all, sampled.completions), sampled.read) is None:
                    continue
            self._requests.advance(sampled, step)
        now = perf_counter()
        seconds = now - max(step.started, self._last_taken)
        self._last_taken = now
        self.metrics.step_time.observe(seconds)
        if step.num_prefill_tokens:
            self._space.observe_prefill(step.num_prefill_tokens, seconds)
        if self._scheduler.pacer is not None and step.num_decodes:
            self._scheduler.pacer.observe(seconds, step.num_prefill_tokens)

    def _fail_all(self, completions: Sequence[Completion], reason: str) -> None:
        self._requests.fail_all([(completion, reason) for completion in completions])

    def _end_prefill(self, completion: Completion) -> list[Completion]:
        """Start decoding a completion and the completions that fork from its prompt; return all that decode."""
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


def _keep(sampled: Sampled, step: EngineStep) -> None:
    """Keep the tokens of completions until they are read."""
    step.sampled.append(sampled)
    for completion in sampled.completions:
        completion.num_sampled += 1


def _decode_cost(executor: ModelExecutor, config: EngineConfig, proposer: Proposer | None) -> int:
    """Check that drafts can run; return the maximum tokens of a decoding sequence in a step, drafts included."""
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
    """Wrap a method of `owner` in a range for PyTorch's profiler."""
    method = getattr(owner, name)

    @wraps(method)
    def marked(*args: Any, **options: Any) -> Any:
        with record_function(label):
            return method(*args, **options)

    setattr(owner, name, marked)


def _note_recomputed(completion: Completion) -> None:
    """Count the tokens of this chunk that ran before a preemption as well."""
    request = completion.request
    end = min(completion.chunk_start + len(completion.chunk), completion.num_ran)
    request.num_recomputed += end - completion.chunk_start
    measure(request, recomputed_tokens=request.num_recomputed)
