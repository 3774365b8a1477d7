"""Answers as one body or as a stream of events, with the fields that OpenAI's have in common."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged.executors.serving.errors import as_api_error, reply
from paged.executors.serving.gate import LOG, Record
from paged.executors.serving.schemas import OpenAiSampling, Sampling
from paged.executors.serving.service import service_of

Event = dict[str, Any]


class Head:
    """The fields that all chunks of an answer share. is_streamed: what the request says."""

    def __init__(self, request: Request, body: Sampling, prefix: str, kind: str) -> None:
        self.service, self.request = service_of(request), request
        self.record: Record = request.state.record
        self.is_streamed = bool(body.stream)
        options = body.stream_options if isinstance(body, OpenAiSampling) else None
        self.has_usage = not self.is_streamed or (options is not None and options.include_usage)
        self.id = f"{prefix}-{self.record.id.removeprefix('req-')}"
        self.model = body.model or self.service.config.model_name
        self._kind, self._created = kind, int(request.state.began)

    def body(self, **fields: Any) -> Event:
        return {"id": self.id, "object": self._kind, "created": self._created, "model": self.model, **fields}


def usage(record: Record) -> Event:
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.new_tokens,
        "total_tokens": record.prompt_tokens + record.new_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }


async def respond(
    head: Head, events: AsyncGenerator[Event, None], whole: Callable[[Event], Event] = lambda choice: choice
) -> Response:
    """Stream events in OpenAI's form, or join their choices; the last one bears the usage and no choice."""
    if head.is_streamed:
        return EventStream(events if head.has_usage else _without_last(events), "data: [DONE]\n\n")
    choices: dict[int, Event] = {}
    last: Event = {}
    async for last in events:
        for part in last["choices"]:
            _join(choices.setdefault(part["index"], {}), part)
    return reply(last | {"choices": [whole(choices[index]) for index in sorted(choices)]})


def _join(whole: Event, part: Event) -> None:
    """Add a chunk: texts and lists grow, but an entry of a list with an index adds to the one of that index."""
    for name, value in part.items():
        old = whole.get(name)
        if old is None or value is None:
            whole[name] = value if old is None else old
        elif isinstance(value, str):
            whole[name] = old + value
        elif isinstance(value, dict):
            _join(old, value)
        elif isinstance(value, list):
            for one in value:
                index = one.get("index") if isinstance(one, dict) else None
                if type(index) is int and index < len(old):
                    _join(old[index], one)
                else:
                    old.append(one)
        else:
            whole[name] = value


async def _without_last(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with aclosing(events) as all_events:
        async for event in all_events:
            if event["choices"]:
                yield event


class EventStream(Response):
    """Server-sent events. What goes wrong before the first one has a status; later it is an event.

    named: whether events are sent with the name of their type, as Anthropic's and those of /v1/responses.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], end: str = "", *, named: bool = False) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._events, self._end, self._is_named = events, end, named
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def write(text: str, *, more: bool = True) -> None:
            nonlocal has_begun
            if not has_begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            has_begun = True
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await write(self._text(event))
        except Exception as error:
            if not has_begun:
                raise
            failed = as_api_error(error)
            scope["state"]["record"].end = failed.message
            if failed.status >= 500:
                LOG.error("request %s failed within its stream: %s", scope["state"]["record"].id, failed.message)
            await write(self._text(failed.body))
        await write(self._end, more=False)

    def _text(self, event: Event) -> str:
        name = f"event: {event['type']}\n" if self._is_named else ""
        return f"{name}data: {json.dumps(event)}\n\n"


def finite(value: float) -> float:
    """JSON has no infinities; OpenAI writes -9999 for a token that cannot be."""
    return value if math.isfinite(value) else -9999.0
