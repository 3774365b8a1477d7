"""Takes an answer's text apart while it comes: reasoning, content, and calls of tools in the forms of known models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, NamedTuple

from paged.executors.serving.tool_formats import PARAMETER, ToolFormat

_THINK, _THOUGHT = "<think>", "</think>"
_BETWEEN_CALLS = " \t\r\n;,]"
_CLOSING = re.compile("</(?:parameter|function|tool_call)>")


class Delta(NamedTuple):
    """Some content or reasoning; the name of a tool that is called; or the next piece of its arguments, in JSON."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class AnswerReader:
    """Reads one answer. What may be the beginning of a marker waits for the next text.

    Args:
        tools: how calls are written; None leaves them in the content.
        has_thoughts: whether what comes before </think> is reasoning.
        thinks: whether the prompt ends within it.
    """

    def __init__(self, tools: ToolFormat | None, *, has_thoughts: bool, thinks: bool) -> None:
        self._tools, self._held, self._is_last, self.num_calls = tools, "", False, 0
        self._deltas: list[Delta] = []
        self._run = self._answer(has_thoughts=has_thoughts, thinks=thinks)
        next(self._run)

    def read(self, text: str, *, is_last: bool = False) -> list[Delta]:
        """Return what `text` adds; with `is_last` everything that still waits, too."""
        self._held += text
        self._is_last, self._deltas = is_last, []
        next(self._run, None)
        return self._deltas

    # The parts of an answer, one after the other; each `yield` waits for more text.

    def _answer(self, *, has_thoughts: bool, thinks: bool) -> Iterator[None]:
        yield
        if has_thoughts and not thinks:
            yield from self._wait_while(lambda text: _THINK.startswith(text.lstrip()) and text.lstrip() != _THINK)
            if thinks := self._held.lstrip().startswith(_THINK):
                self._held = self._held.lstrip().removeprefix(_THINK)
        if thinks:
            yield from self._pass_up_to(_THOUGHT, "reasoning")
            yield from self._drop("\n")
        if self._tools is None:
            yield from self._pass_up_to("", "content")
            return
        while self._held or not self._is_last:
            if self._tools.bare:
                yield from self._wait_while(lambda text: not text.strip())
            if self._tools.bare and self._held.lstrip().startswith("{"):
                yield from self._call(self._tools, "")
            elif (yield from self._pass_up_to(self._tools.begin, "content")):
                yield from self._call(self._tools, self._tools.begin)

    def _call(self, form: ToolFormat, opened: str) -> Iterator[None]:
        """Pass on what is called behind a marker, its arguments as they come; what is no call is content."""
        yield from self._wait_while(lambda text: not (form.head.match(text) or (form.end and form.end in text)))
        head = form.head.match(self._held)
        if head is None or head.lastgroup is None:
            body, found, self._held = self._held.partition(form.end) if form.end else (self._held, "", "")
            if not (calls := form.whole(body)):
                return self._put("content", f"{opened}{body}{found}")
            for name, arguments in calls:
                self._begin(name, arguments)
        else:
            self._held = self._held[head.end() :]
            self._begin(head[head.lastgroup])
            yield from self._elements() if head.lastgroup == "xml" else self._object()
            if head.lastgroup == "json":  # the object around name and arguments
                yield from self._wait_while(lambda text: "}" not in text)
                self._held = self._held.partition("}")[2]
        yield from self._drop(_BETWEEN_CALLS)
        yield from self._wait_while(lambda text: form.end.startswith(text) and text != form.end)
        if form.end and self._held.startswith(form.end):
            self._held = self._held.removeprefix(form.end)
            yield from self._drop("\n")

    def _object(self) -> Iterator[None]:
        """Pass on a JSON object, up to the brace that closes it."""
        depth, is_quoted, is_escaped = 0, False, False
        while True:
            for index, letter in enumerate(self._held):
                if is_escaped or (is_quoted and letter not in '"\\'):
                    is_escaped = False
                elif letter == "\\":
                    is_escaped = True
                elif letter == '"':
                    is_quoted = not is_quoted
                else:
                    depth += (letter in "{[") - (letter in "}]")
                    if not depth:
                        self._put("arguments", self._held[: index + 1])
                        self._held = self._held[index + 1 :]
                        return
            self._put("arguments", self._held)
            self._held = ""
            if self._is_last:
                return
            yield

    def _elements(self) -> Iterator[None]:
        """Pass on an element for each argument as a JSON object."""
        before = "{"
        while True:
            yield from self._wait_while(lambda text: not (_CLOSING.search(text) and PARAMETER.match(text)))
            found = PARAMETER.match(self._held)
            self._held = self._held[found.end() if found else 0 :]
            if found is None or found[1] is None:
                self._put("arguments", "{}" if before == "{" else "}")
                return
            self._put("arguments", f"{before}{json.dumps(found[1])}: {_as_json(found[2])}")
            before = ", "

    def _pass_up_to(self, marker: str, kind: Literal["content", "reasoning"]) -> Generator[None, None, bool]:
        """Pass on the text before `marker`; return whether the marker came."""
        while True:
            at = self._held.find(marker) if marker else -1
            keep = 0 if self._is_last or at >= 0 else _overlap(self._held, marker)
            end = at if at >= 0 else len(self._held) - keep
            self._put(kind, self._held[:end])
            self._held = self._held[end + len(marker) if at >= 0 else end :]
            if at >= 0 or self._is_last:
                return at >= 0
            yield

    def _wait_while(self, condition: Callable[[str], bool]) -> Iterator[None]:
        while not self._is_last and condition(self._held):
            yield

    def _drop(self, characters: str) -> Iterator[None]:
        yield from self._wait_while(lambda text: not text.lstrip(characters))
        self._held = self._held.lstrip(characters)

    def _begin(self, name: str, arguments: str = "") -> None:
        self._deltas.append(Delta("call", name))
        self._put("arguments", arguments)
        self.num_calls += 1

    def _put(self, kind: Any, text: str) -> None:
        if text:
            self._deltas.append(Delta(kind, text))


def _as_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _overlap(text: str, marker: str) -> int:
    """Return how many of the last characters of `text` `marker` begins with."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
