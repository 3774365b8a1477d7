"""The engine's next step, prepared while the device runs the present one."""

from __future__ import annotations

import logging

from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.isolation import describe, raise_exit
from paged.executors.requests.request import Completion
from paged.executors.unified_executor import UnifiedExecutor
from paged.forward_step import PreparedStep

_LOG = logging.getLogger("paged")


class StepsAhead:
    """Prepares the step that follows if nothing unforeseen happens, and gives it up as soon as something does.

    Its room is that of sequences which run anyway, so nobody waits for it; where there is none, nothing is prepared.
    """

    def __init__(self, executor: UnifiedExecutor | None, scheduler: Scheduler, metrics: EngineMetrics) -> None:
        """executor: None prepares nothing."""
        self._executor = executor
        self._scheduler = scheduler
        self._metrics = metrics
        self._completions: list[Completion] = []
        self._prepared: PreparedStep | None = None

    def prepare(self) -> None:
        """After the present step was launched, before its tokens are known: no error may stand in their way."""
        if self._executor is None:
            return
        try:
            self._completions = self._scheduler.foresee()
            handles = [completion.handle for completion in self._completions if completion.handle is not None]
            self._prepared = self._executor.prepare_step(handles) if handles else None
        except BaseException as error:
            raise_exit(error)
            _LOG.warning("the next step was not prepared: %s", describe(error))

    def leave(self, completion: Completion) -> None:
        """A completion has ended."""
        if self._prepared is not None and completion in self._completions:
            self.end()

    def end(self) -> None:
        """A step has run, which used what was prepared if it was that one; or that can never be."""
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            prepared.cancel()
            self._metrics.prepared_steps += prepared.is_used
            self._metrics.dropped_steps += not prepared.is_used
