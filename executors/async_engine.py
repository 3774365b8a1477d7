"""The engine for servers: requests come from coroutines, and one worker thread runs the steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from paged.errors import PagedError
from paged.executors.engine import Engine
from paged.executors.engine_metrics import EngineStatus, prometheus_text
from paged.executors.request import RequestOutput
from paged.executors.sampling_params import SamplingParams
from paged.seq_id import SeqId

P = ParamSpec("P")
R = TypeVar("R")

_Queue = asyncio.Queue[RequestOutput | Exception]


class EngineStoppedError(PagedError):
    """The engine was shut down, or a step of it failed, before the request was done."""


class AsyncEngine:
    """Streams of a synchronous `Engine`; whoever awaits one never blocks the event loop.

    Steps run as long as there are requests; calls wait for the step in between. Use it from one event loop. A stream
    that is left, by `aclose`, an exception or a cancelled task, aborts its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paged-engine")
        self._streams: dict[SeqId, tuple[RequestOutput, _Queue]] = {}
        self._steps: asyncio.Task[None] | None = None
        self._is_shut_down = False

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """The request's output after every step that changed it, the last one finished. `options`: see `add_request`.

        Raises:
            InvalidInputError, SequenceTooLongError: as `Engine.add_request`.
            EngineStoppedError: there is no engine any more.
        """
        self._check_running()
        queue: _Queue = asyncio.Queue()

        def add() -> RequestOutput:  # before the next step, whose output may be the last
            output = self.engine.add_request(prompt_token_ids, params, **options)
            self._streams[output.request_id] = output, queue
            return output

        output = await self._call(add)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run_steps())
        try:
            while True:
                changed = await queue.get()
                if isinstance(changed, Exception):
                    raise EngineStoppedError(f"request {output.request_id!r}: {changed}") from changed
                yield changed
                if changed.finished:
                    return
        finally:
            del self._streams[output.request_id]
            if not self._is_shut_down:
                self._worker.submit(self.engine.abort, output.request_id)

    async def abort(self, request_id: SeqId) -> bool:
        """End a request: its stream yields once more, finished. False if there is none of that name."""
        self._check_running()
        is_found = await self._call(self.engine.abort, request_id)
        if is_found and request_id in self._streams:
            output, queue = self._streams[request_id]
            queue.put_nowait(output.copy())
        return is_found

    async def load_lora(self, name: str, path: str | Path) -> None:
        """As `Engine.load_lora`, between two steps, while requests run."""
        await self._call(self.engine.load_lora, name, path)

    async def unload_lora(self, name: str) -> None:
        """As `Engine.unload_lora`, between two steps, while other requests run."""
        await self._call(self.engine.unload_lora, name)

    async def list_loras(self) -> tuple[str, ...]:
        """As `Engine.list_loras`."""
        return await self._call(self.engine.list_loras)

    async def status(self) -> EngineStatus:
        """Queue, running sequences and cache."""
        return await self._call(self.engine.status)

    async def prometheus_text(self) -> str:
        """The page for Prometheus, see `prometheus_text`."""
        return await self._call(lambda: prometheus_text(self.engine.metrics, self.engine.status()))

    async def shutdown(self) -> None:
        """Abort what runs and stop the worker; the executor is left to its owner. A second call is harmless."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        for request_id, (_, queue) in list(self._streams.items()):
            await self._call(self.engine.abort, request_id)
            queue.put_nowait(EngineStoppedError("the engine was shut down"))
        if self._steps is not None:
            await self._steps
        self._worker.shutdown()

    async def _call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(self._worker.submit(method, *args, **kwargs))

    def _check_running(self) -> None:
        if self._is_shut_down:
            raise EngineStoppedError("the engine was shut down")

    def _step(self) -> list[RequestOutput]:
        return [output.copy() for output in self.engine.step()]

    async def _run_steps(self) -> None:
        try:
            while self.engine.num_unfinished:
                for output in await self._call(self._step):
                    if output.request_id in self._streams:
                        self._streams[output.request_id][1].put_nowait(output)
        except Exception as error:
            for _, queue in self._streams.values():
                queue.put_nowait(error)
