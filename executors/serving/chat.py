"""/v1/chat/completions, and the conversation that /v1/responses and /v1/messages begin as well."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.serving.answer_reader import AnswerReader, Delta, ToolFormat
from paged.executors.serving.answers import Event, Head, finite, respond, usage
from paged.executors.serving.errors import ApiError
from paged.executors.serving.schemas import ChatBody, Message, Part
from paged.executors.serving.service import Piece, Service

_TAIL = 8  # tokens that "<think>" and the line around it take at most


@dataclass
class Conversation:
    """An encoded conversation, and what runs it."""

    service: Service
    request: Request
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]
    tools: ToolFormat | None

    @classmethod
    async def begin(
        cls,
        service: Service,
        request: Request,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        options: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> Conversation:
        """Render and encode the messages, and check the limits."""
        named = {"tools": tools, **(variables or {})}
        prompt = await service.in_thread(service.tokenizer.encode_chat, messages, **named)
        params = service.check_prompts([prompt], params)
        return cls(service, request, prompt, params, options, service.tool_format if tools else None)

    async def deltas(self) -> AsyncGenerator[tuple[Piece, list[Delta], str | None], None]:
        """Yield pieces with the parts of their texts, and the finish reason with the last piece of a choice."""
        service = self.service
        tail = service.tokenizer.tokenizer.decode(self.prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        thinks = service.has_thoughts and tail.endswith("<think>")
        readers: dict[int, AnswerReader] = {}
        pieces = service.pieces(self.request, [self.prompt], self.params, **self.options)
        async with aclosing(pieces):
            async for piece in pieces:
                reader = readers.get(piece.choice)
                if reader is None:
                    reader = AnswerReader(self.tools, has_thoughts=service.has_thoughts, thinks=thinks)
                    readers[piece.choice] = reader
                reason = piece.finish_reason
                deltas = reader.read(piece.text, is_last=reason is not None)
                yield piece, deltas, "tool_calls" if reason == "stop" and reader.num_calls else reason


def as_template(message: Message) -> dict[str, Any]:
    """Return a message as templates read it: text as one, and the arguments of calls as values."""
    found = message.model_dump(exclude_none=True)
    found["role"] = "system" if message.role == "developer" else message.role
    found["content"] = text_of(message.content)
    for call in found.get("tool_calls", ()):
        given = call["function"].get("arguments")
        try:
            call["function"]["arguments"] = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            raise ApiError(400, "messages: the arguments of a tool call are no JSON", "messages") from None
    return found


def text_of(content: str | list[Part] | None) -> str:
    """Return a message's text, its parts joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Answer a conversation with n choices."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs")
    adapter = await service.adapter(body.model)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = service.params(body, body.max_completion_tokens or body.max_tokens, logprobs=logprobs)
    tools = None if body.tool_choice == "none" or not body.tools else [tool.model_dump() for tool in body.tools]
    messages = [as_template(message) for message in body.messages]
    options, variables = await service.options(body, adapter), body.chat_template_kwargs
    run = await Conversation.begin(service, request, messages, params, options, tools, variables)
    head = Head(service, request, body, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
    return await respond(head, _events(head, run), _whole)


async def _events(head: Head, run: Conversation) -> AsyncGenerator[Event, None]:
    num_calls: dict[int, int] = {}
    async with aclosing(run.deltas()) as parts:
        async for piece, deltas, reason in parts:
            entries: list[dict[str, Any]] = []
            if piece.choice not in num_calls:
                num_calls[piece.choice] = 0
                entries.append({"role": "assistant", "content": ""})
            for delta in deltas:
                if delta.call is None:
                    entries.append({delta.kind: delta.text})
                    continue
                function = {"name": delta.call.name, "arguments": delta.call.arguments}
                call = {"id": delta.call.id, "type": "function", "function": function}
                entries.append({"tool_calls": [{"index": num_calls[piece.choice], **call}]})
                num_calls[piece.choice] += 1
            logprobs = None if piece.logprobs is None else _logprobs(run.service, piece)
            entries = entries or ([{}] if reason or logprobs else [])
            for number, entry in enumerate(entries):
                is_last = number == len(entries) - 1
                choice = {"index": piece.choice, "delta": entry, "logprobs": logprobs if is_last else None}
                yield head.body(choices=[choice | {"finish_reason": reason if is_last else None}])
    yield head.body(choices=[], usage=usage(head.record))


def _whole(events: list[Event]) -> Event:
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            whole = choices.setdefault(
                part["index"], {"index": part["index"], "message": {}, "logprobs": None, "finish_reason": None}
            )
            for name, value in part["delta"].items():
                if name == "tool_calls":
                    value = [{key: one[key] for key in ("id", "type", "function")} for one in value]
                whole["message"][name] = whole["message"][name] + value if name in whole["message"] else value
            if part["logprobs"] is not None:
                whole["logprobs"] = whole["logprobs"] or {"content": []}
                whole["logprobs"]["content"] += part["logprobs"]["content"]
            whole["finish_reason"] = part["finish_reason"]
    for one in choices.values():
        one["message"]["content"] = one["message"]["content"] or (None if "tool_calls" in one["message"] else "")
    return events[-1] | {"choices": [choices[index] for index in sorted(choices)]}


def _logprobs(service: Service, piece: Piece) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text = service.token_text(token)
        return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}

    content = []
    for token, row in zip(piece.token_ids, piece.logprobs or (), strict=True):
        top = [entry(*pair) for pair in row.items()]
        content.append(entry(token, row[token]) | {"top_logprobs": top})
    return {"content": content}
