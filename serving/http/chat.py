"""/v1/chat/completions, and the conversation logic shared with /v1/responses and /v1/messages."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paged.executors.requests.sampling_params import SamplingParams
from paged.serving.formats.answer_reader import AnswerReader
from paged.serving.formats.answer_text import Delta
from paged.serving.formats.tool_formats import TOOL_FORMATS, ToolFormat
from paged.serving.http.answers import Event, Form, finite
from paged.serving.http.bodies import excess_of
from paged.serving.http.errors import ApiError, dumps
from paged.serving.http.schemas import ChatBody, Grammar, Sampling, TokenizeBody, Tool, Untyped
from paged.serving.http.service import Piece, service_of
from paged.serving.text.replay import call_arguments
from paged.serving.text.token_texts import TokenReader, TokenRow

NO_CHOICE = (None, "none", "auto")
"""Values of tool_choice that do not require a call."""
_OWN_VARIABLES = {"messages", "tools", "longest", "parse_special", "expand", "continue_final_message"}
_TAIL = 16  # upper bound for the tokens of the marker before reasoning and the line around it


class Tools(NamedTuple):
    """Tools of a request.

    Attributes:
        functions: functions in OpenAI's form.
        choice: whether the answer may, must or must not call a function.
        name: the function that the answer must call; None for any.
        is_one: whether the answer ends with its first call.
    """

    functions: Sequence[dict[str, Any]] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    is_one: bool = False


class Conversation(Form):
    """Answer whose text may contain reasoning and tool calls."""

    _tools: ToolFormat | None = None
    _parameters: Mapping[str, Any] | None = None  # JSON schemas of the tools by name
    _thinks = False  # whether the prompt ends within reasoning
    _is_one = False  # whether the answer ends with its first call
    _begun = ""  # text of the last message, if the answer continues it

    def __init__(self, request: Request, body: Sampling) -> None:
        super().__init__(request, body)
        self._readers: dict[int, AnswerReader] = {}

    def read(self, piece: Piece) -> tuple[list[Delta], str | None]:
        """Return the parts of a piece's text, and the finish reason if it is the last piece of a choice."""
        reader = self._readers.get(piece.choice)
        if reader is None:
            reader = self._readers[piece.choice] = self._reader()
        part, reason = piece.part, piece.part.finish_reason
        texts = part.growth.texts[part.begin.texts : part.mark.texts]
        deltas = reader.read(*texts, is_last=reason is not None)
        if reason == "stop" and reader.num_calls:
            reason = "tool_calls"
        return deltas, reason

    def _reader(self) -> AnswerReader:
        return AnswerReader(
            self._tools,
            self.service.tongue.reasoning,
            thinks=self._thinks,
            parameters=self._parameters,
            is_one=self._is_one,
            continues=self._begun != "",
        )

    @property
    def num_reasoning(self) -> int:
        """Number of reasoning tokens so far, over all choices."""
        return sum(reader.num_reasoning for reader in self._readers.values())

    def usage(self) -> Event:
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": self.num_reasoning}}

    async def converse(
        self,
        body: Sampling,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        tools: Tools,
        variables: Mapping[str, Any] | None = None,
    ) -> Response:
        """Encode the messages, check the limits and answer. body: gives model, stream and form of the answer."""
        service, options = self.service, await self.service.options(body, self.request)
        variables = variables or {}
        is_continued = bool(variables.get("continue_final_message"))
        if is_continued:
            self._begun = text_of(messages[-1].get("content"))
        functions = () if tools.choice == "none" else tools.functions
        forced = []
        if tools.choice == "required":
            forced = [function for function in functions if tools.name in (None, function["name"])]
        if tools.choice == "required" and not forced:
            raise ApiError(400, f"tool_choice: {tools.name!r} is none of the tools", "tool_choice")
        if forced and "constraint" in options:
            param = options["constraint"]
            raise ApiError(400, f"{param}: not beside a tool_choice that forces a call", param)
        if forced and is_continued:
            message = "tool_choice: forces a call, which cannot go on with the last message"
            raise ApiError(400, message, "tool_choice")
        size = len(await self.request.body())
        template_options = {"tools": listed_tools(functions), **variables}
        prompt, embeds = await service.encode_chat(messages, template_options, size)
        if embeds is not None:
            options["prompt_embeds"] = embeds
        params = service.check_prompts([prompt], params)
        tail = service.tokenizer.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        reasoning = service.tongue.reasoning
        if reasoning is not None and self._begun:
            self._thinks = self._begun.rfind(reasoning.begin.rstrip()) > self._begun.rfind(reasoning.end.lstrip())
        elif reasoning is not None:
            self._thinks = tail.endswith(reasoning.begin.rstrip())
        if functions:
            self._tools = service.tongue.tools
            self._parameters = _schemas(functions)
        if self._tools is not None and any(marker in self._begun for marker in self._tools.begins):
            raise ApiError(400, "messages: the last one begins a call of a tool, expected text to go on", "messages")
        if forced:
            self._tools = self._tools or TOOL_FORMATS["llama3"]
            try:
                tag = self._tools.grammar(
                    _schemas(forced), is_one=tools.is_one, reasoning=reasoning, thinks=self._thinks
                )
            except ValueError as error:
                raise ApiError(400, f"tools: {error}", "tools") from error
            grammar = Grammar("tools", "structural_tag", tag)
            options["token_mask"] = await service.compiled(grammar, self.request)
            options["constraint"] = "tools"
        if tools.is_one and self._tools is not None:
            self._is_one = True
            options["text_end"] = _FirstCall(self._reader)
        return await self.answer([prompt], params, options)


