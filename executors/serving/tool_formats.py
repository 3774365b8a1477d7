"""How known models write calls of tools: to read them, to force them by a grammar, and to keep their markers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged.executors.text.chat_tokenizer import ChatTokenizer

# What comes before the arguments of a call. Each of its characters can be read in one way only, so matching is linear.
_OBJECT_HEAD = (
    r'\s*(?:\[\s*)?\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:\s*"(?P<object>[^"\\]+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_TEXT_HEAD = r"\s*(?P<text>[^\s{}\[\]]+)\s*(?:\[CALL_ID\][^\s{}\[\]]*\s*)?(?:\[ARGS\]\s*)?(?=\{)"
_ELEMENT_HEAD = r"\s*<function=(?P<element>[^\s>]+)>"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        begin: what a call begins with.
        end: what it ends with; empty for nothing.
        bare: whether a brace at the beginning of an answer, or behind a call, begins one, too.
        hint: what the chat template of such a model holds.
        head: what comes before the arguments. The group of the name says where it stands: in a JSON "object" with them;
            as "text" before an object; in an "element", which holds a <parameter=...> for each.
        call: text before and after the arguments, with NAME for the name.
        separator: text between calls; None if there is one call only.
        style: xgrammar's, of the arguments.
    """

    begin: str
    end: str
    bare: bool
    hint: str
    head: re.Pattern[str]
    call: tuple[str, str]
    separator: str | None
    style: str = "json"

    def grammar(self, parameters: Mapping[str, Any], *, is_one: bool, thinks: bool) -> dict[str, Any]:
        """Return xgrammar's structural tag for one or more calls.

        Args:
            parameters: a JSON schema by the name of a tool.
            is_one: whether to end after the first call.
            thinks: whether reasoning comes first, up to </think>.
        """
        before, after = self.call
        # Without the limit, a weak model writes nothing but white space.
        content = {"type": "json_schema", "style": self.style, "max_whitespace_cnt": 1}
        form: dict[str, Any] = {
            "type": "tags_with_separator",
            "tags": [
                {
                    "type": "tag",
                    "begin": before.replace("NAME", name),
                    "end": after,
                    "content": content | {"json_schema": schema},
                }
                for name, schema in parameters.items()
            ],
            "separator": self.separator or "",
            "at_least_one": True,
            "stop_after_first": is_one or self.separator is None,
        }
        if thinks:
            thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n"}
            form = {"type": "sequence", "elements": [thought, form]}
        return {"type": "structural_tag", "format": form}


_ARGUMENTS, _PARAMETERS = '{"name": "NAME", "arguments": ', '{"name": "NAME", "parameters": '
_XML_CALL = "<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>"
_JSON_CALL = f"<tool_call>\n{_ARGUMENTS}", "}\n</tool_call>"
_IN_TAGS, _IN_LIST = re.compile(f"{_OBJECT_HEAD}|{_ELEMENT_HEAD}"), re.compile(f"{_OBJECT_HEAD}|{_TEXT_HEAD}")
_MARK = "[TOOL_CALLS]"
# By the option's name; of those whose hint a template holds, the first.
TOOL_FORMATS = {
    "qwen_xml": ToolFormat("<tool_call>", "</tool_call>", False, "<function=", _IN_TAGS, _XML_CALL, "\n", "qwen_xml"),
    "hermes": ToolFormat("<tool_call>", "</tool_call>", False, "<tool_call>", _IN_TAGS, _JSON_CALL, "\n"),
    "mistral": ToolFormat(_MARK, "", True, "[ARGS]", _IN_LIST, (f"{_MARK}NAME[ARGS]", ""), ""),
    "mistral_list": ToolFormat(_MARK, "", True, _MARK, _IN_LIST, (f"{_MARK} [{_ARGUMENTS}", "}]"), None),
    "llama3": ToolFormat(
        "<|python_tag|>", "", True, '{"name": function name', re.compile(_OBJECT_HEAD), (_PARAMETERS, "}"), "; "
    ),
}

_MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>")


class MarkedTokenizer:
    """Decodes as `ChatTokenizer`, which leaves special tokens out, but keeps those that `AnswerReader` looks for."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._markers = {tokenizer.tokenizer.token_to_id(marker): marker for marker in _MARKERS}

    def decode(self, token_ids: list[int], /) -> str:
        """Return the text of token ids."""
        parts, begin = [], 0
        for index, token in enumerate(token_ids):
            if token in self._markers:
                parts += [self._tokenizer.decode(token_ids[begin:index]), self._markers[token]]
                begin = index + 1
        return "".join((*parts, self._tokenizer.decode(token_ids[begin:])))
