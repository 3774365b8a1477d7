"""Bodies of requests, as the server reads them and lists them in /openapi.json.

A body is read in one pass that stops at the first error. Before it, the values in the body are counted, so that no body
takes longer to read than one that means something.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from paged.executors.serving.errors import ApiError
from paged.interop.structured import Kind

_MAX_LISTS = 1 << 15  # lists and objects of a body; 2^20 of them take 2 s, most of it in Python's garbage collector
_MAX_KEYS = 1 << 17
_MAX_DIGITS = 400  # of a number; the largest float has 309, and time grows with the square
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONGEST_MESSAGE = 2000
_PATH = re.compile(r"`\$(\S*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `(.*?)`")

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Tokens = list[Token]
Prompts = str | list[str | Token | Tokens]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
FunctionName = Annotated[str, Meta(pattern=r"^[\w.:/-]+$(?!\n)", max_length=256)]
# The client's arguments, by those of the engine that are made of them.
_OF_PROMPT = {"prompt_token_ids": "prompt", "text": "prompt", "prompt_logprobs": "echo", "lora_adapter": "model"}
_OF_MESSAGES = _OF_PROMPT | dict.fromkeys(("prompt", "prompt_token_ids", "text", "images", "image"), "messages")
_OF_INPUT = _OF_PROMPT | dict.fromkeys(("prompt", "prompts", "prompt_token_ids", "text", "messages"), "input")


class Grammar(NamedTuple):
    """The form that an answer must have, and the argument that asks for it."""

    param: str
    kind: Kind
    text: Any


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Unknown arguments are errors: one that is misspelt would otherwise be silently without effect.

    Attributes:
        max_values: most JSON values of such a body.
        names: the client's arguments that have another name in the engine, by that name.
    """

    max_values: ClassVar[int] = 1 << 20
    names: ClassVar[Mapping[str, str]] = _OF_PROMPT


B = TypeVar("B", bound=Body)


class Text(Struct, tag="text"):
    """Part of a message's content."""

    text: str


class InputText(Text, tag="input_text"):
    pass


class OutputText(Text, tag="output_text"):
    pass


class ImageUrl(Struct):
    url: str


class Image(Struct, tag="image_url"):
    image_url: ImageUrl


class Function(Struct):
    name: FunctionName


class Tool(Body):
    type: Literal["function"]
    function: Function


class ToolCall(Struct):
    function: Function


class Message(Struct, kw_only=True):
    """Other entries go to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text | InputText | OutputText | Image] | None = None
    tool_calls: list[ToolCall] | None = None


class JsonSchema(Struct):
    schema: dict[str, Any]


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Body):
    """Arguments that all text endpoints share, with the meaning of `SamplingParams`; the second part has no effect."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def grammar(self) -> Grammar | None:
        """Return the form that the answer must have, or None."""
        return None


class OpenAiSampling(Sampling):
    """structured_outputs: vLLM's, one of json, regex, choice, grammar and structural_tag."""

    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=256)] | None = None
    stop_token_ids: Tokens | None = None
    allowed_token_ids: Annotated[Tokens, Meta(max_length=1 << 18)] | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=4096)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[dict[Kind, Any], Meta(min_length=1, max_length=1)] | None = None

    def grammar(self) -> Grammar | None:
        form, schema = self.response_format, None
        if form is not None:
            inner = None if form.json_schema is None else form.json_schema.schema
            schema = _schema("response_format", form.type, inner)
        if self.structured_outputs is None:
            return schema
        if schema is not None:
            raise ApiError(400, "response_format: not beside structured_outputs", "response_format")
        return Grammar("structured_outputs", *next(iter(self.structured_outputs.items())))


class CompletionBody(OpenAiSampling, kw_only=True):
    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: None = None


class EmbeddingsBody(Body, kw_only=True):
    names = _OF_INPUT

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    user: str | None = None


class ConversationBody(Sampling):
    """What a chat template reads of a body is copied several times, so there may be less of it."""

    max_values = 1 << 17
    names = _OF_MESSAGES


