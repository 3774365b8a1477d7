"""Takes an answer's text apart while it comes: reasoning, content, and calls of tools in the forms of known models.

What the reader cannot judge yet is shorter than a marker, or than the longest beginning of a call. It looks at no other
character twice, so the cost of an answer is linear in its length, however it is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple, TypeVar

from paged.executors.serving.tool_formats import ToolFormat

T = TypeVar("T")
_Kind = Literal["content", "reasoning", "call", "arguments"]
_Reading = Generator[None, None, T]
"""A part of the reading that returns T; each `yield` waits for more text."""

_THINK, _THOUGHT = "<think>", "</think>"
_LONGEST_HEAD = 512  # characters of a call before its arguments; a name has up to 256
_BETWEEN_CALLS = " \t\r\n;,]"
_FUNCTION_END, _PARAMETER, _PARAMETER_END = "</function>", "<parameter=", "</parameter>"


class Delta(NamedTuple):
    """Some content or reasoning; the name of a tool that is called; or the next piece of its arguments, in JSON."""

    kind: _Kind
    text: str


class AnswerReader:
    """Reads one answer. What may be the beginning of a marker waits for the next text.

    Args:
        tools: how calls are written; None leaves them in the content.
        has_thoughts: whether what comes before </think> is reasoning.
        thinks: whether the prompt ends within it.
    """

    def __init__(self, tools: ToolFormat | None, *, has_thoughts: bool, thinks: bool) -> None:
        self._tools, self._is_last, self.num_calls = tools, False, 0
        self._text, self._at = "", 0  # what has come, and how much of it is read
        self._parts: list[tuple[_Kind, list[str]]] = []
        self._run = self._answer(has_thoughts=has_thoughts, thinks=thinks)
        next(self._run)

    def read(self, text: str, *, is_last: bool = False) -> list[Delta]:
        """Return what `text` adds; with `is_last` everything that still waits, too."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._is_last, self._parts = is_last, []
        next(self._run, None)
        return [Delta(kind, "".join(pieces)) for kind, pieces in self._parts]

    def _answer(self, *, has_thoughts: bool, thinks: bool) -> _Reading[None]:
        yield
        spaces, form = "", self._tools
        if has_thoughts and not thinks:
            spaces = yield from self._while(str.isspace)
            thinks = yield from self._comes(_THINK)
        if thinks:
            spaces = ""
            yield from self._up_to(_THOUGHT, lambda text: self._put("reasoning", text))
            yield from self._while("\n".__contains__)
        while (yield from self._next()):
            if form is not None and form.bare:
                spaces += yield from self._while(str.isspace)
                if (yield from self._next()) == "{":
                    yield from self._call(form, spaces)
                    spaces = ""
                    continue
            self._content(spaces)
            spaces = ""
            if (yield from self._up_to(form.begin if form else "", self._content)) and form is not None:
                yield from self._call(form, form.begin)
        self._content(spaces)

    def _call(self, form: ToolFormat, opened: str) -> _Reading[None]:
        """Read what is called behind a marker, its arguments as they come; what is no call is content."""
        head = yield from self._head(form)
        if head is not None:
            self._at += head.end()
            self._begin(head[head.lastgroup or 0])
            yield from self._elements() if head.lastgroup == "element" else self._object()
            if head.lastgroup == "object":
                yield from self._close(form.end)
        else:
            pieces: list[str] = []
            is_ended = yield from self._up_to(form.end, pieces.append)
            body = "".join(pieces)
            calls = _whole_calls(body)
            if not calls:
                self._content(f"{opened}{body}{form.end if is_ended else ''}")
                return
            for name, arguments in calls:
                self._begin(name, arguments)
        yield from self._while(_BETWEEN_CALLS.__contains__)
        if form.end and (yield from self._comes(form.end)):
            yield from self._while("\n".__contains__)

    def _head(self, form: ToolFormat) -> _Reading[re.Match[str] | None]:
        """Return what comes before the arguments of a call, without reading it; None if this is no call."""
        while True:
            text = self._text[self._at : self._at + _LONGEST_HEAD]
            end = text.find(form.end) if form.end else -1
            head = form.head.match(text[:end] if end >= 0 else text)
            if head is not None or end >= 0 or self._is_last or len(text) == _LONGEST_HEAD:
                return head
            yield

    # Arguments

    def _object(self) -> _Reading[None]:
        """Pass on a JSON object, up to the brace that closes it."""
        depth, is_quoted, is_escaped = 0, False, False
        while (yield from self._next()):
            for index in range(self._at, len(self._text)):
                letter = self._text[index]
                if is_escaped or (is_quoted and letter not in '"\\'):
                    is_escaped = False
                elif letter == "\\":
                    is_escaped = True
                elif letter == '"':
                    is_quoted = not is_quoted
                elif letter in "{[":
                    depth += 1
                elif letter in "}]":
                    depth -= 1
                    if not depth:
                        self._put("arguments", self._advance(index + 1))
                        return
            self._put("arguments", self._advance(len(self._text)))

    def _close(self, end: str) -> _Reading[None]:
        """Read the rest of the object around name and arguments, which may lack its brace."""
        while (yield from self._next()):
            if (yield from self._comes("}")) or (end and (yield from self._comes(end))):
                return
            self._advance(self._at + 1)
            yield from self._while(lambda letter: letter not in ("}", end[:1]))

    def _elements(self) -> _Reading[None]:
        """Pass on an element for each argument as a JSON object; what is none is content."""
        before, unread = "{", ""
        while True:
            yield from self._while(str.isspace)
            if not (yield from self._comes(_PARAMETER)):
                yield from self._comes(_FUNCTION_END)
                break
            name = yield from self._while(lambda letter: not letter.isspace() and letter != ">")
            unread = f"{_PARAMETER}{name}"
            if not (name and (yield from self._comes(">"))):
                break
            pieces: list[str] = []
            is_whole = yield from self._up_to(_PARAMETER_END, pieces.append)
            value = "".join(pieces)
            if not is_whole:
                unread += f">{value}"
                break
            value = value.removeprefix("\n").removesuffix("\n")
            self._put("arguments", f"{before}{json.dumps(name)}: {_as_json(value)}")
            before, unread = ", ", ""
        self._put("arguments", "{}" if before == "{" else "}")
        self._content(unread)

    # What all parts are made of: each looks at a character once.

    def _next(self) -> _Reading[str]:
        """Return the next character without reading it, empty at the end of the answer."""
        while self._at == len(self._text) and not self._is_last:
            yield
        return self._text[self._at : self._at + 1]

    def _advance(self, end: int) -> str:
        begin, self._at = self._at, end
        return self._text[begin:end]

    def _while(self, condition: Callable[[str], object]) -> _Reading[str]:
        """Read the characters that fulfil a condition."""
        pieces = []
        while (yield from self._next()):
            end = self._at
            while end < len(self._text) and condition(self._text[end]):
                end += 1
            is_last = end < len(self._text)
            pieces.append(self._advance(end))
            if is_last:
                break
        return "".join(pieces)

    def _comes(self, text: str) -> _Reading[bool]:
        """Read a text if it comes next."""
        while True:
            part = self._text[self._at : self._at + len(text)]
            if part == text:
                self._at += len(text)
                return True
            if self._is_last or not text.startswith(part):
                return False
            yield

    def _up_to(self, marker: str, take: Callable[[str], None]) -> _Reading[bool]:
        """Read to a marker, or without one to the end; `take` gets what is before it. Return whether it came."""
        while (yield from self._next()):
            at = self._text.find(marker, self._at) if marker else -1
            if at >= 0:
                take(self._advance(at))
                self._at += len(marker)
                return True
            held = 0 if self._is_last else _overlap(self._text[self._at :][-len(marker) :], marker)
            take(self._advance(len(self._text) - held))
            if held:
                yield
        return False

    # What the reader returns

    def _begin(self, name: str, arguments: str = "") -> None:
        self._parts.append(("call", [name]))
        self._put("arguments", arguments)
        self.num_calls += 1

    def _content(self, text: str) -> None:
        self._put("content", text)

    def _put(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if self._parts and self._parts[-1][0] == kind:
            self._parts[-1][1].append(text)
        else:
            self._parts.append((kind, [text]))


def _whole_calls(text: str) -> list[tuple[str, str]]:
    """Return names and arguments of whole objects, with keys in any order; none if one of them is no call."""
    decoder, calls = json.JSONDecoder(), []
    text = text.strip("[] \t\r\n")
    at = 0
    try:
        while at < len(text):
            call, at = decoder.raw_decode(text, at)
            arguments = call["parameters"] if "parameters" in call else call["arguments"]
            calls.append((str(call["name"]), json.dumps(arguments, ensure_ascii=False)))
            while at < len(text) and text[at] in ";, \t\r\n":
                at += 1
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return calls


def _as_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _overlap(text: str, marker: str) -> int:
    """Return how many of the last characters of `text` `marker` begins with."""
    for count in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-count:]):
            return count
    return 0
