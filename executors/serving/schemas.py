"""Bodies of requests, as FastAPI checks them and lists them in /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paged.interop.structured import Kind

Tokens = list[Annotated[int, Field(ge=0, lt=1 << 31)]]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
KeyToken = Annotated[int, Field(strict=False)]  # keys of JSON are texts


class Body(BaseModel):
    """Unknown arguments are errors: one that is misspelt would otherwise be silently without effect."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Open(Body):
    model_config = ConfigDict(extra="allow", strict=True)


class Part(Open):
    """Of a message's content; only text is read."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(Open):
    url: str


class ImagePart(Open):
    type: Literal["image_url"]
    image_url: ImageUrl


class Function(Open):
    name: Annotated[str, Field(pattern=r"^[\w.:/-]+$", max_length=256)]


class Tool(Body):
    type: Literal["function"]
    function: Function


class ToolCall(Open):
    function: Function


class Message(Open):
    """Other entries go to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[Part | ImagePart, Field(discriminator="type")]] | None = None
    tool_calls: list[ToolCall] | None = None


class JsonSchema(Open):
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Open):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Body):
    """Arguments that all text endpoints share, with the meaning of `SamplingParams`; the second part has no effect."""

    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    stream: bool | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class OpenAiSampling(Sampling):
    """structured_outputs: vLLM's, one of json, regex, choice, grammar and structural_tag."""

    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Tokens | None = None
    allowed_token_ids: Tokens | None = None
    logit_bias: dict[KeyToken, Number] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[dict[Kind, Any], Field(min_length=1, max_length=1)] | None = None


class CompletionBody(OpenAiSampling):
    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    suffix: None = None


class EmbeddingsBody(Body):
    input: str | Annotated[Tokens | list[str] | list[Tokens], Field(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    user: str | None = None


class ChatBody(OpenAiSampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesItem(Message):
    type: Literal["message"] = "message"


class ResponsesBody(Sampling):
    """text.format: as a chat's response_format, with the entries of json_schema beside the type."""

    input: str | Annotated[list[ResponsesItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: dict[Literal["format"], dict[str, Any]] | None = None


class MessagesBlock(Open):
    """Of Anthropic's content: text, a call of a tool, or its result; the fields of the other two stay empty."""

    type: Literal["text", "tool_use", "tool_result"]
    text: str = ""
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[Part] | None = None


class MessagesMessage(Body):
    role: Literal["user", "assistant"]
    content: str | list[MessagesBlock]


class MessagesTool(Function):
    input_schema: dict[str, Any]


class MessagesChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesBody(Sampling):
    messages: list[MessagesMessage] = Field(min_length=1)
    max_tokens: Count
    system: str | list[Part] | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesChoice | None = None


class TokenizeBody(Body):
    """vLLM's. add_special_tokens: a prompt always has them, and messages those that the template writes."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Tokens


class AdapterBody(Body):
    lora_name: Name
    lora_path: str | None = None
