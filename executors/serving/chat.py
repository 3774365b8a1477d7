"""/v1/chat/completions, and the conversation that /v1/responses and /v1/messages hold as well."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.requests.output import CompletionOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.serving.answer_reader import AnswerReader, Delta
from paged.executors.serving.answers import Event, Form, finite
from paged.executors.serving.errors import ApiError
from paged.executors.serving.schemas import ChatBody, ImagePart, Message, Part, Sampling
from paged.executors.serving.service import Piece, service_of
from paged.executors.serving.tool_formats import TOOL_FORMATS, ToolFormat

_TAIL = 8  # tokens that "<think>" and the line around it take at most


class Tools(NamedTuple):
    """Functions as OpenAI has them; choice: "auto", "none", "required" or a name; is_one: one call is all."""

    functions: Sequence[dict[str, Any]] = ()
    choice: str = "auto"
    is_one: bool = False


class Conversation(Form):
    """An answer whose text holds reasoning and calls of tools."""

    _tools: ToolFormat | None = None
    _thinks = False  # whether the prompt ends within reasoning

    def __init__(self, request: Request, body: Sampling) -> None:
        super().__init__(request, body)
        self._readers: dict[int, AnswerReader] = {}

    def read(self, piece: Piece) -> tuple[list[Delta], str | None]:
        """Return the parts of a piece's text, and the finish reason with the last piece of a choice."""
        if (reader := self._readers.get(piece.choice)) is None:
            reader = AnswerReader(self._tools, has_thoughts=self.service.has_thoughts, thinks=self._thinks)
            self._readers[piece.choice] = reader
        reason = piece.part.finish_reason
        deltas = reader.read(piece.part.text, is_last=reason is not None)
        return deltas, "tool_calls" if reason == "stop" and reader.num_calls else reason

    async def converse(
        self,
        body: Sampling,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        tools: Tools,
        variables: dict[str, Any] | None = None,
    ) -> Response:
        """Encode the messages, check the limits, and answer; body: what it says of model, stream and form."""
        service, options = self.service, await self.service.options(body)
        functions, choice, is_one = tools if tools.choice != "none" else Tools()
        listed = [{"type": "function", "function": one} for one in functions] or None
        prompt, embeds = await service.encode_chat(messages, {"tools": listed, **(variables or {})})
        if embeds is not None:
            options["prompt_embeds"] = embeds
        params = service.check_prompts([prompt], params)
        tail = service.tokenizer.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        self._thinks = service.has_thoughts and tail.endswith("<think>")
        if functions:
            self._tools = service.tool_format
        if functions and choice != "auto":
            wanted = [one for one in functions if choice in ("required", one["name"])]
            if not wanted:
                raise ApiError(400, f"tool_choice: {choice!r} is none of the tools", "tool_choice")
            schemas = {one["name"]: one.get("parameters") or {"type": "object"} for one in wanted}
            self._tools = self._tools or TOOL_FORMATS["llama3"]
            grammar = self._tools.grammar(schemas, is_one=is_one, thinks=self._thinks)
            options["token_mask"] = await service.compiled("structural_tag", grammar)
        return await self.answer([prompt], params, options)


def as_template(message: Message) -> dict[str, Any]:
    """Return a message as templates read it: arguments of calls as values; text as one, unless there are images."""
    found = message.model_dump(exclude_none=True)
    found["role"] = "system" if message.role == "developer" else message.role
    parts = message.content
    if isinstance(parts, list) and any(isinstance(part, ImagePart) for part in parts):
        found["content"] = [
            {"type": "image", "url": part.image_url.url}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in parts
        ]
    else:
        found["content"] = text_of(parts)
    for call in found.get("tool_calls", ()):
        given = call["function"].get("arguments")
        try:
            call["function"]["arguments"] = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            raise ApiError(400, "messages: the arguments of a tool call are no JSON", "messages") from None
    return found


def text_of(content: str | Sequence[Part | ImagePart] | None) -> str:
    """Return a message's text, its parts joined, without images."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content or () if isinstance(part, Part))


async def chat(body: ChatBody, request: Request) -> Response:
    """Answer a conversation with n choices."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = service_of(request).params(body, body.max_completion_tokens or body.max_tokens, logprobs=logprobs)
    asked = body.tool_choice or "auto"
    choice = asked if isinstance(asked, str) else asked.function.name
    is_one = body.parallel_tool_calls is False or not isinstance(asked, str)
    tools = Tools([tool.function.model_dump() for tool in body.tools or ()], choice, is_one)
    messages = list(map(as_template, body.messages))
    return await _Chat(request, body).converse(body, messages, params, tools, body.chat_template_kwargs)


class _Chat(Conversation):
    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def events(self, piece: Piece) -> Iterator[Event]:
        entries: list[Event] = [] if piece.choice in self._readers else [{"role": "assistant", "content": ""}]
        deltas, reason = self.read(piece)
        index = self._readers[piece.choice].num_calls - sum(one.kind == "call" for one in deltas) - 1
        for kind, text in deltas:
            index += kind == "call"
            if kind in ("call", "arguments"):
                call = _call(text) if kind == "call" else {"function": {"arguments": text}}
                entries.append({"tool_calls": [{"index": index, **call}]})
            else:
                entries.append({kind: text})
        logprobs = self._logprobs(piece.part)
        if not entries and (reason or logprobs):
            entries = [{}]
        for entry in entries:
            is_last = entry is entries[-1]
            ending = {"logprobs": logprobs if is_last else None, "finish_reason": reason if is_last else None}
            yield self.body(choices=[{"index": piece.choice, "delta": entry, **ending}])

    def whole(self, pieces: Sequence[Piece]) -> Event:
        choices = []
        for piece in pieces:
            deltas, reason = self.read(piece)
            message: Event = {"role": "assistant", "content": ""}
            for kind, text in deltas:
                if kind == "call":
                    message.setdefault("tool_calls", []).append(_call(text))
                elif kind == "arguments":
                    message["tool_calls"][-1]["function"]["arguments"] += text
                else:
                    message[kind] = message.get(kind, "") + text
            message["content"] = message["content"] or (None if "tool_calls" in message else "")
            ending = {"logprobs": self._logprobs(piece.part), "finish_reason": reason}
            choices.append({"index": piece.choice, "message": message, **ending})
        return self.body(choices=choices, usage=self.usage()) | {"object": "chat.completion"}

    def _logprobs(self, part: CompletionOutput) -> Event | None:
        if (rows := part.logprobs) is None:
            return None

        def entry(token: int, value: float) -> dict[str, Any]:
            text = self.service.token_text(token)
            return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}

        content = []
        for token, row in zip(part.token_ids, rows, strict=True):
            content.append(entry(token, row[token]) | {"top_logprobs": [entry(*pair) for pair in row.items()]})
        return {"content": content}


def _call(name: str) -> Event:
    identity = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
    return {**identity, "function": {"name": name, "arguments": ""}}
