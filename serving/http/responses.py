"""/v1/responses: text, reasoning and function calls as items, whole or as events."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paged.serving.http.answers import Event
from paged.serving.http.chat import NO_CHOICE, Conversation, Tools, as_content, as_function, as_template
from paged.serving.http.errors import ApiError
from paged.serving.http.schemas import Image, InputImage, ResponsesBody, ResponsesChoice, ResponsesItem
from paged.serving.http.service import Piece, service_of

# By kind of delta: type of its item, of the events for its text, and of the part with the text.
_TYPES = {
    "content": ("message", "output_text", "output_text"),
    "reasoning": ("reasoning", "reasoning_text", "reasoning_text"),
    "call": ("function_call", "function_call_arguments", ""),
}


async def respond_to_input(body: ResponsesBody, request: Request) -> Response:
    """Answer an input. Answers are not stored, so previous_response_id is not supported."""
    service = service_of(request)
    params = service.params(body, body.max_output_tokens)
    if body.tool_choice not in NO_CHOICE and not body.tools:
        raise ApiError(400, "tool_choice: only with tools", "tool_choice")
    has_tools = bool(body.tools) and body.tool_choice != "none"
    wishes = service.tongue.wishes(has_tools=has_tools)
    variables: dict[str, Any] = {}
    if body.reasoning is not None:
        variables |= wishes.effort(body.reasoning.effort, "reasoning.effort")
    if body.text is not None:
        variables |= wishes.verbosity(body.text.verbosity, "text.verbosity")
    messages = await service.in_thread(lambda: _messages(body), len(await request.body()))
    functions: list[dict[str, Any]] = []
    for tool in body.tools or ():
        functions.append(as_function(tool.name, tool.description, tool.parameters or {"type": "object"}))
    tools = Tools(functions, is_one=body.parallel_tool_calls is False)
    if isinstance(body.tool_choice, ResponsesChoice):
        tools = Tools(functions, "required", body.tool_choice.name, is_one=True)
    elif body.tool_choice is not None:
        tools = tools._replace(choice=body.tool_choice)
    return await _Response(request, body).converse(body, messages, params, tools, variables)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Convert the input for templates; calls and reasoning become part of the assistant's message."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: dict[str, Any] | None = None  # the assistant's message that collects items
    for index, item in enumerate(body.input):
        if item.type == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": as_content(item.output, _image_url)}
            )
            turn = None
            continue
        if item.type == "message" and item.role != "assistant":
            if item.role is None:
                raise ApiError(400, f"input.{index}.role: Field required", f"input.{index}.role")
            messages.append({"role": item.role, "content": as_content(item.content, _image_url)})
            turn = None
            continue
        if item.type == "function_call" and item.name is None:
            raise ApiError(400, f"input.{index}.name: Field required", f"input.{index}.name")
        has_text = turn is not None and turn["content"] != ""
        has_more = turn is not None and len(turn) > 2
        is_next = (item.type == "message" and has_text) or (item.type == "reasoning" and (has_text or has_more))
        if turn is None or is_next:
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        if item.type == "message":
            turn["content"] = as_content(item.content, _image_url)
        elif item.type == "reasoning":
            turn["reasoning"] = _reasoning(item)
        else:
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return as_template(messages)


def _reasoning(item: ResponsesItem) -> str:
    """Return the text of a reasoning item; `encrypted_content` of other servers cannot be read."""
    if item.encrypted_content is not None and not item.content:
        with suppress(ValueError):
            return base64.b64decode(item.encrypted_content, validate=True).decode()
    if item.content is None or isinstance(item.content, str):
        return item.content or ""
    return "".join(getattr(part, "text", "") for part in item.content)


def _image_url(part: Struct) -> str | None:
    """Return the URL of an image part, None for any other part."""
    if isinstance(part, Image):
        return part.image_url.url
    if isinstance(part, InputImage):
        return part.image_url
    return None


class _Response(Conversation):
    """Form of /v1/responses. Every event has a number; events about one item name the item."""

    prefix, kind, is_named = "resp", "response", True

    def __init__(self, request: Request, body: ResponsesBody) -> None:
        super().__init__(request, body)
        self._choice: str | Event = "auto" if body.tools else "none"
        if isinstance(body.tool_choice, ResponsesChoice):
            self._choice = {"type": "function", "name": body.tool_choice.name}
        elif body.tool_choice is not None:
            self._choice = body.tool_choice
        self._is_encrypted = bool(body.include)
        self._is_parallel = bool(body.tools) and body.parallel_tool_calls is not False
        self._status, self._number = "in_progress", 0
        self._items: list[Event] = []
        self._kind, self._text = "", ""  # the last item; its text is added when it is done

    def events(self, piece: Piece) -> Iterator[Event]:
        if not self._number:
            yield self._event("created", response=self._response())
            yield self._event("in_progress", response=self._response())
        deltas, reason = self.read(piece)
        for kind, text in deltas:
            if kind == "call" or kind not in (self._kind, "arguments"):
                yield from self._close()
                yield from self._open(kind, text)
            if kind == "call":
                continue
            self._text += text
            fields: Event = {"delta": text}
            if kind == "content":
                fields["logprobs"] = []
            yield self._event(f"{_TYPES[self._kind][1]}.delta", **self._place(), **fields)
        if reason is not None:
            self._status = "incomplete" if reason == "length" else "completed"

    def end(self) -> Iterator[Event]:
        if not self._items:
            yield from self._open("content", "")
        yield from self._close()
        yield self._event(self._status, response=self._response())

    def whole(self, pieces: Sequence[Piece]) -> Event:
        for _ in (*self.events(pieces[0]), *self.end()):
            pass
        return self._response()

    def _open(self, kind: str, name: str) -> Iterator[Event]:
        self._kind, self._text = kind, ""
        item_type = _TYPES[kind][0]
        item: Event = {"id": f"{item_type[:3]}_{secrets.token_hex(12)}", "type": item_type, "status": "in_progress"}
        if kind == "call":
            item |= {"call_id": f"call_{secrets.token_hex(12)}", "name": name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": [], "encrypted_content": None}
        else:
            item |= {"role": "assistant", "content": []}
        self._items.append(item)
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=dict(item))
        if kind == "content":
            yield self._event("content_part.added", **self._place(), part=self._part())

    def _close(self) -> Iterator[Event]:
        """End the last item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item, kind = self._items[-1], self._kind
        item["status"] = "completed"
        if self._status == "incomplete":
            item["status"] = "incomplete"
        if kind == "call":
            item["arguments"] = self._text
            done: Event = {"arguments": self._text, "name": item["name"]}
        else:
            item["content"] = [self._part()]
            if kind == "reasoning" and self._is_encrypted:  # lets a client that drops the content send it back
                item["encrypted_content"] = base64.b64encode(self._text.encode()).decode()
            done = {"text": self._text}
            if kind == "content":
                done["logprobs"] = []
        yield self._event(f"{_TYPES[kind][1]}.done", **self._place(), **done)
        if kind == "content":
            yield self._event("content_part.done", **self._place(), part=self._part())
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _place(self) -> Event:
        place: Event = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if self._kind != "call":
            place["content_index"] = 0
        return place

    def _part(self) -> Event:
        part: Event = {"type": _TYPES[self._kind][2], "text": self._text}
        if self._kind == "content":
            part |= {"annotations": [], "logprobs": []}
        return part

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _response(self) -> Event:
        response: Event = {
            "error": None,
            "parallel_tool_calls": self._is_parallel,
            "tool_choice": self._choice,
            "tools": [],
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": self._status,
            "output": [],
            "incomplete_details": None,
            "usage": None,
        }
        if self._status == "in_progress":
            return response
        response["output"] = list(self._items)
        if self._status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        log = self.log
        response["usage"] = {
            "input_tokens": log.prompt_tokens,
            "input_tokens_details": {"cached_tokens": log.cached_tokens},
            "output_tokens": log.new_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": log.prompt_tokens + log.new_tokens,
        }
        return response
