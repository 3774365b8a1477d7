"""/v1/responses: text, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.serving.answers import Event
from paged.executors.serving.chat import Conversation, Tools, read_again
from paged.executors.serving.schemas import ResponsesBody, Sampling
from paged.executors.serving.service import Piece, service_of


async def respond_to_input(body: ResponsesBody, request: Request) -> Response:
    """Answer an input. Nothing is stored, so there is no previous_response_id."""
    params = service_of(request).params(body, body.max_output_tokens)
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [{**item, "type": None} for item in (await read_again(request)).messages]
    return await _Response(request, body).converse(body, messages, params, Tools())


class _Response(Conversation):
    """Every event has its number; all but those of the whole response name the one item and its one part."""

    prefix, kind, is_named = "resp", "response", True

    def __init__(self, request: Request, body: Sampling) -> None:
        super().__init__(request, body)
        self._said, self._status, self._number = "", "in_progress", 0
        item_id = self.id.replace("resp", "msg")
        self._place = {"item_id": item_id, "output_index": 0, "content_index": 0}

    def events(self, piece: Piece) -> Iterator[Event]:
        if not self._number:
            yield self._event("created", response=self._response())
            yield self._event("in_progress", response=self._response())
            yield self._event("output_item.added", output_index=0, item=self._item())
            yield self._event("content_part.added", **self._place, part=_part(""))
        if text := self._read(piece):
            yield self._event("output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self) -> Iterator[Event]:
        yield self._event("output_text.done", **self._place, text=self._said, logprobs=[])
        yield self._event("content_part.done", **self._place, part=_part(self._said))
        yield self._event("output_item.done", output_index=0, item=self._item())
        yield self._event(self._status, response=self._response())

    def whole(self, pieces: Sequence[Piece]) -> Event:
        self._read(pieces[0])
        return self._response()

    def _read(self, piece: Piece) -> str:
        deltas, reason = self.read(piece)
        text = "".join(delta.text for delta in deltas if delta.kind == "content")
        self._said += text
        if reason is not None:
            self._status = "incomplete" if reason == "length" else "completed"
        return text

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _item(self) -> Event:
        parts = [_part(self._said)] if self._status != "in_progress" else []
        identity = {"id": self._place["item_id"], "type": "message", "role": "assistant"}
        return {**identity, "status": self._status, "content": parts}

    def _response(self) -> Event:
        record, is_ended = self.record, self._status != "in_progress"
        usage = {
            "input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": record.new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": record.prompt_tokens + record.new_tokens,
        }
        fixed: Event = {"error": None, "parallel_tool_calls": False, "tool_choice": "none", "tools": []}
        return {
            **fixed,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": self._status,
            "output": [self._item()] if is_ended else [],
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "usage": usage if is_ended else None,
        }


def _part(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
