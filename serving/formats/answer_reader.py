"""Incremental parser of answers into reasoning, content and tool calls, driven by the description of a format.

The reader consumes each character once and holds back at most a possible marker. Therefore the cost of an answer is
linear in its length, however it is cut. Text that turns out to be no call is content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

from paged.serving.formats.reasoning_formats import Reasoning
from paged.serving.formats.tool_formats import GEMMA_QUOTE, Tags, ToolFormat, is_text

T = TypeVar("T")
_Kind = Literal["content", "reasoning", "call", "arguments"]
_Reading = Generator[None, None, T]
"""Parser coroutine that returns T; each `yield` waits for more text."""

_LONGEST_NAME = 256
_LONGEST_LITERAL = 1 << 14  # characters; Python parses so many in 50 ms
_NAME = re.compile(r"[\w.:/-]+")
_PIECES = re.compile(r"(\s+|\{\w+\})")
_BETWEEN_CALLS = " \t\r\n;,"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BEHIND_STRINGS = ("", *",:=)]} \t\r\n")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_OPENING, _CLOSING = {"(": "[", "[": "[", "{": "{"}, {")": "]", "]": "]", "}": "}"}
_JSON_ENDS = {"[": "]", "{": "}"}
# Markers of OpenAI's harmony format.
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_RECIPIENT = re.compile(r"\bto=functions\.([\w.:/-]+)")


class Delta(NamedTuple):
    """New content or reasoning, the name of a called tool, or the next piece of its arguments in JSON."""

    kind: _Kind
    text: str


class AnswerReader:
    """Parser of one answer. A possible beginning of a marker waits for the next text.

    Args:
        tools: format of calls; None leaves calls in the content.
        reasoning: format of reasoning; None leaves reasoning in the content.
        thinks: whether the prompt ends within reasoning.
        parameters: JSON schemas of the tools by name, which tell which arguments without quotes are texts. None if
            unknown. If given, a call without markers counts only if its tool is known.
        is_one: whether the answer ends with its first call; later text is left out.
        continues: whether the prompt ends within the answer's content, so that the text is not its beginning.

    Attributes:
        num_calls: number of calls so far.
        is_complete: whether the only call (`is_one`) is complete.
        num_reasoning: number of texts so far that began and ended within reasoning.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: Reasoning | None = None,
        *,
        thinks: bool = False,
        parameters: Mapping[str, Any] | None = None,
        is_one: bool = False,
        continues: bool = False,
    ) -> None:
        self._tools, self._reasoning, self._parameters = tools, reasoning, parameters
        self._is_one, self.is_complete = is_one, False
        self.num_calls, self.num_reasoning = 0, 0
        self._is_last, self._is_reasoning = False, thinks
        self._text, self._at = "", 0  # received text, and how much of it is consumed
        self._head: list[str] | None = None  # consumed text of a possible call; it becomes content if it is no call
        self._parts: list[tuple[_Kind, list[str]]] = []
        self._frame = () if reasoning is None else reasoning.frame
        self._begins: tuple[str, ...] = ()
        if tools is not None:
            self._begins = tools.begins
        has_channels = reasoning is not None and reasoning.has_channels
        if has_channels:
            self._run = self._channels(thinks)
        else:
            self._run = self._answer(thinks, continues)
        next(self._run)

    def read(self, *texts: str, is_last: bool = False) -> list[Delta]:
        """Return the deltas of new texts; with `is_last` also everything held back."""
        self._parts = []
        for text in texts:
            was_reasoning = self._is_reasoning
            self._text, self._at = self._text[self._at :] + text, 0
            next(self._run, None)
            self.num_reasoning += was_reasoning and self._is_reasoning
        if is_last:
            self._is_last = True
            next(self._run, None)
        return [Delta(kind, "".join(pieces)) for kind, pieces in self._parts]

    # Parts of an answer.

    def _answer(self, thinks: bool, continues: bool) -> _Reading[None]:
        yield
        spaces = ""
        is_within_content = continues and not thinks
        if not is_within_content:
            spaces = yield from self._thoughts(thinks)
        while (yield from self._next()):
            if self._tools is not None and self._tools.bare and not is_within_content:
                spaces += yield from self._while(str.isspace)
                if (yield from self._next()) == self._tools.bare:
                    is_call = yield from self._calls(self._tools, spaces, is_bare=True)
                    spaces = ""
                    if is_call:
                        spaces = yield from self._thoughts(False)
                        continue
            self._put("content", spaces)
            spaces, is_within_content = "", False
            marker = yield from self._up_to((*self._begins, *self._frame), self._put_content)
            if self._tools is None or marker not in self._begins:
                continue
            is_call = yield from self._calls(self._tools, marker)
            if is_call:
                spaces = yield from self._thoughts(False)
        self._put("content", spaces)

    def _thoughts(self, thinks: bool) -> _Reading[str]:
        """Emit reasoning if it comes next; return leading white space that is not reasoning."""
        spaces = ""
        if self._reasoning is None:
            return spaces
        if not thinks:
            spaces = yield from self._while(str.isspace)
            thinks = yield from self._comes(self._reasoning.begin)
        if thinks:
            spaces = ""
            yield from self._text_of("reasoning", (self._reasoning.end,))
            yield from self._while("\n".__contains__)
        return spaces

    def _channels(self, thinks: bool) -> _Reading[None]:
        """Read harmony messages: a header with channel and recipient, then the text."""
        yield
        kind: _Kind = "reasoning" if thinks else "content"
        spaces = yield from self._while(str.isspace)
        marker = "to="
        if not (yield from self._comes(marker)):
            self._put(kind, spaces)
            marker = yield from self._text_of(kind, _MESSAGE_ENDS)
        while (yield from self._next()):
            if marker not in (_START, _CHANNEL, "to="):
                marker = yield from self._up_to((_START, _CHANNEL), self._put_content)
                continue
            pieces = [marker]
            if not (yield from self._up_to((_MESSAGE,), pieces.append)):
                self._put("content", "".join(pieces))
                return
            header = "".join(pieces)
            recipient = _RECIPIENT.search(header)
            if recipient is not None and self._tools is not None:
                marker = yield from self._message_of_call(recipient[1])
                continue
            kind = "reasoning" if f"{_CHANNEL}analysis" in header else "content"
            marker = yield from self._text_of(kind, _MESSAGE_ENDS)

    def _message_of_call(self, name: str) -> _Reading[str]:
        """Emit a call whose arguments are a message; return the marker after it."""
        self._begin(name)
        yield from self._while(str.isspace)
        if (yield from self._next()) == "{":
            yield from self._object(self._put_arguments)
            yield from self._end_of_call()
            return (yield from self._up_to(_MESSAGE_ENDS, lambda text: None))
        marker = yield from self._up_to(_MESSAGE_ENDS, self._put_arguments)
        yield from self._end_of_call()
        return marker

    def _text_of(self, kind: _Kind, ends: tuple[str, ...]) -> _Reading[str]:
        """Emit a text up to one of some markers; return the marker."""
        self._is_reasoning = kind == "reasoning"
        marker = yield from self._up_to(ends, partial(self._put, kind))
        self._is_reasoning = False
        return marker

    # Calls

    def _calls(self, form: ToolFormat, opened: str, *, is_bare: bool = False) -> _Reading[bool]:
        """Read the calls after a marker. If there is none, return False and leave the text as content."""
        self._head = [opened]
        if not (yield from self._call(form, is_bare=is_bare)):
            return self._is_no_call()
        between_calls = _BETWEEN_CALLS + "]" * form.is_list
        while True:
            yield from self._end_of_call()
            between = yield from self._while(between_calls.__contains__)
            if form.end and (yield from self._comes(form.end)):
                yield from self._while("\n".__contains__)
                return True
            is_ended = not form.is_section or (form.is_list and "]" in between)
            if is_ended or not (yield from self._next()):
                return True
            self._head = []
            if not (yield from self._call(form, is_bare=is_bare)):
                self._is_no_call()
                return True

    def _end_of_call(self) -> _Reading[None]:
        """Continue after a call, or drop all further text if the answer ends with its first call."""
        self.is_complete = self._is_one
        while self.is_complete:
            self._at = len(self._text)
            yield

    def _is_no_call(self) -> bool:
        head, self._head = self._head or [], None
        self._put("content", "".join(head))
        return False

    def _call(self, form: ToolFormat, *, is_bare: bool) -> _Reading[bool]:
        """Read one call, emitting its arguments as they come; return False if it is no call."""
        yield from self._while(str.isspace)
        yield from self._comes("[")
        yield from self._while(str.isspace)
        if (yield from self._next()) == "{":
            return (yield from self._named_object(form, is_bare=is_bare))
        before, after, last = form.call
        if form.arguments == "object" or (yield from self._matches(before.lstrip().removesuffix(form.prefix))) is None:
            return False
        name = yield from self._while(lambda letter: _NAME.match(letter) is not None)
        name = name.removeprefix(form.prefix)
        if after.startswith(":{index}"):
            name = name.rpartition(":")[0] or name
            after = after.removeprefix(":{index}")
        if not self._is_name(name, is_bare=is_bare):
            return False
        if form.arguments == "tags":
            yield from self._skip(after)
            return (yield from self._tags(form, name))
        if form.extra and (yield from self._comes(form.extra.partition("{")[0])):
            yield from self._while(lambda letter: _NAME.match(letter) is not None)
        is_open = form.arguments == "json" and (yield from self._next()) == "{"
        if not is_open and (yield from self._matches(after)) is None:
            return False
        if form.arguments == "json":
            yield from self._while(str.isspace)
            if (yield from self._next()) != "{":
                return False
            self._begin(name)
            yield from self._object(self._put_arguments)
        elif form.arguments == "elements":
            self._begin(name)
            yield from self._elements(form.tags, (self._parameters or {}).get(name))
        else:
            self._begin(name)
            yield from self._loose_object(_CLOSING)
        yield from self._skip(last)
        return True

    def _is_name(self, name: str, *, is_bare: bool) -> bool:
        if len(name) > _LONGEST_NAME or _NAME.fullmatch(name) is None:
            return False
        return not is_bare or self._parameters is None or name in self._parameters

    def _named_object(self, form: ToolFormat, *, is_bare: bool) -> _Reading[bool]:
        """Read a call that is a JSON object with name and arguments, in any order."""
        yield from self._comes("{")
        name, pieces = "", list[str]()
        while True:
            yield from self._while(lambda letter: letter.isspace() or letter == ",")
            if (yield from self._comes("}")):
                break
            key = yield from self._plain_string()
            yield from self._while(str.isspace)
            if not (yield from self._comes(":")):
                return False
            yield from self._while(str.isspace)
            if key == "name":
                name = yield from self._plain_string()
                if not self._is_name(name, is_bare=is_bare):
                    return False
            elif key in ("arguments", "parameters"):
                if name and (yield from self._next()) == "{":
                    self._begin(name)
                    yield from self._object(self._put_arguments)
                    yield from self._close(form.end)
                    return True
                pieces.clear()
                yield from self._any_value(pieces.append)
            elif key in ("type", "id", "index"):
                yield from self._any_value(lambda text: None)
            else:
                return False
        arguments = "".join(pieces).strip()
        if not name or not arguments:
            return False
        self._begin(name)
        self._put_arguments("{}" if arguments == "null" else arguments)
        return True

    def _close(self, end: str) -> _Reading[None]:
        """Read the rest of the object around name and arguments, whose closing brace may be missing."""
        while (yield from self._next()):
            if (yield from self._comes("}")):
                return
            if end and (yield from self._next()) == end[0]:
                return
            self._advance(self._at + 1)
            yield from self._while(lambda letter: letter not in ("}", end[:1]))

    # Arguments

    def _plain_string(self) -> _Reading[str]:
        """Read a JSON string without escapes and return its content; "" if none comes next."""
        if not (yield from self._comes('"')):
            return ""
        text = yield from self._while(lambda letter: letter not in '"\\')
        if (yield from self._comes('"')):
            return text
        return ""

    def _any_value(self, take: Callable[[str], None]) -> _Reading[None]:
        """Read a JSON value."""
        first = yield from self._next()
        if first in ("{", "["):
            yield from self._object(take)
        elif first == '"':
            yield from self._string(take)
        else:
            take((yield from self._while(lambda letter: letter not in ",}] \t\r\n")))

    def _string(self, take: Callable[[str], None]) -> _Reading[None]:
        take(self._advance(self._at + 1))
        while (yield from self._next()):
            take((yield from self._while(lambda letter: letter not in '"\\')))
            if not (yield from self._next()):
                return
            letter = self._advance(self._at + 1)
            take(letter)
            if letter == '"':
                return
            if (yield from self._next()):
                take(self._advance(self._at + 1))

    def _object(self, take: Callable[[str], None]) -> _Reading[None]:
        """Emit a JSON object or list, up to its closing bracket."""
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
                        take(self._advance(index + 1))
                        return
            take(self._advance(len(self._text)))

    def _tags(self, form: ToolFormat, name: str) -> _Reading[bool]:
        """Emit the tags of arguments as a JSON object; return False if neither a tag nor the end comes."""
        begin, middle, end = form.tags[:3]
        ends: tuple[str, ...] = (end.rstrip(),)
        if form.tags.is_in_lines:
            ends = (f"\n{end.rstrip()}", *ends)
        schema = (self._parameters or {}).get(name)
        before = ""  # JSON before the next argument
        while True:
            yield from self._while(str.isspace)
            if before:
                self._head = []
            if not (yield from self._comes(begin)):
                break
            key = yield from self._while(lambda letter: letter not in (middle[0], "\n"))
            kind = yield from self._matches(middle)
            if not key or kind is None:
                if not before:
                    return False
                self._put_arguments("}")
                self._is_no_call()
                return True
            if not before:
                self._begin(name)
            self._head = None
            if form.tags.is_in_lines:
                yield from self._comes("\n")
            self._put_arguments(f"{before or '{'}{_dumps(key)}: ")
            before = ", "
            value_schema = _inner(schema, key, is_item=False)
            if kind in ("true", "string") or (not kind and is_text(value_schema)):
                self._put_arguments('"')
                if not (yield from self._up_to(ends, self._put_escaped)):
                    return True
                self._put_arguments('"')
                continue
            pieces: list[str] = []
            if not (yield from self._up_to(ends, pieces.append)):
                self._put_arguments("".join(pieces))
                return True
            self._put_arguments(_as_json("".join(pieces), is_known=isinstance(value_schema, Mapping)))
        if before:
            self._head = None
        is_ended = yield from self._comes(form.call[2].strip() or form.end)
        if not (before or is_ended):
            return False
        if not before:
            self._begin(name)
            self._put_arguments("{")
        self._put_arguments("}")
        yield from self._skip(form.call[2])
        return True

    def _elements(self, tags: Tags, schema: Any) -> _Reading[None]:
        """Emit elements as a JSON object, up to the tag that closes the call.

        An element contains a text or elements. These form a list if the schema or their name says so.
        """
        self._put_arguments("{")
        # Closing bracket and schema of each open element. The bracket is "" while the element may still be a text.
        brackets, schemas, comma = ["}"], [schema], ""
        pieces: list[str] = []
        while (yield from self._up_to((tags.begin,), pieces.append)):
            text = "".join(pieces)
            pieces.clear()
            tag = yield from self._while(lambda letter: letter != tags.middle)
            yield from self._comes(tags.middle)
            if not tag.startswith("/"):
                schema = schemas[-1]
                if not brackets[-1]:
                    opening = "[" if _is_list(schema, tag) else "{"
                    self._put_arguments(opening)
                    brackets[-1] = _JSON_ENDS[opening]
                is_item = brackets[-1] == "]"
                self._put_arguments(comma)
                if not is_item:
                    self._put_arguments(f"{_dumps(tag)}: ")
                comma = ""
                brackets.append("")
                schemas.append(_inner(schema, tag, is_item=is_item))
                continue
            comma = ", "
            schema = schemas.pop()
            bracket = brackets.pop()
            if bracket:
                self._put_arguments(bracket)
            elif not text.strip() and _has_type(schema, "array"):
                self._put_arguments("[]")
            elif not text.strip() and _has_type(schema, "object"):
                self._put_arguments("{}")
            elif is_text(schema):
                self._put_arguments(_dumps(text))
            else:
                self._put_arguments(_as_json(text, is_known=isinstance(schema, Mapping)))
            if not brackets:
                return

    def _loose_object(self, closing: Mapping[str, str]) -> _Reading[None]:
        """Emit the arguments of a Python call, or of Gemma's braces, as a JSON object."""
        self._put_arguments("{")
        brackets = ["}"]  # closing brackets of open values
        is_key, comma = True, ""
        while (yield from self._next()):
            yield from self._while(str.isspace)
            letter = yield from self._next()
            if letter in _OPENING:
                self._advance(self._at + 1)
                opening = _OPENING[letter]
                self._put_arguments(f"{comma}{opening}")
                brackets.append(_JSON_ENDS[opening])
                is_key, comma = letter == "{", ""
            elif letter in closing:
                self._advance(self._at + 1)
                self._put_arguments(brackets.pop())
                is_key, comma = False, ""
                if not brackets:
                    return
            elif letter == ",":
                self._advance(self._at + 1)
                is_key, comma = brackets[-1] == "}", ", "
            elif letter in (":", "="):
                self._advance(self._at + 1)
                self._put_arguments(": ")
                is_key = False
            elif letter in ("'", '"'):
                self._advance(self._at + 1)
                self._put_arguments(f'{comma}"')
                comma = ""
                yield from self._python_string(letter)
                self._put_arguments('"')
            elif letter == "<" and (yield from self._comes(GEMMA_QUOTE)):
                self._put_arguments(f'{comma}"')
                comma = ""
                yield from self._up_to((GEMMA_QUOTE,), self._put_escaped)
                self._put_arguments('"')
            elif letter:
                word = self._advance(self._at + 1)
                word += yield from self._while(lambda letter: letter not in " \t\r\n,:=()[]{}'\"<")
                if not is_key and (word in _CONSTANTS or _NUMBER.fullmatch(word)):
                    self._put_arguments(comma + _CONSTANTS.get(word, word))
                else:
                    self._put_arguments(comma + _dumps(word))
                comma = ""

    def _python_string(self, quote: str) -> _Reading[None]:
        """Emit the content of a Python string, escaped for JSON, without quotes."""
        while (yield from self._next()):
            text = yield from self._while(lambda letter: letter != quote and letter != "\\")
            self._put_escaped(text)
            if not (yield from self._next()):
                return
            if self._advance(self._at + 1) == quote:
                if (yield from self._next()) in _BEHIND_STRINGS:
                    return
                self._put_escaped(quote)  # LFM2's template writes it without a backslash
                continue
            letter = yield from self._next()
            if not letter:
                return
            self._advance(self._at + 1)
            digits = ""
            while len(digits) < _HEX_DIGITS.get(letter, 0) and (yield from self._next()) in "0123456789abcdefABCDEF":
                if not (yield from self._next()):
                    break
                digits += self._advance(self._at + 1)
            if letter in _HEX_DIGITS and digits and int(digits, 16) < 0x110000:
                self._put_arguments(json.dumps(chr(int(digits, 16)))[1:-1])
            elif letter in ("'", '"', "\\"):
                self._put_escaped(letter)
            else:
                self._put_escaped(_ESCAPES.get(letter, f"\\{letter}{digits}"))

    # Primitives; each consumes a character once.

    def _next(self) -> _Reading[str]:
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

    def _while(self, condition: Callable[[str], object]) -> _Reading[str]:
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

    def _comes(self, text: str) -> _Reading[bool]:
        """Read a text if it comes next; return whether it did."""
        while True:
            part = self._text[self._at : self._at + len(text)]
            if part == text:
                self._advance(self._at + len(text))
                return True
            if self._is_last or not text.startswith(part):
                return False
            yield

    def _matches(self, text: str) -> _Reading[str | None]:
        """Read a text of a format; return the value of its last placeholder, or None if the text does not come."""
        value = ""
        for piece in _PIECES.split(text):
            if piece.isspace():
                yield from self._while(str.isspace)
            elif piece.startswith("{") and piece.endswith("}"):
                value = yield from self._while(lambda letter: _NAME.match(letter) is not None)
            elif piece and not (yield from self._comes(piece)):
                return None
        return value

    def _skip(self, text: str) -> _Reading[None]:
        """Read the pieces of a text that come next; skip missing ones."""
        for piece in _PIECES.split(text):
            if piece.isspace():
                yield from self._while(str.isspace)
            elif piece.startswith("{") and piece.endswith("}"):
                yield from self._while(lambda letter: _NAME.match(letter) is not None)
            elif piece:
                yield from self._comes(piece)

    def _up_to(self, markers: tuple[str, ...], take: Callable[[str], None]) -> _Reading[str]:
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

    def _put(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if self._parts and self._parts[-1][0] == kind:
            self._parts[-1][1].append(text)
        else:
            self._parts.append((kind, [text]))


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _has_type(schema: Any, kind: str) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == kind


def _is_list(schema: Any, tag: str) -> bool:
    """Return whether an element with a `tag` element in it is a list."""
    return _has_type(schema, "array") or (tag == "item" and not _has_type(schema, "object"))


def _inner(schema: Any, tag: str, *, is_item: bool) -> Any:
    """Return the schema of an inner element; None if it is unknown."""
    if not isinstance(schema, Mapping):
        return None
    if is_item:
        return schema.get("items")
    properties = schema.get("properties")
    return properties.get(tag) if isinstance(properties, Mapping) else None


def _as_json(text: str, *, is_known: bool) -> str:
    """Convert a value to JSON. is_known: whether its schema is known, so that Python's None or True are no texts."""
    readers: list[Callable[[str], Any]] = [json.loads]
    if is_known and len(text) <= _LONGEST_LITERAL:
        readers.append(ast.literal_eval)
    for read in readers:
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return _dumps(text)


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _overlap(text: str, begin: int, marker: str) -> int:
    """Return how many characters at the end of `text`, after `begin`, are a beginning of `marker`."""
    for count in range(min(len(text) - begin, len(marker) - 1), 0, -1):
        if marker.startswith(text[-count:]):
            return count
    return 0
