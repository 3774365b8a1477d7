"""Bodies of Anthropic's messages and count_tokens, see `schemas`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from paged.cache.retention import Retention
from paged.serving.http.bodies import Body, Null, only
from paged.serving.http.schemas import (
    CacheControl,
    CacheMarked,
    ConversationBody,
    Count,
    FunctionName,
    Grammar,
    ImageUrl,
    Text,
    marked_times,
    retention_of,
)

# Values of Anthropic's context_management that have no effect.
_NO_EDITS: tuple[Any, ...] = ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})


class ToolUse(CacheMarked, tag="tool_use"):
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


class ImageBlock(CacheMarked, tag="image"):
    source: Base64Source | UrlSource


class ToolResult(CacheMarked, tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | ImageBlock] | None = None

    def times(self) -> list[str]:
        return super().times() + marked_times([self.content])


class Thinking(Struct, tag="thinking"):
    thinking: str


class RedactedThinking(Struct, tag="redacted_thinking"):
    """Encrypted reasoning of another server, which is not readable here."""


class MessagesMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Text | ImageBlock | ToolUse | ToolResult | Thinking | RedactedThinking]


class MessagesTool(CacheMarked):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None


class MessagesChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingDisabled(Body, tag="disabled"):
    """One type of `thinking`. is_on: whether reasoning is allowed. budget: maximum number of reasoning tokens."""

    is_on: ClassVar[bool] = False
    budget: ClassVar[int] = 0


class ThinkingAdaptive(Body, tag="adaptive"):
    """display: whether reasoning is shown. "summarized" shows the full text."""

    is_on: ClassVar[bool] = True
    budget: ClassVar[None] = None
    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(Body, tag="enabled", kw_only=True):
    is_on: ClassVar[bool] = True
    budget_tokens: Count
    display: Literal["summarized", "omitted"] | None = None

    @property
    def budget(self) -> int:
        return self.budget_tokens


ThinkingConfig = ThinkingDisabled | ThinkingAdaptive | ThinkingEnabled


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesPrompt(ConversationBody, kw_only=True):
    """Common fields of messages and count_tokens.

    cache_control: every prompt is cached. If it, or a part of the prompt, has this mark, the whole prompt stays cached
    for longer than prompts without marks, see `Retention`.
    """

    messages: Annotated[list[MessagesMessage], Meta(min_length=1)]
    system: str | list[Text] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    context_management: Annotated[Any, only(*_NO_EDITS)] = None
    mcp_servers: Annotated[Any, only([])] = None
    speed: Annotated[Any, only("standard")] = None
    user_profile_id: Null = None
    workspace_id: Null = None

    @property
    def retention(self) -> Retention | None:
        """Return the retention of the mark with the longest time; None without marks."""
        contents = [self.tools, self.system, *(message.content for message in self.messages)]
        if self.cache_control is None:
            return retention_of(contents)
        return retention_of(contents, [self.cache_control.time])


class MessagesBody(MessagesPrompt, kw_only=True):
    names: ClassVar[Mapping[str, str]] = {**ConversationBody.names, "stop": "stop_sequences"}

    max_tokens: Count
    stop_sequences: Annotated[list[str], Meta(max_length=256)] | None = None

    billing_policy: Null = None
    compaction: Null = None
    container: Null = None
    diagnostics: Null = None
    fallback_credit_token: Null = None
    fallbacks: Annotated[Any, only([])] = None
    inference_geo: Annotated[Any, only("global")] = None
    thread: Null = None

    def grammar(self) -> Grammar | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        return Grammar("output_config.format", "json", self.output_config.format.schema)


class CountTokensBody(MessagesPrompt, kw_only=True):
    """Body of count_tokens, without sampling arguments."""

    temperature: Null = None
    top_p: Null = None
    top_k: Null = None
    stream: Null = None
