"""/v1/chat/completions, and the conversation that /v1/responses and /v1/messages begin as well."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.requests.output import CompletionOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.executors.serving.answer_reader import AnswerReader, Delta
from paged.executors.serving.answers import Event, Head, finite, respond, usage
from paged.executors.serving.errors import ApiError
from paged.executors.serving.schemas import ChatBody, ImagePart, Message, Part, Sampling
from paged.executors.serving.service import Piece, Service, service_of
from paged.executors.serving.tool_formats import TOOL_FORMATS, ToolFormat

_TAIL = 8  # tokens that "<think>" and the line around it take at most


@dataclass
class Conversation:
    """An encoded conversation, and what runs it. thinks: whether the prompt ends within reasoning."""

    service: Service
    request: Request
    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]
    tools: ToolFormat | None
    thinks: bool

    @classmethod
    async def begin(
        cls,
        request: Request,
        body: Sampling,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        tools: Tools | None = None,
        variables: dict[str, Any] | None = None,
    ) -> Conversation:
        """Render and encode the messages, and check the limits; body: what it says of model, stream and form."""
        service = service_of(request)
        options = await service.options(body)
        listed = [{"type": "function", "function": one} for one in tools.functions] if tools else None
        named: dict[str, Any] = {"tools": listed, **(variables or {})}
        prompt, embeds = await service.encode_chat(messages, named)
        if embeds is not None:
            options |= {"prompt_embeds": embeds}
        params = service.check_prompts([prompt], params)
        tail = service.tokenizer.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        thinks, form = service.has_thoughts and tail.endswith("<think>"), service.tool_format if tools else None
        if tools and (called := tools.forced()):
            form = form or TOOL_FORMATS["llama3"]
            grammar = form.grammar(called, is_one=tools.is_one, thinks=thinks)
            options |= {"token_mask": await service.compiled("structural_tag", grammar)}
        return cls(service, request, prompt, params, options, form, thinks)

    async def deltas(self) -> AsyncGenerator[tuple[Piece, list[Delta], str | None], None]:
        """Yield pieces with the parts of their texts, and the finish reason with the last piece of a choice."""
        options = {"has_thoughts": self.service.has_thoughts, "thinks": self.thinks}
        readers: defaultdict[int, AnswerReader] = defaultdict(lambda: AnswerReader(self.tools, **options))
        async with aclosing(self.service.pieces(self.request, [self.prompt], self.params, **self.options)) as pieces:
            async for piece in pieces:
                reader, reason = readers[piece.choice], piece.part.finish_reason
                deltas = reader.read(piece.part.text, is_last=reason is not None)
                yield piece, deltas, "tool_calls" if reason == "stop" and reader.num_calls else reason


@dataclass
class Tools:
    """Tools of a request.

    Attributes:
        functions: name, description and parameters of each, as OpenAI has them.
        choice: "auto", "none", "required" or the name of a function.
        is_one: whether one call is all that is wanted.
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    is_one: bool = False

    def __bool__(self) -> bool:
        return bool(self.functions) and self.choice != "none"

    def forced(self) -> dict[str, Any]:
        """Return the parameters' schemas of the functions one of which must be called; none if text will do, too."""
        if self.choice in ("auto", "none"):
            return {}
        wanted = [one for one in self.functions if self.choice in ("required", one["name"])]
        if not wanted:
            raise ApiError(400, f"tool_choice: {self.choice!r} is none of the tools", "tool_choice")
        return {one["name"]: one.get("parameters") or {"type": "object"} for one in wanted}


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
    service = service_of(request)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = service.params(body, body.max_completion_tokens or body.max_tokens, logprobs=logprobs)
    messages = [as_template(message) for message in body.messages]
    asked = body.tool_choice or "auto"
    choice = asked if isinstance(asked, str) else asked.function.name
    is_one = body.parallel_tool_calls is False or not isinstance(asked, str)
    tools = Tools([tool.function.model_dump() for tool in body.tools or ()], choice, is_one)
    run = await Conversation.begin(request, body, messages, params, tools, body.chat_template_kwargs)
    head = Head(request, body, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
    return await respond(head, _events(head, run), _as_message)


async def _events(head: Head, run: Conversation) -> AsyncGenerator[Event, None]:
    num_calls: dict[int, int] = {}
    async with aclosing(run.deltas()) as parts:
        async for piece, deltas, reason in parts:
            entries: list[dict[str, Any]] = []
            if piece.choice not in num_calls:
                num_calls[piece.choice] = 0
                entries.append({"role": "assistant", "content": ""})
            for kind, text in deltas:
                call: dict[str, Any] = {"index": num_calls[piece.choice] - 1, "function": {"arguments": text}}
                if kind == "call":
                    num_calls[piece.choice] += 1
                    identity = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
                    call = {"index": call["index"] + 1, **identity, "function": {"name": text, "arguments": ""}}
                entries.append({"tool_calls": [call]} if kind in ("call", "arguments") else {kind: text})
            logprobs = None if piece.part.logprobs is None else _logprobs(run.service, piece.part)
            entries = entries or ([{}] if reason or logprobs else [])
            for number, entry in enumerate(entries):
                is_last = number == len(entries) - 1
                choice = {"index": piece.choice, "delta": entry, "logprobs": logprobs if is_last else None}
                yield head.body(choices=[choice | {"finish_reason": reason if is_last else None}])
    yield head.body(choices=[], usage=usage(head.record))


def _as_message(choice: Event) -> Event:
    """Return a joined choice as OpenAI has it without a stream."""
    message = choice.pop("delta")
    for call in message.get("tool_calls", ()):
        del call["index"]
    message["content"] = message["content"] or (None if "tool_calls" in message else "")
    return {"index": choice["index"], "message": message, **choice}


def _logprobs(service: Service, part: CompletionOutput) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text = service.token_text(token)
        return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}

    content = []
    for token, row in zip(part.token_ids, part.logprobs or (), strict=True):
        top = [entry(*pair) for pair in row.items()]
        content.append(entry(token, row[token]) | {"top_logprobs": top})
    return {"content": content}
