"""The engine for servers: coroutines add requests, and one worker thread runs the steps."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from paged.errors import InvalidInputError, PagedError
from paged.executors.engine.config import QueueFullError
from paged.executors.engine.embedding import Pooling
from paged.executors.engine.engine import Engine
from paged.executors.engine.metrics import EngineStatus, prometheus_text
from paged.executors.engine.prompt_checks import Prompt, is_text
from paged.executors.isolation import describe, for_future
from paged.executors.requests.output import Mark, Moment, RequestOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.seq_id import SeqId

P = ParamSpec("P")
R = TypeVar("R")

_WOKEN_AT_ONCE = 16


class EngineStoppedError(PagedError):
    """The engine was shut down or a step failed before the request ended."""


class _Stream:
    """The newest state of a request, until its reader takes it, and an error to raise after it.

    is_asleep: whether the reader waits and no wake-up is scheduled.
    """

    def __init__(self, output: RequestOutput, loop: asyncio.AbstractEventLoop) -> None:
        self.output = output
        self.newest: deque[Moment] = deque(maxlen=1)  # the worker appends and the reader pops, both atomically
        self.is_asleep = False
        self._loop = loop
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self, error: BaseException | None = None) -> None:
        """Wake the reader, to take the newest state and then raise the error, if any."""
        self._error = self._error or error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Moment:
        """Wait for a new state and return it; without one, raise the error."""
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStoppedError(f"request {self.output.request_id!r}: its stream belongs to another event loop")
        while not self.newest:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            self.is_asleep = True
            if not self.newest:  # check again: the worker may append before it sees `is_asleep`
                await self._waiter
        self.is_asleep = False
        return self.newest.pop()


class _EmbeddingLine:
    """Runs embedding requests one after another, so that a step waits for at most one of their forwards."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.num_waiting = 0  # prompts of waiting requests

    @asynccontextmanager
    async def held(self, num_prompts: int, max_waiting: int | None) -> AsyncIterator[None]:
        """Wait for the turn and hold it within the context.

        Raises:
            QueueFullError: another request holds the turn, and more than `max_waiting` prompts would wait.
        """
        num_waiting = self.num_waiting + num_prompts
        if self.turn.locked() and max_waiting is not None and num_waiting > max_waiting:
            raise QueueFullError(f"{self.num_waiting} prompts wait for embeddings, max_waiting is {max_waiting}")
        self.num_waiting += num_prompts
        try:
            await self.turn.acquire()
        finally:
            self.num_waiting -= num_prompts
        try:
            yield
        finally:
            self.turn.release()


