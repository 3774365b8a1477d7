"""Text of an answer as it arrives: parts of a parser that consume it, and the deltas that they emit.

A parser part is a generator, which waits at each `yield` for more text and consumes each character once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Kind = Literal["content", "reasoning", "call", "arguments"]
Reading = Generator[None, None, T]
"""Parser coroutine that returns T; each `yield` waits for more text."""

NAME = re.compile(r"[\w.:/-]+")
_PIECES = re.compile(r"(\s+|\{\w+\})")


class Delta(NamedTuple):
    """New content or reasoning, the name of a called tool, or the next piece of its arguments in JSON."""

    kind: Kind
    text: str


class AnswerText:
    """The text of one answer and the deltas of it.

    Attributes:
        num_calls: number of calls so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._is_last = False
        self._text, self._at = "", 0  # received text, and how much of it is consumed
        self._head: list[str] | None = None  # consumed text of a possible call; it becomes content if it is no call
        self._parts: list[tuple[Kind, list[str]]] = []

    def _next(self) -> Reading[str]:
        """Return the next character without consuming it; "" at the end of the answer."""
        while self._at == len(self._text) and not self._is_last:
            yield
        return self._text[self._at : self._at + 1]

    def _advance(self, end: int) -> str:
        begin, self._at = self._at, end
        text = self._text[begin:end]
        if self._head is not None:
            self._head.append(text)
        return text

    def _while(self, condition: Callable[[str], object]) -> Reading[str]:
        """Read characters while they satisfy a condition."""
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

    def _comes(self, text: str) -> Reading[bool]:
        """Read a text if it comes next; return whether it did."""
        while True:
            part = self._text[self._at : self._at + len(text)]
            if part == text:
                self._advance(self._at + len(text))
                return True
            if self._is_last or not text.startswith(part):
                return False
            yield

    def _matches(self, text: str) -> Reading[str | None]:
        """Read a text of a format; return the value of its last placeholder, or None if the text does not come."""
        value = ""
        for piece in _PIECES.split(text):
            if piece.isspace():
                yield from self._while(str.isspace)
            elif piece.startswith("{") and piece.endswith("}"):
                value = yield from self._while(lambda letter: NAME.match(letter) is not None)
            elif piece and not (yield from self._comes(piece)):
                return None
        return value

    def _skip(self, text: str) -> Reading[None]:
        """Read the pieces of a text that come next; skip missing ones."""
        for piece in _PIECES.split(text):
            if piece.isspace():
                yield from self._while(str.isspace)
            elif piece.startswith("{") and piece.endswith("}"):
                yield from self._while(lambda letter: NAME.match(letter) is not None)
            elif piece:
                yield from self._comes(piece)

    def _up_to(self, markers: tuple[str, ...], take: Callable[[str], None]) -> Reading[str]:
        """Read up to one of some markers or the end; `take` gets the text before it. Return the marker."""
        while (yield from self._next()):
            match = _any_of(markers).search(self._text, self._at) if markers else None
            if match is not None:
                take(self._advance(match.start()))
                self._advance(match.end())
                return match[0]
            held = 0
            if not self._is_last:
                for marker in markers:
                    held = max(held, _overlap(self._text, self._at, marker))
            take(self._advance(len(self._text) - held))
            if held:
                yield
        return ""

    # Output.

    def _begin(self, name: str) -> None:
        self._head = None
        self._parts.append(("call", [name]))
        self.num_calls += 1

    def _put_content(self, text: str) -> None:
        self._put("content", text)

    def _put_arguments(self, text: str) -> None:
        self._put("arguments", text)

    def _put_escaped(self, text: str) -> None:
        """Emit part of a text, escaped for JSON, without quotes."""
        self._put("arguments", json.dumps(text, ensure_ascii=False)[1:-1])

    def _put(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if self._parts and self._parts[-1][0] == kind:
            self._parts[-1][1].append(text)
        else:
            self._parts.append((kind, [text]))


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _overlap(text: str, begin: int, marker: str) -> int:
    """Return how many characters at the end of `text`, after `begin`, are a beginning of `marker`."""
    for count in range(min(len(text) - begin, len(marker) - 1), 0, -1):
        if marker.startswith(text[-count:]):
            return count
    return 0