class ChatBody(ConversationBody, OpenAiSampling, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ReasoningText(Struct, tag="reasoning_text"):
    text: str


class ResponsesItem(Struct, kw_only=True):
    """A message, a call of a function, its result, or reasoning; each reads its own entries."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant", "tool"] | None = None
    content: str | list[Text | InputText | OutputText | Image | ReasoningText] | None = None
    name: FunctionName | None = None
    arguments: str = ""
    call_id: str = ""
    output: str | list[InputText] = ""


class ResponsesTool(Function):
    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesChoice(Body):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None


class ResponsesText(Body):
    format: TextFormat | None = None


class ResponsesBody(ConversationBody, kw_only=True):
    """text.format: as a chat's response_format, with the entries of json_schema beside the type."""

    names = {**_OF_INPUT, "max_tokens": "max_output_tokens"}

    input: str | Annotated[list[ResponsesItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: ResponsesText | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None

    def grammar(self) -> Grammar | None:
        if self.text is None or self.text.format is None:
            return None
        return _schema("text.format", self.text.format.type, self.text.format.schema)


class ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class Base64Source(Struct, tag="base64"):
    media_type: str
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(ImageUrl, tag="url"):
    pass


class ImageBlock(Struct, tag="image"):
    source: Base64Source | UrlSource


class ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | ImageBlock] | None = None


class Thinking(Struct, tag="thinking"):
    thinking: str


class RedactedThinking(Struct, tag="redacted_thinking"):
    """Another server's reasoning, which nothing here can read."""


class MessagesMessage(Body):
    role: Literal["user", "assistant"]
    content: str | list[Text | ImageBlock | ToolUse | ToolResult | Thinking | RedactedThinking]


class MessagesTool(Function):
    input_schema: dict[str, Any]
    description: str | None = None


class MessagesChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesBody(ConversationBody, kw_only=True):
    names = {**_OF_MESSAGES, "stop": "stop_sequences"}

    messages: Annotated[list[MessagesMessage], Meta(min_length=1)]
    max_tokens: Count
    system: str | list[Text] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=256)] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesChoice | None = None


class CountTokensBody(Body, kw_only=True):
    """The part of a MessagesBody that becomes the prompt."""

    max_values = ConversationBody.max_values
    names = _OF_MESSAGES

    messages: Annotated[list[MessagesMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Text] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesChoice | None = None


class TokenizeBody(Body):
    """vLLM's. add_special_tokens: a prompt always has them, and messages those that the template writes."""

    max_values = ConversationBody.max_values

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    names = {"token_ids": "tokens", "prompt": "tokens"}

    model: str | None = None
    tokens: Tokens


class AdapterBody(Body):
    """vLLM's. load_inplace: an adapter of this name is replaced."""

    lora_name: Name
    lora_path: str | None = None
    load_inplace: bool = False


class Untyped(Struct):
    """What chat templates read of a body, with the entries that the types above do not name."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    input: Any = None


def read_body(kind: type[B], body: bytes) -> B:
    """Return a body as `kind`.

    Raises:
        ApiError: it is not, or it would take too long to read.
    """
    if (excess := excess_of(body, kind.max_values)) is not None:
        param = None
        with suppress(msgspec.DecodeError, RecursionError):
            values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            param = max(values, key=lambda name: len(bytes(values[name])))
        raise ApiError(400, f"{param or 'the body'}: {excess}", param)
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise ApiError(400, "the body: nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _as_api_error(str(error)) from None


def excess_of(text: bytes, max_values: int) -> str | None:
    """Return what makes JSON take too long to read, or None; in 8 ms a MB."""
    if len(text) < _MAX_LISTS:  # has no room for it
        return None
    plain = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = ~np.logical_xor.accumulate(plain == ord('"'))
    outside = (plain * is_outside).tobytes()  # without texts
    num_lists = outside.count(b"[") + outside.count(b"{")
    num_values, num_keys = num_lists + outside.count(b","), outside.count(b":")
    if num_values > max_values or num_lists > _MAX_LISTS or num_keys > _MAX_KEYS:
        counts = f"{num_values} values, {num_lists} lists and objects, {num_keys} keys"
        return f"{counts}, expected at most {max_values}, {_MAX_LISTS} and {_MAX_KEYS}"
    if b"0" * _MAX_DIGITS in outside.translate(_AS_ZEROS):
        return f"a number of more than {_MAX_DIGITS} digits"
    return None


def _as_api_error(message: str) -> ApiError:
    """Return msgspec's message with the argument that it is about."""
    if len(message) > _LONGEST_MESSAGE:  # it quotes the client
        message = message[: _LONGEST_MESSAGE // 2] + message[-_LONGEST_MESSAGE // 2 :]
    path = _PATH.search(message)
    place = path[1] if path else ""
    reason = message.partition(" - at ")[0]
    unknown, missing = _UNKNOWN.search(message), _MISSING.search(message)
    if unknown is not None:
        place += f".{unknown[1]}"
    elif missing is not None:
        place += f".{missing[1]}"
        reason = "Field required"
    elif reason.startswith("Invalid value "):
        reason = reason.removeprefix("Invalid value ") + " does not match any of the expected tags"
    param = re.sub(r"\[(\w+)\]", r".\1", place.replace("[...]", "")).lstrip(".")
    return ApiError(400, f"{param or 'the body'}: {reason}", param or None)


def _schema(param: str, kind: str, schema: dict[str, Any] | None) -> Grammar | None:
    """Return the grammar of a `response_format` of OpenAI's."""
    if (schema is not None) != (kind == "json_schema"):
        raise ApiError(400, f"{param}: a schema belongs to the type json_schema, and to no other", param)
    if kind == "text":
        return None
    if schema is None:
        schema = {"type": "object"}
    return Grammar(param, "json", schema)
