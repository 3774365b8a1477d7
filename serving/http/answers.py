"""Answers from a stream of pieces, as events or one body; each route defines its form."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged.executors.requests.sampling_params import SamplingParams
from paged.serving.http.errors import ApiError, as_api_error, dumps, reply
from paged.serving.http.gate import LOG, RequestLog
from paged.serving.http.schemas import Sampling, StreamOptions
from paged.serving.http.service import Piece, service_of

Event = dict[str, Any]
_TOKEN, _ROW = 16, 64  # work units of a token, without and with log probabilities


class Form:
    """Base of forms: makes the events of a streamed answer, or a whole answer, from pieces.

    prefix: prefix of the answer's id. kind: type of the answer. is_named: whether events carry the name of their type,
    as in Anthropic's API and /v1/responses.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    is_named: ClassVar[bool] = False

    def __init__(self, request: Request, body: Sampling) -> None:
        self.service, self.request, self.is_streamed = service_of(request), request, bool(body.stream)
        self.log: RequestLog = request.state.log
        options = getattr(body, "stream_options", None)
        self.has_usage = isinstance(options, StreamOptions) and bool(options.include_usage)
        if self.has_usage and not self.is_streamed:
            raise ApiError(400, "stream_options: only with stream", "stream_options")
        self.id = f"{self.prefix}-{self.log.id.removeprefix('req-')}"
        self.model = body.model or self.service.config.model_name
        self.created = int(request.state.began)

    def events(self, piece: Piece) -> Iterable[Event]:
        raise NotImplementedError

    def end(self) -> Iterable[Event]:
        """Yield the last events: in OpenAI's form, the usage if requested, and the times of the request."""
        if not self.has_usage:
            return []
        timings = {"queued_s": self.log.queued_s, "first_token_s": self.log.first_token_s}
        return [self.body(choices=[], usage=self.usage(), timings=timings)]

    def whole(self, pieces: Sequence[Piece]) -> Event:
        """Return the whole answer from one piece for each choice, in order."""
        raise NotImplementedError

    def body(self, **fields: Any) -> Event:
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, **fields}

    def usage(self) -> Event:
        log = self.log
        details: Event = {"cached_tokens": log.cached_tokens}
        if log.loaded_tokens:
            num_on_device = log.cached_tokens - log.loaded_tokens
            details["cached_tokens_details"] = {"device": num_on_device, "host": log.loaded_tokens}
        return {
            "prompt_tokens": log.prompt_tokens,
            "completion_tokens": log.new_tokens,
            "total_tokens": log.prompt_tokens + log.new_tokens,
            "prompt_tokens_details": details,
        }

    async def answer(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, options: dict[str, Any]
    ) -> Response:
        pieces = self.service.pieces(self.request, prompts, params, **options)
        if self.is_streamed:
            return _EventStream(self, pieces)
        by_choice = [piece async for piece in pieces]
        by_choice.sort(key=lambda piece: piece.choice)
        return await self.service.in_thread(lambda: reply(self.whole(by_choice)), sum(map(_work, by_choice)))


class _EventStream(Response):
    """Stream of events, one write per piece. An error before the first event has a status, a later one is an event."""

    media_type = "text/event-stream"

    def __init__(self, form: Form, pieces: AsyncGenerator[Piece, None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._form, self._pieces = form, pieces
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    if not has_begun:
                        head = {"status": self.status_code, "headers": self.raw_headers}
                        await send({"type": "http.response.start", **head})
                        has_begun = True
                    make = partial(self._text, self._form.events(piece))
                    if text := await self._form.service.in_thread(make, _work(piece)):
                        await send({"type": "http.response.body", "body": text, "more_body": True})
            text = self._text(self._form.end())
        except Exception as error:
            if not has_begun:
                raise
            failed = as_api_error(error, self._form.request.state.names)
            scope["state"]["log"].end = failed.message
            if failed.status >= 500:
                LOG.error("request %s failed within its stream: %s", scope["state"]["log"].id, failed.message)
            text = self._text([failed.body])
        if not self._form.is_named:
            text += b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": text, "more_body": False})

    def _text(self, events: Iterable[Event]) -> bytes:
        text = b""
        for event in events:
            if self._form.is_named:
                text += b"event: %s\n" % event["type"].encode()
            text += b"data: %s\n\n" % dumps(event)
        return text


def _work(piece: Piece) -> int:
    """Return the work of writing a piece, in copied characters."""
    _, output, part = piece
    count = part.mark.token_ids - part.begin.token_ids
    if part.growth.logprobs is None:
        return count * _TOKEN
    if part.begin.token_ids == 0 and output.prompt_table is not None:
        count += len(output.prompt)
    return count * _ROW


def finite(value: float) -> float:
    """Replace -inf by -9999, as OpenAI does for impossible tokens, because JSON has no infinities."""
    return value if math.isfinite(value) else -9999.0
