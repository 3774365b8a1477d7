# ruff: noqa: RUF001 (some markers hold wide characters)
"""Formats of tool calls as data, to read them, to force them by a grammar, and to replay them.

`AnswerReader` in `answer_reader.py` reads answers in these formats, and `chat.py` converts them to OpenAI's JSON. Each
format names the models whose chat template shows it, for example "hermes" for Qwen 2.5 and 3, "qwen_xml" for
Qwen3-Coder and Qwen3.5. Where a format has white space, an answer may have other white space or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paged.serving.formats.reasoning_formats import REASONING_FORMATS, Reasoning
from paged.serving.grammar.calls import Layout, arguments, json_value, sequence, text_element
from paged.serving.text.chat_tokenizer import ChatTokenizer
from paged.serving.text.replay import replayed
from paged.serving.text.template_wishes import TemplateWishes

_PLACE = re.compile(r"(\{index\}|\{id\}|\{is_text\})")
_PATTERNS = {"{index}": "[0-9]{1,3}", "{id}": "[a-zA-Z0-9]{9}"}


class Tags(NamedTuple):
    """Tags around an argument.

    Attributes:
        begin: text before the name.
        middle: text between name and value. {is_text} is true for a string and false for JSON. {type} is the value's
            type in JSON: "string" for a string without quotes.
        end: text after the value.
        is_in_lines: whether the value is on separate lines.
    """

    begin: str
    middle: str
    end: str
    is_in_lines: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """Format of a model's tool calls.

    Attributes:
        models: models whose chat template shows it.
        hints: texts that all occur in such a template.
        begin: marker before a call or before all calls. In a channel, calls need no marker.
        end: marker after the call or calls; "" for none.
        call: text before the name, after the name, and after the arguments. {index} is the number of a call, {id} its
            id. For an "object", only the grammar uses it.
        is_section: whether the markers surround all calls together.
        is_list: whether the calls are in brackets.
        separator: text between calls; None if only one call is possible.
        arguments: form of the arguments: "object", a JSON object that also has the name; "json", a JSON object after
            the name; "tags"; nested "elements"; a "python" call; or Gemma's "braces".
        tags: tags of arguments; for elements, the text before a name or slash and the text after it.
        bare: beginning of a call without markers, at the start of an answer or after a call.
        other_begins: alternative markers for `begin`.
        extra: optional text before the text after the name.
        prefix: optional prefix of names, which is not part of the name.
        has_text_arguments: whether the chat template expects arguments as text, unless it writes JSON itself.
        call_id: form of call ids that the chat template requires; "" for any.
    """

    models: str
    hints: tuple[str, ...]
    begin: str
    end: str
    call: tuple[str, str, str]
    is_section: bool = False
    is_list: bool = False
    separator: str | None = "\n"
    arguments: Literal["object", "json", "tags", "elements", "python", "braces"] = "json"
    tags: Tags = Tags("", "", "")  # noqa: RUF009
    bare: str = ""
    other_begins: tuple[str, ...] = ()
    extra: str = ""
    prefix: str = ""
    has_text_arguments: bool = False
    call_id: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        """All markers before a call."""
        return tuple(marker for marker in (self.begin, *self.other_begins) if marker)

    def grammar(
        self, parameters: Mapping[str, Any], *, is_one: bool, reasoning: Reasoning | None = None, thinks: bool = False
    ) -> dict[str, Any]:
        """Return the structural tag of one or more calls.

        Args:
            parameters: JSON schema by tool name.
            is_one: whether to end after the first call.
            reasoning: format of reasoning.
            thinks: whether the prompt ends within reasoning, which then comes first.

        Raises:
            ValueError: this form cannot enforce a keyword of a schema.
        """
        begin, end = (self.begin, self.end)
        if self.bare:
            begin, end = "", ""
        opening = begin + "[" * self.is_list
        closing = "]" * self.is_list + end
        before, after, last = self.call
        tags = []
        for name, schema in parameters.items():
            elements = [_piece(text) for text in _PLACE.split(after)]
            elements.append(_arguments(self, schema))
            tag = {"type": "tag", "begin": before + name, "content": sequence(elements), "end": last}
            if not self.is_section:
                tag["begin"] = opening + before + name
                tag["end"] = last + closing
            tags.append(tag)
        form: dict[str, Any] = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator or "",
            "at_least_one": True,
            "stop_after_first": is_one or self.separator is None,
        }
        elements = [form]
        if self.is_section:
            elements = [text_element(opening), form, text_element(closing)]
        if thinks and reasoning is not None:
            thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": reasoning.end}
            lines = {"type": "regex", "pattern": r"\n{0,2}"}
            elements = [thought, lines, *elements]
        return {"type": "structural_tag", "format": sequence(elements)}


_OBJECT = ('{"name": "', '", "arguments": ', "}")
_LINES = ('\n{"name": "', '", "arguments": ', "}\n")
_FUNCTION = ("\n<function=", ">\n", "</function>\n")
_XML = Tags("<parameter=", ">", "</parameter>\n")
# By option name. "auto" takes the first format whose hints all occur in the template.
TOOL_FORMATS = {
    "harmony": ToolFormat(
        "gpt-oss", ("<|channel|>", "<|message|>"), "", "",
        ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        separator=None, prefix="functions.",
    ),
    "kimi_k2": ToolFormat(
        "Kimi K2", ("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        ("<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        is_section=True, separator="", prefix="functions.", call_id="functions.{name}:{index}",
    ),
    "kimi_k3": ToolFormat(
        "Kimi K3", ("<|open|>", "<|sep|>"), "<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
        ('<|open|>call tool="', '" index="{index}"<|sep|>', "<|close|>call<|sep|>"),
        is_section=True, separator="", arguments="tags",
        tags=Tags('<|open|>argument key="', '" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
    ),
    "deepseek_v3": ToolFormat(
        "DeepSeek V3, R1", ("<｜tool▁sep｜>", "```json"), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        is_section=True, has_text_arguments=True,
    ),
    "deepseek_v31": ToolFormat(
        "DeepSeek V3.1", ("<｜tool▁sep｜>",), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        is_section=True, separator="", has_text_arguments=True,
    ),
    "deepseek_v32": ToolFormat(
        "DeepSeek V3.2", ("｜DSML｜", "function_calls>"), "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
        ('\n<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n"),
        is_section=True, separator="", arguments="tags",
        tags=Tags('<｜DSML｜parameter name="', '" string="{is_text}">', "</｜DSML｜parameter>\n"),
    ),
    "deepseek_v4": ToolFormat(
        "DeepSeek V4", ("｜DSML｜",), "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>",
        ('\n<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n"),
        is_section=True, separator="", arguments="tags",
        tags=Tags('<｜DSML｜parameter name="', '" string="{is_text}">', "</｜DSML｜parameter>\n"),
    ),
    "glm": ToolFormat(
        "GLM 4.5 to 5", ("<arg_key>",), "<tool_call>", "</tool_call>", ("", "\n", ""), arguments="tags",
        tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "minimax_m2": ToolFormat(
        "MiniMax M2", ("<minimax:tool_call>",), "<minimax:tool_call>", "</minimax:tool_call>",
        ('\n<invoke name="', '">\n', "</invoke>\n"), is_section=True, separator="", arguments="tags",
        tags=Tags('<parameter name="', '">', "</parameter>\n"),
    ),
    "minimax_m3": ToolFormat(
        "MiniMax M3", ("]<]minimax[>[",), "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>",
        ('\n]<]minimax[>[<invoke name="', '">\n', "]<]minimax[>[</invoke>\n"), is_section=True, separator="",
        arguments="elements", tags=Tags("]<]minimax[>[<", ">", ""),
    ),
    "step3": ToolFormat(
        "Step 3", ("<steptml:invoke",), "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
        (
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        is_section=True, separator="", arguments="tags",
        tags=Tags('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ),
    "seed_oss": ToolFormat(
        "Seed-OSS", ("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", _FUNCTION, arguments="tags",
        tags=Tags(*_XML[:3]),
    ),
    "mimo": ToolFormat(
        "MiMo V2", ("<function=", "example_parameter_1>value_1"), "<tool_call>", "</tool_call>", _FUNCTION,
        arguments="tags", tags=Tags(*_XML[:3]),
    ),
    "qwen_xml": ToolFormat(
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5", ("<function=", "<parameter="), "<tool_call>", "</tool_call>",
        _FUNCTION, arguments="tags", tags=Tags(*_XML[:3], is_in_lines=True),
    ),
    "gemma4": ToolFormat(
        "Gemma 4", ("<|tool_call>",), "<|tool_call>", "<tool_call|>", ("call:", "{", ""), separator="",
        arguments="braces",
    ),
    "lfm2": ToolFormat(
        "LFM2, LFM2.5", ("<|tool_call_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", ("", "(", ""),
        is_section=True, is_list=True, separator=", ", arguments="python",
    ),
    "hunyuan": ToolFormat(
        "Hunyuan A13B", ("<tool_calls>",), "<tool_calls>", "</tool_calls>", _OBJECT,
        is_section=True, is_list=True, separator=", ", arguments="object",
    ),
    "nemotron": ToolFormat(
        "Nemotron Nano 2, Llama Nemotron", ("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", _OBJECT,
        is_section=True, is_list=True, separator=", ", arguments="object",
    ),
    "phi4_mini": ToolFormat(
        "Phi-4-mini", ("<|tool|>",), "functools", "", _OBJECT,
        is_section=True, is_list=True, separator=", ", arguments="object", other_begins=("<|tool_call|>",),
    ),
    "granite": ToolFormat(
        "Granite 3", ("<|tool_call|>",), "<|tool_call|>", "", _OBJECT,
        is_section=True, is_list=True, separator=", ", arguments="object", other_begins=("<tool_call>",),
    ),
    "hermes": ToolFormat(
        "Qwen 2.5 and 3, Hermes 2, Granite 4, Ernie 4.5, MiMo 7B", ("<tool_call>",), "<tool_call>", "</tool_call>",
        _LINES, arguments="object",
    ),
    "mistral_id": ToolFormat(
        "Mistral Small 3.1", ("[CALL_ID]",), "[TOOL_CALLS]", "", ("", "[CALL_ID]{id}[ARGS]", ""), separator="",
        call_id="{index:09}",
    ),
    "mistral": ToolFormat(
        "Magistral, Mistral Small 3.2, Devstral", ("[ARGS]",), "[TOOL_CALLS]", "", ("", "[ARGS]", ""), separator="",
        extra="[CALL_ID]{id}", call_id="{index:09}",
    ),
    "mistral_list": ToolFormat(
        "Mistral 7B v0.3, Nemo, Large 2", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", _OBJECT,
        is_section=True, is_list=True, separator=", ", arguments="object", call_id="{index:09}",
    ),
    "llama4": ToolFormat(
        "Llama 4, Llama 3.2, in Python's form", ("[func_name1(",), "<|python_start|>", "<|python_end|>", ("", "(", ""),
        is_section=True, is_list=True, separator=", ", arguments="python", bare="[",
    ),
    "llama3": ToolFormat(
        "Llama 3.1 to 3.3, Llama 4", ('{"name": function name',), "<|python_tag|>", "",
        ('{"name": "', '", "parameters": ', "}"), separator="; ", arguments="object", bare="{",
    ),
}  # fmt: skip


class Tongue(NamedTuple):
    """Formats of calls and reasoning of a model, and how its template replays them.

    Attributes:
        tools: format of calls; None if calls are not read.
        reasoning: format of reasoning; None if it is not read.
        reasons: name of each format, and why it was chosen.
        template: text of the chat templates.
        variables: variables of the template for requests without tools.
        tool_variables: variables of the template for requests with tools.
    """

    tools: ToolFormat | None
    reasoning: Reasoning | None
    reasons: tuple[str, str]
    template: str
    variables: frozenset[str] = frozenset()
    tool_variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, tools: str = "auto", reasoning: str = "auto") -> Tongue:
        """Choose formats by name, or for "auto" by the chat template, else by the tokenizer's tokens."""
        template = "".join(tokenizer.template.templates.values())

        def has_token(text: str) -> bool:
            return tokenizer.tokenizer.token_to_id(text) is not None

        tool_name, tool_reason = _choice(tools, TOOL_FORMATS, template, has_token)
        name, reason = _choice(reasoning, REASONING_FORMATS, template, has_token)
        return cls(
            TOOL_FORMATS.get(tool_name),
            REASONING_FORMATS.get(name),
            (f"{tool_name}: {tool_reason}", f"{name}: {reason}"),
            template,
            tokenizer.template.variables(has_tools=False),
            tokenizer.template.variables(has_tools=True),
        )

    def wishes(self, *, has_tools: bool) -> TemplateWishes:
        """Return the converter from a request's wishes to variables of the chat template."""
        variables = self.tool_variables if has_tools else self.variables
        return TemplateWishes(variables, can_reason=self.reasoning is not None)

    def replayed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Convert messages for the chat template; arguments of calls are objects."""
        call_id, has_text_arguments = "", False
        if self.tools is not None:
            call_id, has_text_arguments = self.tools.call_id, self.tools.has_text_arguments
        return replayed(
            messages,
            template=self.template,
            has_channels=self.reasoning is not None and self.reasoning.has_channels,
            call_id=call_id,
            has_text_arguments=has_text_arguments,
        )

    def markers(self) -> str:
        """Return all texts of the formats. Special tokens in them are kept when an answer is decoded."""
        return f"{self.tools} {self.reasoning} {GEMMA_QUOTE} <|start|>"


GEMMA_QUOTE = '<|"|>'


class MarkedTokenizer:
    """Decodes like `ChatTokenizer`, without special tokens except the ones that `AnswerReader` looks for.

    Attributes:
        hidden_tokens: text by id of the special tokens that are left out.
    """

    def __init__(self, tokenizer: ChatTokenizer, tongue: Tongue | None = None) -> None:
        self._tokenizer = tokenizer
        text = (tongue or Tongue.of(tokenizer)).markers()
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        self._markers: dict[int, str] = {}
        self.hidden_tokens: dict[int, str] = {}
        for token_id, token in added.items():
            if token.special and token.content in text:
                self._markers[token_id] = token.content
            elif token.special and token.content:
                self.hidden_tokens[token_id] = token.content

    def decode(self, token_ids: list[int], /) -> str:
        """Return the text of token ids."""
        parts, begin = [], 0
        for index, token in enumerate(token_ids):
            if token in self._markers:
                parts += [self._tokenizer.decode(token_ids[begin:index]), self._markers[token]]
                begin = index + 1
        return "".join((*parts, self._tokenizer.decode(token_ids[begin:])))


def is_text(schema: Any) -> bool:
    """Return whether a JSON schema allows only strings, and perhaps null."""
    if not isinstance(schema, Mapping):
        return False
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return all(is_text(option) or option == {"type": "null"} for option in schema[name])
    if isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        kinds = [kinds]
    return "string" in kinds and all(kind in ("string", "null") for kind in kinds)


def _choice(
    name: str,
    formats: Mapping[str, ToolFormat] | Mapping[str, Reasoning],
    template: str,
    has_token: Callable[[str], bool],
) -> tuple[str, str]:
    """Return the name of a format and the reason for its choice."""
    if name != "auto":
        return name, "chosen by the option"
    for choice, form in formats.items():
        if all(hint in template for hint in form.hints):
            return choice, f"the chat template holds {' and '.join(form.hints)}"
    for choice, form in formats.items():
        if all(map(has_token, form.hints)):
            return choice, f"the tokenizer has the tokens {' and '.join(form.hints)}"
    return "none", "neither the chat template nor the tokenizer names a known format"


def _piece(value: str) -> dict[str, Any]:
    """Return the grammar of a piece of text or of a placeholder."""
    if value in _PATTERNS:
        return {"type": "regex", "pattern": _PATTERNS[value]}
    return text_element(value)


def _arguments(form: ToolFormat, schema: Any) -> dict[str, Any]:
    """Return the grammar of the arguments and the text after them."""
    begin, middle, end, is_in_lines = form.tags
    closing = ""
    if form.arguments in ("object", "json"):
        return json_value(schema)
    if form.arguments == "tags":
        line = "\n" * is_in_lines
        layout = Layout(begin, middle + line, line + end, end_of_text=end.strip())
    elif form.arguments == "elements":
        layout = Layout(begin, middle, f"{begin}/{{name}}{middle}", end_of_text=begin, is_nested=True)
    elif form.arguments == "python":
        layout, closing = Layout("", "=", separator=", ", quote=None), ")"
    else:
        layout, closing = Layout("", ":", separator=",", quote=GEMMA_QUOTE), "}"
    return sequence([arguments(schema, layout, is_text), text_element(closing)])
