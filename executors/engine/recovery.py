"""What follows an error of a step: each completion runs or is sampled alone, once, and who fails again ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from paged.errors import OutOfBlocksError
from paged.executors.engine.cache_space import BlockSpace
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.step import AnswerRows, EngineStep
from paged.executors.foreign import WrongResultsError
from paged.executors.isolation import describe, raise_exit, raise_fatal
from paged.executors.requests.request import Completion
from paged.executors.sampling.sampler import Sampled

_LOG = logging.getLogger("paged")
Run = Callable[[EngineStep], object]


class Recovery:
    """Runs and samples the completions of a step one by one.

    If results do not match the items, the state of the caches is unknown, so all completions of the call fail.

    It keeps no method of the engine that owns it: a dropped engine is freed at once.

    Args:
        refused: gets (completion, reason) of completions that failed, see `Scheduler.refused`.
    """

    def __init__(self, space: BlockSpace, metrics: EngineMetrics, refused: list[tuple[Completion, str]]) -> None:
        self._space = space
        self._metrics = metrics
        self._refused = refused

    def run_again(self, step: EngineStep, error: BaseException, run: Run, *, is_ahead: bool) -> list[EngineStep]:
        """Roll a step back after an error and run each completion alone; return the steps that ran.

        Args:
            run: runs a step with reserved capacity.
            is_ahead: whether the tokens of the step before are not known yet. Then none runs.
        """
        self._metrics.failed_forwards += 1
        if isinstance(error, WrongResultsError):
            self._fail(step.completions, error)
            return []
        step.rollback()
        if is_ahead:
            _LOG.warning("the next step was not launched ahead: %s", describe(error))
            return []
        has_chunks = bool(step.counts) and not step.only_decodes
        if step.drafts is None and not has_chunks:
            for completion in step.decodes:
                completion.follow()
        return self.run_each(step, step.completions, run, is_again=True)

    def run_each(
        self, step: EngineStep, completions: Sequence[Completion], run: Run, *, is_again: bool
    ) -> list[EngineStep]:
        """Run completions of a step alone; who fails runs once more, unless it `is_again`, then ends.

        run: as in `run_again`.
        """
        ran: list[EngineStep] = []
        again: list[Completion] = []
        for completion in completions:
            alone = step.alone(completion)
            try:
                self._space.recover(completion)
                alone.take_chunks([completion])
                if not self._reserve(alone):
                    continue
                run(alone)
            except BaseException as error:
                raise_fatal(error)
                alone.rollback()
                self._metrics.failed_forwards += 1
                if is_again or isinstance(error, WrongResultsError):
                    self._fail([completion], error)
                else:
                    again.append(completion)
            else:
                ran.append(alone)
        if again:
            ran += self.run_each(step, again, run, is_again=True)
        return ran

    def _reserve(self, step: EngineStep) -> bool:
        """Reserve the capacity of a step; return False if blocks are short, which a later step may free.

        If an executor of others runs out of blocks within a forward, no later step frees any.
        """
        try:
            self._space.reserve(step)
        except OutOfBlocksError:
            return False
        return True

    def sample_each(
        self,
        completions: Sequence[Completion],
        answers: Sequence[AnswerRows],
        sample: Callable[[list[Completion], list[AnswerRows]], Sampled],
    ) -> Iterator[Sampled]:
        """Sample for each completion alone after sampling together raised; completions that raise again fail."""
        for completion, rows in zip(completions, answers, strict=True):
            try:
                sampled = sample([completion], [rows])
            except BaseException as error:
                raise_exit(error)
                self._fail([completion], error)
            else:
                yield sampled

    def _fail(self, completions: Sequence[Completion], error: BaseException) -> None:
        reason = describe(error)
        for completion in completions:
            self._refused.append((completion, reason))
