"""/v1/messages in Anthropic's form: text, reasoning and tool calls as blocks, whole or as events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from paged.executors.requests.sampling_params import SamplingParams
from paged.serving.formats.answer_text import Delta
from paged.serving.http.answers import Event
from paged.serving.http.chat import (
    NO_CHOICE,
    Conversation,
    Tools,
    as_content,
    as_function,
    as_template,
    listed_tools,
    text_of,
)
from paged.serving.http.errors import ApiError, reply
from paged.serving.http.messages_schemas import (
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    MessagesChoice,
    MessagesMessage,
    MessagesPrompt,
    Thinking,
    ToolResult,
    ToolUse,
)
from paged.serving.http.schemas import Text
from paged.serving.http.service import Piece, service_of
from paged.serving.text.replay import call_arguments
from paged.serving.text.template_wishes import TemplateWishes

_CHOICES: dict[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
# Type and field of the events of each kind of delta.
_PIECES = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}
# Block that the first delta of each kind begins.
_BLOCKS = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}


async def answer_messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    params = service_of(request).params(body, body.max_tokens, stop=body.stop_sequences)
    messages, tools = _prompt_of(body)
    has_tools = bool(tools.functions) and tools.choice != "none"
    wishes = service_of(request).tongue.wishes(has_tools=has_tools)
    variables = _variables(body, messages, wishes)
    return await _Message(request, body, params).converse(body, messages, params, tools, variables)


async def count_tokens(body: CountTokensBody, request: Request) -> Response:
    """Answer with the number of prompt tokens of a conversation."""
    service = service_of(request)
    await service.adapter(body.model)
    messages, tools = _prompt_of(body)
    functions = () if tools.choice == "none" else tools.functions
    wishes = service.tongue.wishes(has_tools=bool(functions))
    variables = {"tools": listed_tools(functions), **_variables(body, messages, wishes)}
    size = len(await request.body())
    prompt, _ = await service.encode_chat(messages, variables, size, longest=service.longest_text)
    return reply({"input_tokens": len(prompt)})


def _prompt_of(body: MessagesPrompt) -> tuple[list[dict[str, Any]], Tools]:
    """Return the messages in the form of templates, and the tools."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": as_content(body.system, _image_url)})
    for message in body.messages:
        messages += _as_chat(message)
    functions = [as_function(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()]
    messages = as_template(messages)
    if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # an empty last message: the answer begins there
    return messages, _chosen(functions, body.tool_choice)


def _chosen(functions: list[dict[str, Any]], choice: MessagesChoice | None) -> Tools:
    if choice is None:
        return Tools(functions)
    if choice.type not in NO_CHOICE and not functions:
        raise ApiError(400, "tool_choice: only with tools", "tool_choice")
    if (choice.name is None) == (choice.type == "tool"):
        raise ApiError(400, "tool_choice.name: expected with the type tool, and no other", "tool_choice.name")
    is_one = bool(choice.disable_parallel_tool_use) or choice.name is not None
    return Tools(functions, _CHOICES[choice.type], choice.name, is_one)


def _variables(body: MessagesPrompt, messages: list[dict[str, Any]], wishes: TemplateWishes) -> dict[str, Any]:
    """Return a request's variables for the chat template, besides messages and tools."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables |= wishes.thinking(body.thinking.is_on, body.thinking.budget, "thinking")
    if body.output_config is not None:
        variables |= wishes.output_effort(body.output_config.effort, "output_config.effort")
    is_continued = _is_continued(messages)
    if is_continued and body.output_config is not None and body.output_config.format is not None:
        message = "output_config.format: not beside a last message of the assistant, which an answer goes on with"
        raise ApiError(400, message, "output_config.format")
    return variables | {"continue_final_message": is_continued}


def _is_continued(messages: list[dict[str, Any]]) -> bool:
    """Return whether the answer continues the last message, because it is the assistant's.

    Raises:
        ApiError: the last message ends with white space or has no text.
    """
    if messages[-1]["role"] != "assistant":
        return False
    text = text_of(messages[-1]["content"])
    if text != text.rstrip():
        raise ApiError(400, "messages: the last one, of the assistant, ends with white space", "messages")
    if not text and not messages[-1].get("tool_calls"):
        raise ApiError(400, "messages: the last one, of the assistant, has no text to go on with", "messages")
    return True


def _as_chat(message: MessagesMessage) -> list[dict[str, Any]]:
    """Convert a message to chat completions, where each tool result is a separate message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    messages: list[dict[str, Any]] = []  # tool results first, then the rest of the message
    calls: list[dict[str, Any]] = []
    shown: list[Text | ImageBlock] = []
    thoughts: list[str] = []
    for block in message.content:
        if isinstance(block, (Text, ImageBlock)):
            shown.append(block)
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolResult):
            messages.append(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": as_content(block.content, _image_url)}
            )
    if shown or calls or thoughts or not messages:
        messages.append({"role": message.role, "content": as_content(shown, _image_url)})
    if thoughts:
        messages[-1]["reasoning"] = "".join(thoughts)
    if calls:
        messages[-1]["tool_calls"] = calls
    return messages


