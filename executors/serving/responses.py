"""/v1/responses: text, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from paged.executors.serving.answers import Event, EventStream, Head
from paged.executors.serving.chat import Conversation, as_template
from paged.executors.serving.errors import ApiError, reply
from paged.executors.serving.schemas import OpenAiSampling, ResponsesBody, ResponsesItem
from paged.executors.serving.service import service_of


async def respond_to_input(body: ResponsesBody, request: Request) -> Response:
    """Answer an input. Nothing is stored, so there is no previous_response_id."""
    service = service_of(request)
    params = service.params(body, body.max_output_tokens)
    items = [ResponsesItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*system, *({**as_template(item), "type": None} for item in items)]
    run = await Conversation.begin(request, _format(body), messages, params)
    head = Head(request, body, "resp", "response")
    events = _events(head, run)
    if body.stream:
        return EventStream(events, named=True)
    return reply([event async for event in events][-1]["response"])


def _format(body: ResponsesBody) -> OpenAiSampling:
    """Return what concerns the run as a chat says it; the schema of `text.format` lies one level deeper there."""
    form = body.text.format if body.text is not None else {}
    schema = {"json_schema": form} if form.get("type") == "json_schema" else {}
    try:
        form = {"type": "text"} | form | schema
        return OpenAiSampling.model_validate({"model": body.model, "stream": body.stream, "response_format": form})
    except ValidationError as error:
        raise ApiError(400, f"text.format: {error.errors()[0]['msg']}", "text.format") from None


async def _events(head: Head, run: Conversation) -> AsyncGenerator[Event, None]:
    """Every event has its number; all but those of the whole response name the one item and its one part."""
    said, number, ending, started = "", 0, "stop", int(head.request.state.began)

    def event(kind: str, **fields: Any) -> Event:
        nonlocal number
        number += 1
        return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

    def item(status: str) -> Event:
        parts = [_part(said)] if status != "in_progress" else []
        identity = {"id": head.id.replace("resp", "msg"), "type": "message", "role": "assistant"}
        return {**identity, "status": status, "content": parts}

    def response(status: str, output: list[Event]) -> Event:
        fixed = {"id": head.id, "object": "response", "created_at": started, "model": head.model, "status": status}
        rest = {"output": output, "error": None, "parallel_tool_calls": False, "tool_choice": "none", "tools": []}
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**fixed, **rest, "incomplete_details": incomplete, "usage": None}

    place = {"item_id": item("in_progress")["id"], "output_index": 0, "content_index": 0}
    async with aclosing(run.deltas()) as parts:
        async for _, deltas, reason in parts:
            if not number:
                for kind in ("created", "in_progress"):
                    yield event(kind, response=response("in_progress", []))
                yield event("output_item.added", output_index=0, item=item("in_progress"))
                yield event("content_part.added", **place, part=_part(""))
            for delta in deltas:
                if delta.kind == "content":
                    said += delta.text
                    yield event("output_text.delta", **place, delta=delta.text, logprobs=[])
            ending = reason or ending
    status = "incomplete" if ending == "length" else "completed"
    yield event("output_text.done", **place, text=said, logprobs=[])
    yield event("content_part.done", **place, part=_part(said))
    yield event("output_item.done", output_index=0, item=item(status))
    record = head.record
    usage = {
        "input_tokens": record.prompt_tokens,
        "input_tokens_details": {"cached_tokens": record.cached_tokens},
        "output_tokens": record.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": record.prompt_tokens + record.new_tokens,
    }
    yield event(status, response=response(status, [item(status)]) | {"usage": usage})


def _part(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
