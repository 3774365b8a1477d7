"""A step's forward, come what may: without room it preempts, after an error it finds who cannot run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from paged.errors import OutOfBlocksError
from paged.executors.batch_runner import BatchRunner, WrongResultsError
from paged.executors.engine_metrics import EngineMetrics
from paged.executors.model_executor import ExecutorShutDownError
from paged.executors.request import Completion, State

_RUNNING = (State.PREFILL, State.DECODE)


class Ran(NamedTuple):
    """What ran: completions, and for each its logits, None where its chunk is not final."""

    completions: list[Completion]
    rows: list[torch.Tensor | None]


class StepRunner:
    """Runs completions so that one that fails takes no other with it.

    A call that raised left every cache as it was, so its items run again in halves, until the one that cannot run is
    alone and fails; an error that does not come again costs nobody. Results that do not fit the items say nothing about
    the caches: all of that call fail.

    make_room: free blocks by taking them from completions other than those given; False if there are none.
    fail: end a completion for a reason.
    """

    def __init__(
        self,
        runner: BatchRunner,
        make_room: Callable[[Collection[Completion]], bool],
        fail: Callable[[Completion, str], None],
        metrics: EngineMetrics,
    ) -> None:
        self._runner = runner
        self._make_room = make_room
        self._fail = fail
        self._metrics = metrics

    def run(self, completions: Sequence[Completion]) -> Ran:
        """Run all that can.

        Raises:
            ExecutorShutDownError: nothing can run any more.
        """
        ran = Ran([], [])
        for group in self._runner.groups(completions):
            self._run(group, ran)
        return ran

    def _run(self, group: list[Completion], ran: Ran) -> None:
        while group:
            try:
                rows = self._runner.run(group)
            except OutOfBlocksError as error:
                if not self._make_room(ran.completions):
                    self._fail_all(group, error)
            except ExecutorShutDownError:
                raise
            except WrongResultsError as error:
                self._metrics.failed_forwards += 1
                self._fail_all(group, error)
            except Exception as error:
                self._metrics.failed_forwards += 1
                if len(group) == 1:
                    self._fail_all(group, error)
                middle = len(group) // 2
                self._run(group[:middle], ran)
                group = group[middle:]
            else:
                ran.completions.extend(group)
                ran.rows.extend(rows)
                return
            group = [completion for completion in group if completion.state in _RUNNING]

    def _fail_all(self, group: Sequence[Completion], error: Exception) -> None:
        for completion in group:
            self._fail(completion, f"{type(error).__name__}: {error}")