class AsyncEngine:
    """Streams the outputs of a synchronous `Engine` without blocking the event loop.

    A worker thread runs steps as long as there are requests. Once per step it tells the event loop which requests have
    changed. Calls wait for the step in progress.

    Use one event loop at a time: until the former loop is closed, calls from another loop raise InvalidInputError and
    do nothing. The first call after that aborts the requests of the closed loop. Leaving a stream by `aclose`, an
    exception or a cancelled task aborts its request. A stream that is read slowly or never holds only its newest state.
    `async with` shuts down at its end. After `shutdown`, all other methods raise EngineStoppedError.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Gradients are off in the worker thread, because switching them off in every step takes 4 us.
        self._worker = ThreadPoolExecutor(1, "paged-engine", torch.set_grad_enabled, (False,))
        self._streams: dict[RequestOutput, _Stream] = {}
        self._behind: set[RequestOutput] = set()  # outputs whose newest state was not published
        self._is_queued = False  # whether a step is queued; used by the worker only
        self._is_paused = False
        self._is_accepting = True
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._embeddings = _EmbeddingLine()

    @property
    def is_accepting(self) -> bool:
        """Whether the engine accepts requests. Does not wait for the step in progress."""
        return self._is_accepting and not self._is_stopped

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt_token_ids: Prompt,
        params: SamplingParams | None = None,
        *,
        deltas: bool = False,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Run a request; yield its newest output whenever it changes, until it is finished.

        Texts and messages are encoded outside the thread that runs steps.

        Args:
            deltas: whether each output holds only the tokens, text and log probabilities since the previous one.
            options: see `Engine.add_request`, also for the other arguments.

        Raises:
            InvalidInputError, UnsupportedError, SequenceTooLongError, QueueFullError: see `Engine.add_request`.
            EngineStoppedError: the engine has stopped.
        """
        stream, streams = await self._open(prompt_token_ids, params, options), self._streams
        try:
            begins = [Mark()] * len(stream.output.outputs)
            while True:
                moment = await stream.take()
                yield stream.output.at(moment, begins)
                if moment.finished:
                    return
                if deltas:
                    begins = [end for _, _, end in moment.completions]
        finally:
            streams.pop(stream.output, None)
            if not self._is_stopped:
                self._worker.submit(self.engine.discard, stream.output)

    async def embed(
        self, prompts: Sequence[Prompt], *, pooling: Pooling = "last", normalize: bool = True
    ) -> torch.Tensor:
        """Return embeddings, see `Engine.embed`; a step of requests runs between any two embedding forwards.

        Raises:
            QueueFullError: another call runs, and `EngineConfig.max_waiting` prompts wait for it.
        """
        ids = [await self._encoded(prompt) for prompt in prompts]
        steps = await self._call(self.engine.embedding_steps, ids, pooling=pooling, normalize=normalize)

        def finish() -> None:
            steps.close()
            self._publish(self.engine.drain())  # `embed` may have read tokens of requests, to preempt them

        async with self._embeddings.held(len(ids), self.engine.config.max_waiting):
            try:
                pooled = await self._call(next, steps)
                while pooled is None:
                    while self._is_paused:
                        await asyncio.sleep(0.01)
                    pooled = await self._call(next, steps)
                return pooled
            finally:
                if not self._is_stopped:
                    self._worker.submit(finish)

    async def abort(self, request_id: SeqId) -> bool:
        """End a request, even if this call is cancelled; return False if no unfinished request has this id.

        Its stream yields once more, finished.
        """
        return await asyncio.shield(asyncio.ensure_future(self._abort(request_id)))

    async def _abort(self, request_id: SeqId) -> bool:
        def abort() -> RequestOutput | None:
            output = self.engine.find(request_id)
            self.engine.abort(request_id)
            return output

        output = await self._call(abort)
        if output in self._streams:
            self._streams[output].newest.append(output.moment())
            self._streams[output].wake()
        return output is not None

    async def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter between two steps while requests run, see `Engine.load_lora`."""
        await self._call(self.engine.load_lora, name, path)

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter between two steps while other requests run, see `Engine.unload_lora`."""
        await self._call(self.engine.unload_lora, name)

    async def list_loras(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        return await self._call(self.engine.list_loras)

    async def update_weights(self, source: Any, *, check_finite: bool = False) -> None:
        """Replace the model's weights between two steps while requests run, see `Engine.update_weights`."""
        await self._call(self.engine.update_weights, source, check_finite=check_finite)

    async def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and KV cache, see `Engine.sleep`."""
        await self._call(self.engine.sleep, level)

    async def wake(self) -> None:
        """Allocate the memory again, see `Engine.wake`."""
        await self._call(self.engine.wake)

    async def status(self) -> EngineStatus:
        """Return the counts of the queue, running sequences and cache blocks."""
        return await self._call(self.engine.status)

    async def prometheus_text(self) -> str:
        """Return metrics and status in Prometheus' text format, see `prometheus_text`."""
        return await self._call(lambda: prometheus_text(self.engine.metrics, self.engine.status()))

    async def pause(self) -> None:
        """Stop running steps until `resume`; return when the current step has ended and the executor is idle.

        Requests are accepted, wait, and can be aborted. Their timeouts take effect when steps run again.
        """
        self._check_accepting()
        self._check_loop()
        was_paused, self._is_paused = self._is_paused, True
        try:
            await self._call(lambda: self._publish(self.engine.drain()))
        except asyncio.CancelledError:  # the caller cannot know that the engine has paused
            if not was_paused:
                await self.resume()
            raise

    async def resume(self) -> None:
        """Run steps again; do nothing if they run."""
        self._check_accepting()
        self._check_loop()
        self._is_paused = False
        self._worker.submit(self._go_on)

    async def shutdown(self, *, drain: bool = False) -> None:
        """Reject new requests, end the running requests and stop the worker; a second call does nothing.

        The executor is not shut down; it belongs to its owner.

        Args:
            drain: whether to run requests to their ends first, which resumes a paused engine. Otherwise they are
                aborted, and their streams raise EngineStoppedError after their last output.
        """
        if self._is_stopped:
            return
        self._check_loop()
        self._is_accepting = self._is_paused = False
        await self._call(self._go_on)  # runs after requests that are being added; new ones are refused
        num_unfinished = self.engine.num_unfinished if drain else 0
        while num_unfinished and not self._is_stopped:
            num_unfinished = await self._call(self._num_unfinished)  # runs after the current step
        for output, stream in list(self._streams.items()):
            if not output.finished:
                stream.wake(EngineStoppedError(f"request {output.request_id!r}: the engine was shut down"))
        if not self._is_stopped:
            await self._call(self._end_all)
        self._is_stopped = True
        self._worker.shutdown()

    async def _encoded(self, prompt: Prompt) -> Prompt:
        """Return token ids of a text or messages, encoded in a thread, because a chat template may take seconds."""
        self._check_accepting()
        self._check_loop()
        if not is_text(prompt):
            return prompt
        return await asyncio.to_thread(for_future, self.engine.encode_prompt, prompt)

    async def _open(
        self, prompt_token_ids: Prompt, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> _Stream:
        """Add a request; remove it again if the caller is cancelled meanwhile."""

        def add() -> _Stream:  # registers the stream before the next step, which may finish the request
            self._check_accepting()
            output = self.engine.add_request(prompt, params, **options)
            try:
                streams[output] = stream = _Stream(output, loop)
                self._go_on()
                return stream
            except BaseException:
                self.engine.discard(output)
                raise

        def leave(added: Future[_Stream]) -> None:
            if not added.cancelled() and added.exception() is None:
                output = added.result().output
                streams.pop(output, None)
                self.engine.discard(output)

        prompt = await self._encoded(prompt_token_ids)
        self._check_accepting()
        self._check_loop()
        streams, loop = self._streams, asyncio.get_running_loop()
        added = self._worker.submit(for_future, add)
        try:
            stream = await asyncio.wrap_future(added)
        except asyncio.CancelledError:
            if not self._is_stopped:
                self._worker.submit(leave, added)
            raise
        return stream

    async def _call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_stopped:
            raise EngineStoppedError("the engine was shut down")
        self._check_loop()
        return await asyncio.wrap_future(self._worker.submit(lambda: for_future(method, *args, **kwargs)))

    def _check_loop(self) -> None:
        """Refuse another event loop while the former one is open; abort the streams of a closed loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise InvalidInputError("AsyncEngine: called from another event loop than before, which is not closed")
            old_streams, self._streams = self._streams, {}
            self._loop, self._embeddings = loop, _EmbeddingLine()
            if not self._is_stopped:
                self._worker.submit(self._discard, old_streams)  # after requests that are being added

    def _check_accepting(self) -> None:
        if not self._is_accepting:
            raise EngineStoppedError("the engine was shut down")

    def _num_unfinished(self) -> int:
        return self.engine.num_unfinished

    def _end_all(self) -> None:
        self._discard(self._streams)
        self.engine.drain()

    def _discard(self, streams: Mapping[RequestOutput, _Stream]) -> None:
        for output in list(streams):
            self.engine.discard(output)

    def _go_on(self) -> None:
        """Queue a step behind waiting calls, if there are requests and no step is queued."""
        if self.engine.num_unfinished and not (self._is_queued or self._is_paused):
            self._is_queued = True
            self._worker.submit(self._step)

    def _step(self) -> None:
        self._is_queued = False
        outputs: Sequence[RequestOutput] = ()
        if not self._is_paused:
            try:
                outputs = self.engine.step()
            except BaseException as error:  # the executor cannot run, and every request has ended
                self._publish(())
                self._tell(list(self._streams.values()), error)
            self._go_on()
        self._publish(outputs)

    def _publish(self, outputs: Iterable[RequestOutput]) -> None:
        """Give the readers of these requests the current state, and wake sleeping readers, once each.

        A reader that has not taken its former state gets a new one only after a later step, or now if no step is
        queued, because making a state costs the worker 1 us.
        """
        changed = self._behind.union(outputs)
        self._behind.clear()
        streams = []
        for output in changed:
            stream = self._streams.get(output)
            if stream is None:
                continue
            if stream.newest and self._is_queued and self._is_accepting:
                self._behind.add(output)
                continue
            stream.newest.append(output.moment())
            if stream.is_asleep:
                stream.is_asleep = False
                streams.append(stream)
        self._tell(streams)

    def _tell(self, streams: Sequence[_Stream], error: BaseException | None = None) -> None:
        """Wake readers in one callback of their event loop; if the loop is closed, abort their requests."""
        if not streams or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_wake, streams, error)
        except RuntimeError:
            self._discard({stream.output: stream for stream in streams})


def _wake(streams: Sequence[_Stream], error: BaseException | None) -> None:
    """Wake a few readers, then schedule the others.

    In between, the worker can take the interpreter's lock. Otherwise it would wait for `sys.getswitchinterval` (5 ms)
    while hundreds of readers run.
    """
    if len(streams) > _WOKEN_AT_ONCE:
        asyncio.get_running_loop().call_soon(_wake_next, streams[_WOKEN_AT_ONCE:], error)
    for stream in streams[:_WOKEN_AT_ONCE]:
        stopped: EngineStoppedError | None = None
        if error is not None:
            stopped = EngineStoppedError(f"request {stream.output.request_id!r}: {describe(error)}")
            stopped.__cause__ = error
        stream.wake(stopped)


def _wake_next(streams: Sequence[_Stream], error: BaseException | None) -> None:
    time.sleep(0)
    _wake(streams, error)
