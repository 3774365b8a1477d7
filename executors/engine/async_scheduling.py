"""Asynchronous scheduling: the next step of decodes is prepared while the device runs the present one."""

from __future__ import annotations

import logging
from functools import partial

from paged.executors.engine.config import EngineConfig
from paged.executors.engine.metrics import EngineMetrics
from paged.executors.engine.scheduler import Scheduler
from paged.executors.isolation import attempt
from paged.executors.model_executor import ModelExecutor
from paged.executors.requests.request import Completion
from paged.executors.unified_executor import UnifiedExecutor
from paged.forward_step import PreparedStep

_LOG = logging.getLogger("paged")


class AsyncScheduling:
    """Prepares the step that follows if no request comes or ends early, and cancels it as soon as one does.

    It takes blocks for sequences that run anyway, so none is preempted for it; where there are none, nothing is
    prepared. Nor is it with drafts, without a cache manager or where `EngineConfig.prepare_ahead` says so.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        config: EngineConfig,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        *,
        has_drafts: bool,
    ) -> None:
        is_on = executor.info().device.type == "cuda" if config.prepare_ahead is None else config.prepare_ahead
        can_prepare = is_on and executor.kv_manager is not None and not has_drafts
        self._executor = executor if can_prepare and isinstance(executor, UnifiedExecutor) else None
        self._scheduler = scheduler
        self._metrics = metrics
        self._completions: list[Completion] = []
        self._prepared: PreparedStep | None = None

    def prepare(self) -> None:
        """Prepare after the present step was launched, before its tokens are known; an error is logged alone."""
        if self._executor is not None:
            warn = partial(_LOG.warning, "the next step was not prepared: %s")
            self._prepared = attempt(warn, self._prepare, self._executor)

    def leave(self, completion: Completion) -> None:
        """Cancel the step if the completion, which has ended, is in it."""
        if self._prepared is not None and completion in self._completions:
            self.end()

    def end(self) -> None:
        """Let go of what was prepared: a step has run, which used it if it was that one, or can never be that one."""
        if self._prepared is not None:
            prepared, self._prepared = self._prepared, None
            prepared.cancel()
            self._metrics.prepared_steps += prepared.is_used
            self._metrics.dropped_steps += not prepared.is_used

    def _prepare(self, executor: UnifiedExecutor) -> PreparedStep | None:
        self._completions = self._scheduler.predict()
        handles = [completion.handle for completion in self._completions if completion.handle is not None]
        return executor.prepare_step(handles) if handles else None
