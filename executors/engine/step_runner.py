"""Runs the forward of a step: preempts where blocks run out, and after an error finds the completions that fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from paged.errors import OutOfBlocksError, RankFailedError
from paged.executors.engine.batch_runner import BatchRunner, WrongResultsError
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.isolation import describe, quietly, raise_exit
from paged.executors.model_executor import ExecutorShutDownError
from paged.executors.requests.request import Completion, State

_RUNNING = (State.PREFILL, State.DECODE)


class StepResults(NamedTuple):
    """What ran: completions, and for each its logits, None where its chunk is not final."""

    completions: list[Completion]
    rows: list[torch.Tensor | None]


class StepRunner:
    """Runs completions so that one that fails takes no other with it.

    After a call that raised its items run again in halves, until the one that cannot run is alone and fails; an error
    that does not come again ends none. Results that do not fit the items say nothing about the caches: all of that
    call fail.

    make_room: free blocks by taking them from completions other than those given; False if there are none.
    fail: end a completion for a reason.
    give_up: release what a completion holds; None where a call that raised leaves every cache as it was. An executor
        without a cache manager may have run some of the items: they begin again with all of their tokens.
    """

    def __init__(
        self,
        runner: BatchRunner,
        make_room: Callable[[Collection[Completion]], bool],
        fail: Callable[[Completion, str], None],
        give_up: Callable[[Completion], None] | None,
        metrics: EngineMetrics,
    ) -> None:
        self._runner = runner
        self._make_room = make_room
        self._fail = fail
        self._give_up = give_up
        self._metrics = metrics

    def run(self, completions: Sequence[Completion]) -> StepResults:
        """Run all that can.

        Raises:
            ExecutorShutDownError, RankFailedError: nothing can run any more.
        """
        ran = StepResults([], [])
        for group in self._runner.groups(completions):
            self._run(group, ran)
        return ran

    def _run(self, group: list[Completion], ran: StepResults) -> None:
        while group := [completion for completion in group if completion.state in _RUNNING]:
            try:
                rows = self._runner.run(group)
            except OutOfBlocksError as error:
                self._start_over(group)
                if not self._make_room(ran.completions):
                    self._fail_all(group, error)
            except (ExecutorShutDownError, RankFailedError):
                raise
            except WrongResultsError as error:
                self._metrics.failed_forwards += 1
                self._fail_all(group, error)
            except BaseException as error:
                raise_exit(error)
                self._metrics.failed_forwards += 1
                self._start_over(group)
                if len(group) == 1:
                    self._fail_all(group, error)
                    return
                middle = len(group) // 2
                for half in (group[:middle], group[middle:]):
                    for part in self._runner.groups(half):
                        self._run(part, ran)
                return
            else:
                ran.completions.extend(group)
                ran.rows.extend(rows)
                return

    def _start_over(self, group: Sequence[Completion]) -> None:
        if self._give_up is None:
            return
        for completion in group:
            if completion.cached:
                quietly(self._give_up, completion)
                completion.start_over()

    def _fail_all(self, group: Sequence[Completion], error: BaseException) -> None:
        for completion in group:
            self._fail(completion, describe(error))