class _FirstCall:
    """`TextEnd` that ends an answer with its first call."""

    def __init__(self, new_reader: Callable[[], AnswerReader]) -> None:
        self._new_reader, self._reader = new_reader, new_reader()

    def read(self, text: str) -> bool:
        self._reader.read(text)
        return self._reader.is_complete

    def fork(self) -> _FirstCall:
        return _FirstCall(self._new_reader)


async def read_again(request: Request) -> Untyped:
    """Return a field of the body for the chat template, as plain JSON values."""
    data = await request.body()

    def read() -> Untyped:
        untyped = msgspec.json.decode(data, type=Untyped)
        messages = untyped.messages
        if not messages and isinstance(untyped.input, list):
            messages = untyped.input
        untyped.messages = as_template(messages)
        return untyped

    return await service_of(request).in_thread(read, len(data))


def as_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages for templates: parse arguments of calls; join texts unless there are images."""
    functions: list[dict[str, Any]] = []
    texts: list[str] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            functions.append(call["function"])
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                texts.append(arguments)
    excess = excess_of(",".join(texts).encode(), ChatBody.max_values)
    if excess is not None:
        raise ApiError(400, f"messages: arguments of calls with {excess}", "messages")
    copies = []
    for original in messages:
        message = {name: value for name, value in original.items() if value is not None}
        copies.append(message)
        if message["role"] == "developer":
            message["role"] = "system"
        parts = message.get("content")
        if isinstance(parts, list) and any(part["type"] == "image_url" for part in parts):
            message["content"] = list(map(_template_part, parts))
        else:
            message["content"] = text_of(parts)
    for function in functions:
        if isinstance(function.get("arguments"), str):
            function["arguments"] = call_arguments(function["arguments"])
    return copies


def _template_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "image_url":
        return {"type": "image", "url": part["image_url"]["url"]}
    return {"type": "text", "text": part["text"]}


def text_of(content: str | Sequence[dict[str, Any]] | None) -> str:
    """Return a message's text, joining its parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def template_variables(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Check and return a body's variables for the chat template."""
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(400, "continue_final_message: not beside add_generation_prompt", "continue_final_message")
    prompt_options: dict[str, Any] = {"continue_final_message": bool(body.continue_final_message)}
    if body.add_generation_prompt is not None:
        prompt_options["add_generation_prompt"] = body.add_generation_prompt
    variables = body.chat_template_kwargs or {}
    if taken := sorted(_OWN_VARIABLES & variables.keys()):
        raise ApiError(400, f"chat_template_kwargs: {', '.join(taken)} cannot be set", "chat_template_kwargs")
    return prompt_options | variables


async def chat(body: ChatBody, request: Request) -> Response:
    """Answer a conversation with n choices."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise ApiError(400, "max_tokens: not beside max_completion_tokens", "max_tokens")
    if body.max_completion_tokens is not None:
        request.state.names = {**body.names, "max_tokens": "max_completion_tokens"}
    for name in ("tool_choice", "parallel_tool_calls"):  # as in OpenAI's API, where [] is allowed
        if getattr(body, name) is not None and body.tools is None:
            raise ApiError(400, f"{name}: only with tools", name)
    if body.tool_choice not in NO_CHOICE and not body.tools:
        raise ApiError(400, "tool_choice: only with tools", "tool_choice")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = service_of(request).params(body, body.max_completion_tokens or body.max_tokens, logprobs=logprobs)
    has_tools = bool(body.tools) and body.tool_choice != "none"
    wishes = service_of(request).tongue.wishes(has_tools=has_tools)
    variables = wishes.effort(body.reasoning_effort, "reasoning_effort")
    variables |= wishes.verbosity(body.verbosity, "verbosity")
    variables |= template_variables(body)
    untyped = await read_again(request)
    functions = [tool["function"] for tool in untyped.tools or ()]
    tools = Tools(functions, is_one=body.parallel_tool_calls is False)
    if isinstance(body.tool_choice, Tool):
        tools = tools._replace(choice="required", name=body.tool_choice.function.name, is_one=True)
    elif body.tool_choice is not None:
        tools = tools._replace(choice=body.tool_choice)
    return await _Chat(request, body).converse(body, untyped.messages, params, tools, variables)


