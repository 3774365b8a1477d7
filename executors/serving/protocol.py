"""uvicorn's server with limits that it lacks: on connections, and on size and time of headers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paged.executors.serving.config import ServeConfig

_MAX_HEADER_BYTES = 64 << 10


class _Protocol(HttpToolsProtocol):
    """Closes a connection whose headers do not come within a time and a size."""

    limits: ServeConfig
    _timer: asyncio.TimerHandle | None = None
    _header_bytes: int | None = 0  # None while a body is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes is not None and self._header_bytes > _MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort"] = self.transport.abort
        self._wait_for_headers()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _wait_for_headers(self) -> None:
        self._stop_waiting()
        self._header_bytes = 0
        self._timer = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._header_bytes = None
        if self._timer is not None:
            self._timer.cancel()


class Server(uvicorn.Server):
    """Serves an app; SIGTERM or SIGINT drains for `drain_seconds`, a second one ends at once, both with exit code 0."""

    def __init__(self, app: Any, limits: ServeConfig, **options: Any) -> None:
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

    def handle_exit(self, sig: int, frame: Any) -> None:  # noted nowhere, so `serve` does not raise it again
        if self.should_exit:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()  # type: ignore[union-attr]
        self.should_exit = True


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed: its sockets keep Python's lock, for which others queue behind the engine."""
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(main)
