"""/v1/messages, in Anthropic's form: text, reasoning and calls of tools as blocks, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.serving.answer_reader import Delta
from paged.executors.serving.answers import Event, EventStream, Head
from paged.executors.serving.chat import Conversation, Tools, text_of
from paged.executors.serving.errors import ApiError, reply
from paged.executors.serving.schemas import MessagesBody, MessagesMessage, Part
from paged.executors.serving.service import service_of

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_PIECES = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


async def answer_messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    params = service.params(body, body.max_tokens, stop=body.stop_sequences)
    system = [{"role": "system", "content": text_of(body.system)}] if body.system else []
    messages = [*system, *(one for message in body.messages for one in _as_template(message))]
    given = [
        {"name": tool.name, "parameters": tool.input_schema, **(tool.model_extra or {})} for tool in body.tools or ()
    ]
    run = await Conversation.begin(request, body, messages, params, Tools(given, *_choice(body)))
    head = Head(request, body, "msg", "message")
    events = _events(head, run)
    if body.stream:
        return EventStream(events, named=True)
    return reply(_whole([event async for event in events]))


def _choice(body: MessagesBody) -> tuple[str, bool]:
    """Return what `Tools` calls choice and is_one."""
    if (asked := body.tool_choice) is None:
        return "auto", False
    if asked.type == "tool":
        return asked.name or "", True
    return {"any": "required"}.get(asked.type, asked.type), asked.disable_parallel_tool_use


def _as_template(message: MessagesMessage) -> list[dict[str, Any]]:
    """Return a message as templates read it: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[dict[str, Any]] = []
    said: dict[str, Any] = {"role": message.role, "content": ""}
    for block in message.content:
        more = block.model_extra or {}
        if block.type == "text":
            said["content"] += str(more.get("text", ""))
        elif block.type == "tool_use":
            call = {"name": str(more.get("name")), "arguments": more.get("input")}
            said.setdefault("tool_calls", []).append({"id": more.get("id"), "type": "function", "function": call})
        else:
            result = {"role": "tool", "tool_call_id": more.get("tool_use_id"), "content": _result(more.get("content"))}
            found.append(result)
    return [*found, said] if said["content"] or "tool_calls" in said or not found else found


def _result(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    try:
        return text_of([Part.model_validate(part) for part in content])
    except (TypeError, ValueError):
        raise ApiError(400, "messages: a tool_result whose content is no text", "messages") from None


async def _events(head: Head, run: Conversation) -> AsyncGenerator[Event, None]:
    index, kind = -1, ""
    fields = {"type": "message", "role": "assistant", "model": head.model, "stop_reason": None, "stop_sequence": None}
    usage = {"input_tokens": len(run.prompt), "output_tokens": 0}
    reason, stopped_by = "end_turn", None
    async with aclosing(run.deltas()) as parts:
        async for piece, deltas, ending in parts:
            if index < 0:
                yield {"type": "message_start", "message": {"id": head.id, **fields, "content": [], "usage": usage}}
                index = 0
            for delta in deltas:
                if delta.kind == "call" or delta.kind not in (kind, "arguments"):
                    if kind:
                        yield {"type": "content_block_stop", "index": index}
                        index += 1
                    kind = delta.kind
                    yield {"type": "content_block_start", "index": index, "content_block": _begin(delta)}
                if delta.kind != "call":
                    name, field = _PIECES[delta.kind]
                    piece_of = {"type": name, field: delta.text}
                    yield {"type": "content_block_delta", "index": index, "delta": piece_of}
            if ending is not None:
                reason = _REASONS.get(ending, "end_turn")
                if isinstance(piece.part.stop_reason, str):
                    reason, stopped_by = "stop_sequence", piece.part.stop_reason
    if kind:
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": reason, "stop_sequence": stopped_by}
    yield {"type": "message_delta", "delta": ended, "usage": usage | {"output_tokens": head.record.new_tokens}}
    yield {"type": "message_stop"}


def _begin(delta: Delta) -> Event:
    if delta.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": delta.text, "input": {}}
    return {"reasoning": {"type": "thinking", "thinking": "", "signature": ""}}.get(
        delta.kind, {"type": "text", "text": ""}
    )


def _whole(events: list[Event]) -> Event:
    message: Event = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            given = ""
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][-1], event["delta"]
            given += delta.get("partial_json", "")
            for name in block.keys() & delta.keys() - {"type"}:
                block[name] += delta[name]
        elif event["type"] == "content_block_stop" and given:
            message["content"][-1]["input"] = _as_object(given)
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message


def _as_object(text: str) -> Any:
    """Return arguments; where the answer was cut off, the text under the name that Anthropic gives it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"INVALID_JSON": text}
