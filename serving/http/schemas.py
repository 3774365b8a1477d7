"""Request bodies, as the server reads them and lists them in /openapi.json; Anthropic's are in messages_schemas.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Meta, Struct

from paged.cache.retention import Retention
from paged.serving.grammar.structured import Kind
from paged.serving.http.bodies import OF_PROMPT, Body, Null, only
from paged.serving.http.errors import ApiError

# Seconds by the names that OpenAI and Anthropic give to times of prompt caching.
_SECONDS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Tokens = list[Token]
Prompts = str | list[str | Token | Tokens]
Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
FunctionName = Annotated[str, Meta(pattern=r"^[\w.:/-]+$(?!\n)", max_length=256)]
_OF_MESSAGES = OF_PROMPT | dict.fromkeys(("prompt", "prompt_token_ids", "text", "images", "image"), "messages")
_OF_INPUT = OF_PROMPT | dict.fromkeys(("prompt", "prompts", "prompt_token_ids", "text", "messages"), "input")


class Grammar(NamedTuple):
    """Required form of an answer. param: the argument that requests it."""

    param: str
    kind: Kind
    text: Any


class CacheControl(Body):
    """Anthropic's mark for prompts that stay cached for a time, 5 minutes by default. scope: without effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None

    @property
    def time(self) -> str:
        """Name of the time."""
        return self.ttl or "5m"


class CacheOptions(Body):
    """OpenAI's options of prompt caching. ttl: how long the prompt stays cached at least."""

    ttl: Literal["30m", "12h"] | None = None

    comparison_response_id: Null = None
    mode: Annotated[Any, only("implicit")] = None
    prewarm: Annotated[Any, only(False)] = None


class CacheMarked(Struct, kw_only=True):
    """Part of a prompt that may have a mark of Anthropic's prompt caching."""

    cache_control: CacheControl | None = None

    def times(self) -> list[str]:
        """Return the names of the times of the part's marks."""
        if self.cache_control is None:
            return []
        return [self.cache_control.time]


class Text(CacheMarked, tag="text"):
    """Text part of a message's content."""

    text: str


class InputText(Text, tag="input_text"):
    pass


class OutputText(Text, tag="output_text"):
    pass


class ImageUrl(Struct):
    url: str


class Image(CacheMarked, tag="image_url"):
    image_url: ImageUrl


class Function(Struct):
    name: FunctionName


class Tool(Body):
    type: Literal["function"]
    function: Function


class ToolCall(Struct):
    function: Function


class Message(Struct, kw_only=True):
    """Message of a conversation. Other entries are passed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text | InputText | OutputText | Image] | None = None
    tool_calls: list[ToolCall] | None = None


class JsonSchema(Struct):
    schema: dict[str, Any]


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Body):
    """Arguments of all text endpoints, as in `SamplingParams`. The fields of the second part have no effect."""

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

    @property
    def retention(self) -> Retention | None:
        """Return how long the prompt stays cached; None for as long as the cache has memory."""
        return None

    def grammar(self) -> Grammar | None:
        """Return the required form of the answer, or None."""
        return None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None
    continuous_usage_stats: Annotated[Any, only(False)] = None


class OpenAiSampling(Sampling):
    """OpenAI's sampling arguments. structured_outputs: vLLM's: json, regex, choice, grammar or structural_tag."""

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
    stream_options: StreamOptions | None = None
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
    suffix: Annotated[Any, only("")] = None


class EmbeddingsBody(Body, kw_only=True):
    names: ClassVar[Mapping[str, str]] = _OF_INPUT

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Null = None
    user: str | None = None


class ConversationBody(Sampling):
    """Body with a conversation. Its limit is lower, because parts for the chat template are copied several times."""

    max_values = 1 << 17
    names: ClassVar[Mapping[str, str]] = _OF_MESSAGES


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
# OpenAI's retention policies. Its SDK 2.x writes "in-memory".
Retained = Literal["in_memory", "in-memory", "24h"]


class ChatBody(ConversationBody, OpenAiSampling, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retained | None = None

    audio: Null = None
    function_call: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    modalities: Annotated[Any, only(["text"])] = None
    moderation: Null = None
    prediction: Null = None
    web_search_options: Null = None

    @property
    def retention(self) -> Retention | None:
        contents = [message.content for message in self.messages]
        return _openai_retention(self.prompt_cache_retention, self.prompt_cache_options, contents)


class ReasoningText(Struct, tag="reasoning_text"):
    text: str


class InputImage(CacheMarked, tag="input_image"):
    image_url: str


class ResponsesItem(Struct, kw_only=True):
    """A message, function call, function result or reasoning item; each type uses its own entries."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant", "tool"] | None = None
    content: str | list[Text | InputText | OutputText | Image | InputImage | ReasoningText] | None = None
    name: FunctionName | None = None
    arguments: str = ""
    call_id: str = ""
    output: str | list[Text | InputText | OutputText | InputImage] = ""
    encrypted_content: str | None = None


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
    verbosity: Verbosity | None = None


