"""uvicorn's server with further limits: connections, headers, idle time, unread answers."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import Coroutine
from operator import attrgetter
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paged.serving.http.config import ServeConfig

_MAX_HEADER_BYTES = 64 << 10
_EXIT_SECONDS = 0.25  # time from the end of the drain to the forced exit
_MAX_PIPELINED = 100  # waiting requests of a connection


class _Protocol(HttpToolsProtocol):
    """A connection with limits on idle time, headers, and the time that the client takes to read.

    It is idle unless it has an unanswered request whose headers are complete.
    """

    limits: ServeConfig
    idle_since = 0.0  # in the event loop's time
    is_slow = False  # aborted because the client did not read
    _is_begun = False  # a request has begun, but its headers are incomplete
    _num_unused_bytes = 0  # received since the last start of a request or part of a body
    _running: RequestResponseCycle | None = None  # the request that started last
    _idle_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read, run or answered."""
        return self._idle_timer is not None and not self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(0)  # pauses writing while any byte waits for the socket
        super().connection_made(transport)
        self._become_idle()
        if len(self.connections) > self.limits.max_connections:
            idle: list[Any] = [connection for connection in self.connections if connection.is_idle]  # type: ignore[union-attr]
            longest_idle = min(idle, key=attrgetter("idle_since"))  # this connection if all others have requests
            self.connections.discard(longest_idle)
            longest_idle.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_idling()
        self.resume_writing()
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn notifies only the last request
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        self._num_unused_bytes += len(data)
        super().data_received(data)
        if self._num_unused_bytes > _MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._num_unused_bytes, self._is_begun = 0, True
        if self._idle_timer is not None:
            self._close_in(self.limits.header_seconds)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError  # the parser then answers with 400
        self._is_begun = False
        self._stop_idling()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unused_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            self._become_idle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(self.limits.idle_seconds, self._abort_slow)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _abort_slow(self) -> None:
        self.is_slow = True
        self.transport.abort()

    def _become_idle(self) -> None:
        self.idle_since = self.loop.time()
        if self.cycle is None or self._is_begun:
            self._close_in(self.limits.header_seconds)
        else:
            self._close_in(self.limits.keep_alive_seconds)

    def _close_in(self, seconds: float) -> None:
        self._stop_idling()
        self._idle_timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_idling(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


class Server(uvicorn.Server):
    """Serves an app. SIGTERM or SIGINT drains for `drain_seconds`; a second signal exits at once. The exit code is 0.

    The process ends soon after, even if its threads do not.
    """

    def __init__(self, app: Any, limits: ServeConfig, **options: Any) -> None:
        self._drain_seconds = limits.drain_seconds
        protocol = type("Protocol", (_Protocol,), {"limits": limits})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=limits.keep_alive_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=limits.drain_seconds,  # type: ignore[arg-type]
                **options,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal. Freezes existing objects, because a garbage collection of them takes 0.1 s."""
        gc.collect()
        gc.freeze()
        try:
            await super().serve(sockets)
        finally:
            gc.unfreeze()

    def handle_exit(self, sig: int, frame: Any) -> None:
        # Do not record the signal, so that `serve` does not raise it again.
        drain_seconds = 0.0 if self.should_exit else self._drain_seconds
        # A timer ends the process, because Python waits for threads and the engine for its step, which may never end.
        timer = threading.Timer(drain_seconds + _EXIT_SECONDS, os._exit, [0])
        timer.daemon = True
        timer.start()
        if self.should_exit:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # type: ignore[union-attr]
        self.should_exit = True


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop if installed. Its sockets keep Python's lock, so they do not queue for it behind the engine."""
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(main)
