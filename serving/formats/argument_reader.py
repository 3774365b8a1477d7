"""Parts of a parser that read a call's arguments in the forms that models write, and emit them as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paged.serving.formats.answer_text import AnswerText, Reading
from paged.serving.formats.tool_formats import GEMMA_QUOTE, Tags, ToolFormat, is_text

_LONGEST_LITERAL = 1 << 14  # characters; Python parses so many in 50 ms
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BEHIND_STRINGS = ("", *",:=)]} \t\r\n")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_OPENING, _CLOSING = {"(": "[", "[": "[", "{": "{"}, {")": "]", "]": "]", "}": "}"}
_JSON_ENDS = {"[": "]", "{": "}"}


class ArgumentReader(AnswerText):
    """Parser of arguments. parameters: JSON schemas of the tools by name; None if unknown."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        super().__init__()
        self._parameters = parameters

    def _plain_string(self) -> Reading[str]:
        """Read a JSON string without escapes and return its content; "" if none comes next."""
        if not (yield from self._comes('"')):
            return ""
        text = yield from self._while(lambda letter: letter not in '"\\')
        if (yield from self._comes('"')):
            return text
        return ""

    def _any_value(self, take: Callable[[str], None]) -> Reading[None]:
        """Read a JSON value."""
        first = yield from self._next()
        if first in ("{", "["):
            yield from self._object(take)
        elif first == '"':
            yield from self._string(take)
        else:
            take((yield from self._while(lambda letter: letter not in ",}] \t\r\n")))

    def _string(self, take: Callable[[str], None]) -> Reading[None]:
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

    def _object(self, take: Callable[[str], None]) -> Reading[None]:
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

    def _tags(self, form: ToolFormat, name: str) -> Reading[bool]:
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

    def _elements(self, tags: Tags, schema: Any) -> Reading[None]:
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

    def _loose_object(self) -> Reading[None]:
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
            elif letter in _CLOSING:
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

    def _python_string(self, quote: str) -> Reading[None]:
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

    def _is_no_call(self) -> bool:
        head, self._head = self._head or [], None
        self._put("content", "".join(head))
        return False


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