class ResponsesReasoning(Body):
    """Reasoning options. Answers contain the text of reasoning, not a summary."""

    effort: Effort | None = None
    context: Annotated[Any, only("auto")] = None
    generate_summary: Annotated[Any, only("auto")] = None
    mode: Annotated[Any, only("standard")] = None
    summary: Annotated[Any, only("auto")] = None


class ResponsesBody(ConversationBody, kw_only=True):
    """Body of /v1/responses.

    text.format: like response_format of a chat, but the entries of json_schema are next to the type.
    client_metadata: sent by Codex, without effect.
    """

    names: ClassVar[Mapping[str, str]] = {**_OF_INPUT, "max_tokens": "max_output_tokens"}

    input: str | Annotated[list[ResponsesItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: ResponsesText | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponsesReasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Retained | None = None

    access_programs: Null = None
    background: Annotated[Any, only(False)] = None
    background_options: Null = None
    context_management: Annotated[Any, only([])] = None
    conversation: Null = None
    image: Null = None
    max_tool_calls: Null = None
    moderation: Null = None
    previous_response_id: Null = None
    prompt: Null = None
    stream_options: Annotated[Any, only({}, {"include_obfuscation": False})] = None
    top_logprobs: Annotated[Any, only(0)] = None
    truncation: Annotated[Any, only("disabled")] = None

    def grammar(self) -> Grammar | None:
        if self.text is None or self.text.format is None:
            return None
        return _schema("text.format", self.text.format.type, self.text.format.schema)

    @property
    def retention(self) -> Retention | None:
        contents: list[Any] = []
        if isinstance(self.input, list):
            for item in self.input:
                contents += [item.content, item.output]
        return _openai_retention(self.prompt_cache_retention, self.prompt_cache_options, contents)


class TokenizeBody(Body):
    """vLLM's body. add_special_tokens: must not be false for a prompt; messages get the template's tokens."""

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
    names: ClassVar[Mapping[str, str]] = {"token_ids": "tokens", "prompt": "tokens"}

    model: str | None = None
    tokens: Tokens


class AdapterBody(Body):
    """vLLM's body. load_inplace: whether to replace an adapter of this name."""

    lora_name: Name
    lora_path: str | None = None
    load_inplace: bool = False


class Untyped(Struct):
    """Parts of a body for chat templates, with entries that the types above do not name."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    input: Any = None


def retention_of(contents: Iterable[Any], times: Iterable[str] = ()) -> Retention | None:
    """Return the retention of the longest of `times` and the times of marks in contents; None without times."""
    names = [*times, *marked_times(contents)]
    if not names:
        return None
    return Retention(ttl_s=max(_SECONDS[name] for name in names))


def marked_times(contents: Iterable[Any]) -> list[str]:
    """Return the names of the times that marks on parts of contents have. A content without parts is a text or None."""
    names = []
    for content in contents:
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, CacheMarked):
                names += part.times()
    return names


def _openai_retention(policy: str | None, options: CacheOptions | None, contents: Iterable[Any]) -> Retention | None:
    """Return the retention of the longest time that OpenAI's fields and marks in contents name; None without one."""
    times = []
    if policy == "24h":
        times.append(policy)
    if options is not None and options.ttl is not None:
        times.append(options.ttl)
    return retention_of(contents, times)


def _schema(param: str, kind: str, schema: dict[str, Any] | None) -> Grammar | None:
    """Return the grammar of an OpenAI `response_format`."""
    if (schema is not None) != (kind == "json_schema"):
        raise ApiError(400, f"{param}: a schema belongs to the type json_schema, and to no other", param)
    if kind == "text":
        return None
    if schema is None:
        schema = {"type": "object"}
    return Grammar(param, "json", schema)
