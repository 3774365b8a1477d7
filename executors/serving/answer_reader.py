"""Takes an answer's text apart while it comes: reasoning, content, and calls of tools in the forms of known models."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

_THINK, _THOUGHT = "<think>", "</think>"


class Call(NamedTuple):
    """A call of a tool; arguments are JSON."""

    id: str
    name: str
    arguments: str


class Delta(NamedTuple):
    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        begin: what a call begins with.
        end: what it ends with; empty for the end of the text.
        bare: whether a text that begins with a brace is a call, too.
        hint: what the chat template of such a model holds.
        parse: makes names and arguments of what lies between; raises ValueError, KeyError or TypeError.
    """

    begin: str
    end: str
    bare: bool
    hint: str
    parse: Callable[[str], list[tuple[str, Any]]]


def _hermes(text: str) -> list[tuple[str, Any]]:
    """JSON with name and arguments; or, of Qwen3-Coder, an element for each argument, with JSON or plain text in it."""
    function = re.fullmatch(r"\s*<function=([^>\s]+)>(.*?)\s*(?:</function>)?\s*", text, re.DOTALL)
    if function is None:
        call = json.loads(text)
        return [(call["name"], call["arguments"])]
    parameters = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
    return [(function[1], {name: _json_or_text(value) for name, value in parameters})]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _mistral(text: str) -> list[tuple[str, Any]]:
    """A list of calls; or, of later models, a name and its arguments, with or without [ARGS] between."""
    if text.lstrip().startswith("["):
        return [(call["name"], call["arguments"]) for call in json.loads(text)]
    calls = []
    for one in text.split("[TOOL_CALLS]"):
        name, _, arguments = one.strip().partition("{")
        calls.append((name.removesuffix("[ARGS]").strip(), json.loads("{" + arguments)))
    return calls


def _llama3(text: str) -> list[tuple[str, Any]]:
    """Objects with name and parameters, one after the other, perhaps with ; between."""
    calls, rest = [], text.strip()
    while rest:
        call, end = json.JSONDecoder().raw_decode(rest)
        calls.append((call["name"], call["parameters"] if "parameters" in call else call["arguments"]))
        rest = rest[end:].lstrip("; \n")
    return calls


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", False, "<tool_call>", _hermes),  # and Qwen
    "mistral": ToolFormat("[TOOL_CALLS]", "", False, "[TOOL_CALLS]", _mistral),
    "llama3": ToolFormat("<|python_tag|>", "", True, '{"name": function name', _llama3),
}


class AnswerReader:
    """Reads one answer. What may be the beginning of a marker waits for the next text.

    Args:
        tools: how calls are written; None leaves them in the content.
        has_thoughts: whether what comes before </think> is reasoning.
        thinks: whether the prompt ends within it.
    """

    def __init__(self, tools: ToolFormat | None, *, has_thoughts: bool, thinks: bool) -> None:
        self._tools, self._has_thoughts = tools, has_thoughts
        self._state: Literal["start", "reasoning", "content", "call"] = "reasoning" if thinks else "start"
        self._held, self._has_passed = "", thinks
        self.num_calls = 0

    def read(self, text: str, *, is_last: bool = False) -> list[Delta]:
        """Return what `text` adds; with `is_last` everything that still waits, too."""
        self._held += text
        deltas: list[Delta] = []
        while self._advance(deltas, is_last=is_last):
            pass
        return deltas

    def _advance(self, deltas: list[Delta], *, is_last: bool) -> bool:
        """Read up to the next change of state; return whether there was one."""
        if self._state == "start":
            return self._begin(is_last=is_last)
        if self._state == "reasoning":
            return self._pass_up_to(_THOUGHT, "reasoning", "start", deltas, is_last=is_last)
        if self._state == "content":
            marker = self._tools.begin if self._tools is not None else ""
            return self._pass_up_to(marker, "content", "call", deltas, is_last=is_last)
        return self._end_call(deltas, is_last=is_last)

    def _begin(self, *, is_last: bool) -> bool:
        """At the beginning of an answer, or behind reasoning or a call, where newlines separate."""
        if self._has_passed:
            self._held = self._held.lstrip("\n")
        text = self._held.lstrip()
        may_think = self._has_thoughts and not self._has_passed
        if may_think and text.startswith(_THINK):
            self._held, self._state = text.removeprefix(_THINK), "reasoning"
        elif not self._held or (may_think and not is_last and _THINK.startswith(text)):
            return False
        else:
            is_bare = self._tools is not None and self._tools.bare and text.startswith("{")
            self._state = "call" if is_bare else "content"
        return True

    def _pass_up_to(self, marker: str, kind: Any, then: Any, deltas: list[Delta], *, is_last: bool) -> bool:
        """Pass on the text before `marker`, or all that cannot be the beginning of it."""
        at = self._held.find(marker) if marker else -1
        end = at if at >= 0 else len(self._held) if is_last else len(self._held) - _overlap(self._held, marker)
        if end:
            deltas.append(Delta(kind, self._held[:end]))
        self._held = self._held[end:]
        if at >= 0:
            self._held, self._state = self._held.removeprefix(marker), then
            self._has_passed = True
        return at >= 0

    def _end_call(self, deltas: list[Delta], *, is_last: bool) -> bool:
        """Pass on calls once they are whole; what is no call is content, with its markers."""
        assert self._tools is not None
        begin, end = self._tools.begin, self._tools.end
        body, found, rest = self._held.partition(end) if end else (self._held, "", "")
        if not found and not is_last:
            return False
        try:
            calls = [(name, json.dumps(given, ensure_ascii=False)) for name, given in self._tools.parse(body) if name]
        except (ValueError, KeyError, TypeError, RecursionError):
            calls = []
            deltas.append(
                Delta("content", f"{begin}{body}{found}" if not body.lstrip().startswith("{") or end else body)
            )
        deltas += [Delta("call", call=Call(f"call_{secrets.token_hex(12)}", *call)) for call in calls]
        self.num_calls += len(calls)
        self._held, self._state = rest, "start" if calls else "content"
        return bool(rest)


def _overlap(text: str, marker: str) -> int:
    """Return how many of the last characters of `text` `marker` begins with."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