def _image_url(block: Text | ImageBlock) -> str | None:
    """Return the URL of an image block, None for any other block."""
    if isinstance(block, ImageBlock):
        return block.source.url
    return None


class _Message(Conversation):
    prefix, kind, is_named = "msg", "message", True

    def __init__(self, request: Request, body: MessagesBody, params: SamplingParams) -> None:
        super().__init__(request, body)
        self._params = params
        self._omits_thinking = getattr(body.thinking, "display", None) == "omitted"
        self._index, self._kind = -1, ""  # index and kind of the open block
        self._ended: Event = {}

    def events(self, piece: Piece) -> Iterator[Event]:
        if not self._readers:
            self.log.cached_tokens = piece.output.num_cached_tokens
            yield {"type": "message_start", "message": self._message([])}
        for delta in self._read(piece):
            if delta.kind == "call" or delta.kind not in (self._kind, "arguments"):
                yield from self._close()
                self._index, self._kind = self._index + 1, delta.kind
                yield {"type": "content_block_start", "index": self._index, "content_block": _block(delta)}
            if delta.kind != "call":
                kind, field = _PIECES[delta.kind]
                yield {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, field: delta.text}}

    def end(self) -> Iterator[Event]:
        yield from self._close()
        yield {"type": "message_delta", "delta": self._ended, "usage": self._usage()}
        yield {"type": "message_stop"}

    def whole(self, pieces: Sequence[Piece]) -> Event:
        blocks: list[Event] = []
        for delta in self._read(pieces[0]):
            if delta.kind == "arguments":
                field = "input"
            else:
                _, field = _PIECES.get(delta.kind, ("", ""))
            if not blocks or field not in blocks[-1]:
                block = _block(delta)
                if delta.kind == "call":
                    block["input"] = ""  # a text, parsed when it is complete
                blocks.append(block)
            if field:
                blocks[-1][field] += delta.text
        for block in blocks:
            if "input" in block:
                block["input"] = call_arguments(block["input"])
        return self._message(blocks) | self._ended

    def _read(self, piece: Piece) -> list[Delta]:
        deltas, reason = self.read(piece)
        if self._omits_thinking:
            deltas = [delta._replace(text="") if delta.kind == "reasoning" else delta for delta in deltas]
        stop = self.service.stop_string(self._params, piece.part.stop_reason)
        if stop is not None:
            self._ended = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        else:
            self._ended = {"stop_reason": _REASONS.get(reason or "", "end_turn"), "stop_sequence": None}
        return deltas

    def _close(self) -> Iterator[Event]:
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}

    def _message(self, content: list[Event]) -> Event:
        fields = {"type": "message", "role": "assistant", "model": self.model, "content": content}
        return {"id": self.id, **fields, "stop_reason": None, "stop_sequence": None, "usage": self._usage()}

    def _usage(self) -> Event:
        cached = self.log.cached_tokens
        return {
            "input_tokens": self.log.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.log.new_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning},
        }


def _block(delta: Delta) -> Event:
    """Return the empty block that starts with a delta."""
    if delta.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": delta.text, "input": {}}
    return dict(_BLOCKS[delta.kind])
