"""Runs the forward of a step, and samples. After an error each sequence runs alone, once; those that fail end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from paged.batch import CapturedStates, UnifiedBatch
from paged.errors import OutOfBlocksError, RankFailedError
from paged.executors.engine.batch import StepBatch
from paged.executors.engine.cache_space import BlockSpace, TokenSpace
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.serial_calls import SerialCalls, WrongResultsError
from paged.executors.isolation import describe, quietly, raise_exit
from paged.executors.model_executor import ExecutorShutDownError, ModelExecutor
from paged.executors.requests.request import Completion
from paged.executors.row_batches import results_mismatch
from paged.executors.sampling.rows import row_matrix
from paged.executors.sampling.sampler import SampledOnDevice, Sampler
from paged.executors.speculation.drafting import aligned_drafts
from paged.executors.unified_executor import Answers

_LOG = logging.getLogger("paged")


# The completions of a call, and its answers: one for each item, or in one tensor those of the final ones.
CallResults = tuple[list[Completion], Answers]


class AnswerRows(NamedTuple):
    """Where the answers of one completion are. They are read where an error has a way back, as memory may be short.

    Attributes:
        answers: of a call.
        place: of the completion's item in the call.
        begin, end: rows of the completion, if `answers` is a tensor; `end - begin` are expected in any case.
        num_skipped: first rows that are left out.
    """

    answers: Answers
    place: int
    begin: int
    end: int
    num_skipped: int = 0

    @property
    def last(self) -> AnswerRows:
        """The last row alone."""
        return self._replace(num_skipped=self.end - self.begin - 1)

    def read(self, vocab_size: int) -> torch.Tensor:
        """Return logits [rows, V], or a token [1].

        Raises:
            WrongResultsError: logits have another number of rows or another vocabulary.
        """
        if isinstance(self.answers, torch.Tensor):
            rows = self.answers[self.begin : self.end]
        else:
            rows = as_rows(self.answers[self.place])
        expected = (self.end - self.begin, vocab_size)
        if rows.is_floating_point() and rows.shape != expected:
            raise WrongResultsError(f"logits {tuple(rows.shape)}, expected {expected}")
        return rows[self.num_skipped :] if self.num_skipped else rows


def answer_rows(completions: Sequence[Completion], answers: Answers, step: StepBatch) -> list[AnswerRows]:
    """Return where the answers of each completion of a call are."""
    rows = []
    end = 0
    for place, completion in enumerate(completions):
        begin = end
        # What runs next is not noted in completions that decode in rows.
        end += completion.num_answer_rows if step.rows is None else 1
        rows.append(AnswerRows(answers, place, begin, end))
    return rows


class StepRunner:
    """Runs steps on any executor.

    If results do not fit the items, the state of the caches is unknown, so all completions of that call fail.

    Attributes:
        failed: completions that cannot run, with the reason; the caller ends them and empties the list.
    """

    def __init__(
        self, executor: ModelExecutor, space: BlockSpace | TokenSpace, sampler: Sampler, metrics: EngineMetrics
    ) -> None:
        self._executor = executor
        self._space = space
        self._sampler = sampler
        self._vocab_size = executor.info().vocab_size
        self._metrics = metrics
        self._serial = None if executor.supports_native_unified_decode() else SerialCalls(executor)
        self.failed: list[tuple[Completion, str]] = []

    def run(self, step: StepBatch) -> list[CallResults]:
        """Run the completions that can; if a step that is ahead raises, none of them runs.

        Raises:
            ExecutorShutDownError, RankFailedError: nothing can run any more.
        """
        groups = [step.completions]
        if step.batch is None:  # each is a forward of its own
            groups = [[completion] for completion in step.completions]
        results: list[CallResults] = []
        again: list[Completion] = []
        for completions in groups:
            try:
                batch = step.batch or self._reserve(completions)
                if batch is None:
                    continue
                answers = self._forward(completions, batch)
            except (ExecutorShutDownError, RankFailedError):
                raise
            except WrongResultsError as error:
                self._metrics.failed_forwards += 1
                self._fail_all(completions, error)
            except BaseException as error:
                raise_exit(error)
                self._metrics.failed_forwards += 1
                if step.batch is not None and step.batch.prepared is not None:  # it may have come before the forward
                    step.batch.prepared.rollback()
                if step.is_ahead:
                    _LOG.warning("the next step was not launched ahead: %s", describe(error))
                    return []
                again += completions
            else:
                results.append((completions, answers))
        for completion in again:
            if step.rows is not None:
                completion.follow()
            self._start_over(completion)
        return results + self._run_apart(again)

    def _run_apart(self, completions: Sequence[Completion]) -> list[CallResults]:
        """Run each completion in a call of its own, after a call has raised; those that raise fail."""
        results: list[CallResults] = []
        for completion in completions:
            try:
                batch = self._reserve([completion])
                if batch is None:
                    continue
                answers = self._forward([completion], batch)
            except (ExecutorShutDownError, RankFailedError):
                raise
            except BaseException as error:
                raise_exit(error)
                self._metrics.failed_forwards += 1
                self._fail_all([completion], error)
            else:
                results.append(([completion], answers))
        return results

    def _reserve(self, completions: list[Completion]) -> UnifiedBatch | None:
        """Return the batch of what completions run next; None without blocks for it, which the next step may free."""
        try:
            return self._space.reserve(completions)
        except OutOfBlocksError:
            return None

    def _forward(self, completions: list[Completion], batch: UnifiedBatch) -> Answers:
        """Make one call; return per item None if it is not final, else logits [V], or [rows, V] for VerifyLogits."""
        if self._serial is not None:
            answers: Answers = self._serial.run(completions)
        else:
            answers = self._executor.unified_decode(batch)
        if isinstance(answers, torch.Tensor):
            num_rows = answers.shape[0]  # six times as fast as `len`
            columns = batch.columns
            expected = len(columns.counts)
            if not columns.is_decode:
                expected = sum(completion.num_answer_rows for completion in completions)
            mismatch = None
            if num_rows != expected:
                mismatch = f"{num_rows} results for {len(columns.counts)} items, expected {expected}"
        else:
            mismatch = results_mismatch(batch.items, answers)
        if mismatch is not None:
            raise WrongResultsError(mismatch)
        if batch.captured is not None:
            _keep_states(completions, batch.captured, self._executor.weights_generation)
        return answers

    def sample(
        self, completions: list[Completion], answers: torch.Tensor | Sequence[AnswerRows], step: StepBatch
    ) -> SampledOnDevice:
        """Sample from logits [num_rows, V], or take the tokens [n] that the executor has chosen.

        answers: a row for each completion, and one more for each draft of `step`.
        """
        drafts = None
        if step.drafts is not None:
            drafts = aligned_drafts(step.drafts, step.decodes, completions)
        if not isinstance(answers, torch.Tensor):
            answers = _joined([rows.read(self._vocab_size) for rows in answers])
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

    def sample_apart(
        self, completions: Sequence[Completion], answers: Sequence[AnswerRows], step: StepBatch
    ) -> Iterator[tuple[Completion, SampledOnDevice]]:
        """Sample for each completion alone, after sampling them together has raised; those that raise fail."""
        self._sampler.reset()
        for completion, rows in zip(completions, answers, strict=True):
            try:
                sampled = self.sample([completion], [rows], step)
            except BaseException as error:
                raise_exit(error)
                self._sampler.reset()
                self._fail_all([completion], error)
            else:
                yield completion, sampled

    def _start_over(self, completion: Completion) -> None:
        """Drop the K/V of a completion if the executor may have run a part of a call that raised."""
        if self._executor.kv_manager is None and (completion.prefilled or completion.handle is not None):
            quietly(self._space.release, completion)
            completion.start_over()

    def _fail_all(self, completions: Sequence[Completion], error: BaseException) -> None:
        reason = describe(error)
        for completion in completions:
            self.failed.append((completion, reason))


def _keep_states(completions: Sequence[Completion], captured: CapturedStates, generation: int) -> None:
    """Give each completion that asks for states those of its item's tokens; `generation` is that of the weights."""
    end = 0
    for completion in completions:
        begin = end
        end += len(completion.chunk)
        if completion.states is None:
            continue
        assert captured.hidden_states is not None
        rows = {"hidden_states": captured.hidden_states[begin:end].to(torch.float32, copy=True)}
        if captured.routed_experts is not None:
            rows["routed_experts"] = captured.routed_experts[begin:end].clone()
        completion.states.add(completion.chunk_start, rows, generation)


def as_rows(answer: torch.Tensor | None) -> torch.Tensor:
    """Return the logits of an item, [V] or [n, V], or its token, as rows."""
    assert answer is not None
    return answer if answer.dim() == 2 else answer[None]


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tokens as int64 [n], or logits as one matrix."""
    if rows[0].is_floating_point():
        return row_matrix(rows)
    return torch.cat([row.reshape(-1) for row in rows])