class _Chat(Conversation):
    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def __init__(self, request: Request, body: ChatBody) -> None:
        super().__init__(request, body)
        self._num_top = body.top_logprobs or 0
        self._token_readers: dict[int, TokenReader] = {}

    def events(self, piece: Piece) -> Iterator[Event]:
        entries: list[Event] = []
        if piece.choice not in self._readers:
            entries.append({"role": "assistant", "content": ""})
        deltas, reason = self.read(piece)
        index = self._readers[piece.choice].num_calls - sum(delta.kind == "call" for delta in deltas) - 1
        for kind, text in deltas:
            index += kind == "call"
            if kind == "call":
                entries.append({"tool_calls": [{"index": index, **_call(text)}]})
            elif kind == "arguments":
                entries.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            else:
                entries.append({kind: text})
        logprobs = self._logprobs(piece)
        if not entries and (reason or (logprobs and logprobs["content"])):
            entries = [{}]
        for entry in entries:
            choice = {"index": piece.choice, "delta": entry, "logprobs": None, "finish_reason": None}
            if entry is entries[-1]:
                choice |= {"logprobs": logprobs, "finish_reason": reason}
            yield self.body(choices=[choice])

    def whole(self, pieces: Sequence[Piece]) -> Event:
        choices = []
        for piece in pieces:
            deltas, reason = self.read(piece)
            message: Event = {"role": "assistant", "content": ""}
            calls: list[Event] = []
            for kind, text in deltas:
                if kind == "call":
                    calls.append(_call(text))
                elif kind == "arguments":
                    calls[-1]["function"]["arguments"] += text
                else:
                    message[kind] = message.get(kind, "") + text
            if calls:
                message["tool_calls"] = calls
                message["content"] = message["content"] or None
            ending = {"logprobs": self._logprobs(piece), "finish_reason": reason}
            choices.append({"index": piece.choice, "message": message, **ending})
        return self.body(choices=choices, usage=self.usage()) | {"object": "chat.completion"}

    def _logprobs(self, piece: Piece) -> Event | None:
        if piece.part.growth.logprobs is None:
            return None
        reader = self._token_readers.setdefault(piece.choice, self.service.token_reader())
        entries = [msgspec.Raw(dumps(self._entry(row))) for row in reader.read(piece.part)]
        return {"content": entries}

    def _entry(self, row: TokenRow) -> Event:
        texts, rows = self.service.token_texts, row.logprobs or {}

        def entry(token: int, data: bytes) -> Event:
            text = texts.text(token, is_first=row.is_first)
            return {"token": text, "logprob": finite(rows[token]), "bytes": list(data)}

        best = sorted(rows, key=lambda token: -rows[token])[: self._num_top]  # rows also has the token itself
        top = [entry(token, texts.bytes(token, is_first=row.is_first)) for token in best]
        return entry(row.token, row.bytes) | {"top_logprobs": top}


def as_function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a tool as a function in OpenAI's form."""
    function = {"name": name, "parameters": parameters}
    if description is not None:
        function["description"] = description
    return function


def as_content(
    content: str | Sequence[Struct] | None, url_of: Callable[[Any], str | None]
) -> str | list[dict[str, Any]]:
    """Convert the content of a message, or a tool's output, to the form of chat completions.

    url_of: returns the URL of an image part, None for any other part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in content:
        url = url_of(part)
        if url is None:
            parts.append({"type": "text", "text": getattr(part, "text", "")})
        else:
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts


def listed_tools(functions: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return functions in the form of chat templates, or None without functions."""
    return [{"type": "function", "function": function} for function in functions] or None


def _schemas(functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON schemas of functions by name."""
    schemas = {}
    for function in functions:
        schemas[function["name"]] = function.get("parameters") or {"type": "object"}
    return schemas


def _call(name: str) -> Event:
    identity = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
    return {**identity, "function": {"name": name, "arguments": ""}}
