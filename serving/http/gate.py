"""ASGI middleware: allowed hosts, authentication, body limits, disconnects, log."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.executors.requests.output import RequestOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.serving.http.config import ServeConfig
from paged.serving.http.errors import ApiError
from paged.serving.http.hosts import HostRules
from paged.tools.printable import one_line

LOG = logging.getLogger("paged.serve")


@dataclass
class RequestLog:
    """Log of a request.

    Times are in seconds. most_tokens: new tokens of the longest choice. end: finish reasons, or the reason of a
    failure.
    """

    id: str
    method: str
    path: str
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    new_tokens: int = 0
    most_tokens: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    seconds: float = 0.0
    end: str = ""

    def line(self, form: str) -> str:
        values = asdict(self)
        for name, value in values.items():
            if isinstance(value, float):
                values[name] = round(value, 4)
        if form == "json":
            return json.dumps(values)
        words = []
        for name, value in values.items():
            if value is not None:
                words.append(f"{name}={one_line(str(value), 200)}")
        return " ".join(words)


class Generation(NamedTuple):
    """What the engine did for a request: newest outputs by number of the prompt.

    model: name in the API, of an adapter if the request has one. asked: when the prompts reached the engine. times:
    when the newest outputs came, by number of the prompt. Both are in seconds of `perf_counter`.
    """

    model: str
    params: SamplingParams
    asked: float
    outputs: dict[int, RequestOutput]
    times: dict[int, float]


class Gate:
    """Middleware that reads the whole body first, runs the app, and cancels it when the client disconnects.

    on_end: called with the scope and the log of every request. The scope's state has `began` (time of day), `arrived`
    (`perf_counter`) and, if the request generated, `generation`.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig, on_end: Callable[[Scope, RequestLog], None]) -> None:
        self.app, self.config, self._on_end = app, config, on_end
        self._hosts = HostRules(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        log = RequestLog(f"req-{secrets.token_hex(12)}", scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        connection = state.get("connection")  # None behind other servers
        arrived = time.perf_counter()
        state |= {"log": log, "began": time.time(), "arrived": arrived}

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                more = [(b"x-request-id", log.id.encode()), (b"x-content-type-options", b"nosniff")]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            try:
                self._hosts.check(scope)
                self._check_key(scope)
                body = await self._body(scope, receive)
            except ApiError as error:
                log.end = error.message
                error.headers["connection"] = "close"  # because unread parts of the body may follow
                await error.response()(scope, receive, send_on)
            else:
                await self._run(scope, body, receive, send_on)
            if connection is not None:  # the answer is complete only when the client has received it
                await connection.flow.drain()
                if connection.is_slow:
                    raise ConnectionError
        except ConnectionError:
            log.end = log.end or "left"
            if connection is not None and connection.is_slow:
                log.end = "slow"
        except asyncio.CancelledError:
            log.end = "shutdown"
            if connection is not None:
                connection.transport.abort()
        except Exception:
            if not log.end:  # otherwise the route has set it
                log.end = "error"
                LOG.exception("request %s failed", log.id)
        finally:
            log.seconds = time.perf_counter() - arrived
            self._on_end(scope, log)
            LOG.info("%s", log.line(self.config.log_format))

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app with the whole body; raise ConnectionError if the client disconnects first."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            if messages:
                return messages.pop()
            # Nothing follows the body; a disconnect cancels the app.
            nothing: Message = await asyncio.get_running_loop().create_future()
            return nothing

        run = asyncio.ensure_future(self.app(scope, receive_body, send))
        watch = asyncio.ensure_future(_wait_for_end(receive))
        try:
            await asyncio.wait((run, watch), return_when="FIRST_COMPLETED")
        finally:
            is_done = run.done()
            run.cancel()
            watch.cancel()
            await asyncio.gather(run, watch, return_exceptions=True)
        if not is_done:
            raise ConnectionError
        run.result()

    def _check_key(self, scope: Scope) -> None:
        """Check the key: a bearer token (OpenAI), x-api-key (Anthropic), or a browser's Basic password."""
        if self.config.api_key is None or scope["path"] == "/health":
            return
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2].decode("latin-1")
            except binascii.Error:
                key = ""
        key = headers.get("x-api-key", key)
        # Compare latin-1 bytes, the encoding of headers.
        if not hmac.compare_digest(key.encode("latin-1", "replace"), self.config.api_key.encode()):
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            error.headers["www-authenticate"] = 'Basic realm="paged", Bearer'
            raise error

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit, body = self.config.max_body_bytes, bytearray()
        length = Headers(scope=scope).get("content-length", "0")
        is_too_long, is_whole = not length.isdecimal() or int(length[:20]) > limit, False
        try:
            async with asyncio.timeout(self.config.idle_seconds):
                while not (is_too_long or is_whole):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    body += message.get("body", b"")
                    is_too_long, is_whole = len(body) > limit, not message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"no whole body within {self.config.idle_seconds} s") from None
        if is_too_long:
            raise ApiError(413, f"the body is longer than {limit} bytes")
        return bytes(body)


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
