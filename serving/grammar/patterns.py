"""Translation of Python and ECMAScript regular expressions to llguidance patterns that match whole texts.

Python's own parser reads them. A pattern that cannot be translated exactly is refused with the name of the part.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from paged.serving.grammar.complements import LAST_CHARACTER, Automaton, Ranges, complement_pattern

_SURROGATES = ((0xD800, 0xDFFF),)
ANY_TEXT = "(?s:.)*"
_ASCII = {
    "DIGIT": ((0x30, 0x39),),
    "SPACE": ((0x09, 0x0D), (0x20, 0x20)),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
_ECMA_SPACES = ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
_ECMA = _ASCII | {"SPACE": (*_ECMA_SPACES, (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))}
_LETTERS = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
_NAMES = {
    "ASSERT": "a lookahead or lookbehind that is not at the begin",
    "ASSERT_NOT": "a lookahead or lookbehind that is not at the begin",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
    "AT_BOUNDARY": r"\b",
    "AT_NON_BOUNDARY": r"\B",
}
_BEGINS = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_ENDS = (codes.AT_END, codes.AT_END_STRING)
# A character of a pattern: an escape or any other character.
_CHARACTERS = re.compile(r"\\u\{([0-9A-Fa-f]+)\}|\\u([dD][89abAB]..)\\u([dD][c-fC-F]..)|\\(.)|(.)", re.DOTALL)
_ECMA_ESCAPES = frozenset("dDwWsSbBnrtvf0xu")


class Pattern(NamedTuple):
    """Pattern of whole texts that match `body`, every pattern in `needed`, and no pattern in `banned`."""

    body: str
    needed: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()


def python_pattern(text: str) -> Pattern:
    """Return the pattern of texts that `re.fullmatch` accepts.

    Raises:
        ValueError: the expression is malformed or has an unsupported part.
    """
    return _Translator(text, is_python=True).pattern()


def ecma_pattern(text: str) -> Pattern:
    r"""Return the pattern of texts in which a JSON schema's `pattern` finds a match.

    Where ECMAScript and Python differ, for example in \d or a line break before $, texts must match in both.

    Raises:
        ValueError: the expression is malformed or has an unsupported part.
    """
    return _Translator(_from_ecma(text), is_python=False).pattern()


def literal(text: str) -> str:
    """Return the pattern of a single text."""
    return "".join(_character(ord(character)) for character in text)


class _Translator:
    """Translates one parsed expression.

    A part at an end of the expression gets the pattern of text that may follow outside ("" for a whole match); an
    anchor replaces it by "". A part elsewhere gets None and must not have anchors.
    """

    def __init__(self, text: str, *, is_python: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore warnings of sets whose meaning may change in Python
            try:
                self._parsed = parser.parse(text)
            except (re.error, OverflowError) as error:
                raise ValueError(f"pattern: {error}") from None
        self._is_python = is_python
        self._outside = "" if is_python else ANY_TEXT
        self._is_wide = False  # whether sets hold the characters of both dialects, as in banned texts
        self._is_ahead = False  # whether this is within a lookahead
        self._needed: list[str] = []
        self._banned: list[str] = []

    def pattern(self) -> Pattern:
        flags = self._parsed.state.flags
        if not self._is_python and flags != re.UNICODE:
            raise ValueError("pattern: flags are not supported")
        body = self._sequence(list(self._parsed), flags, self._outside, self._outside, is_first=True)
        return Pattern(body, tuple(self._needed), tuple(self._banned))

    def _sequence(
        self, items: Sequence[Any], flags: int, left: str | None, right: str | None, *, is_first: bool = False
    ) -> str:
        """Translate a sequence of parts. is_first: whether all texts of the expression begin here."""
        begin, end = 0, len(items)
        while begin < end:
            code, value = items[begin]
            if left is not None and code is codes.AT and value in _BEGINS:
                left = self._anchored(value, flags)
            elif is_first and left == "" and code in (codes.ASSERT, codes.ASSERT_NOT) and value[0] == 1:
                self._look_ahead(value[1], flags, is_banned=code is codes.ASSERT_NOT)
            else:
                break
            begin += 1
        while begin < end and right is not None and items[end - 1][0] is codes.AT and items[end - 1][1] in _ENDS:
            end -= 1
            right = self._anchored(items[end][1], flags)
        if begin == end:
            return (left or "") + (right or "")
        texts = []
        for index, (code, value) in enumerate(items[begin:end], begin):
            part_left, part_right = None, None
            if _has_anchor(code, value):
                part_left = left if index == begin else None
                part_right = right if index == end - 1 else None
            if index == begin and part_left is None:
                texts.append(left or "")
            texts.append(self._part(code, value, flags, part_left, part_right))
            if index == end - 1 and part_right is None:
                texts.append(right or "")
        return "".join(texts)

    def _anchored(self, anchor: Any, flags: int) -> str:
        """Return the pattern of text outside an anchor."""
        if flags & re.MULTILINE and anchor in (codes.AT_BEGINNING, codes.AT_END):
            raise ValueError("pattern: the flag m is not supported beside ^ and $")
        if anchor is codes.AT_END and self._is_ahead and (self._is_python or self._is_wide):
            return r"\x{A}?"  # Python's $ also matches before a final line break
        return ""

    def _look_ahead(self, items: Sequence[Any], flags: int, *, is_banned: bool) -> None:
        self._is_ahead, self._is_wide = True, is_banned
        if is_banned and not self._is_python:  # a JSON schema cannot ban a pattern
            self._needed.append(self._complement(items, flags))
        elif is_banned:
            self._banned.append(self._sequence(items, flags, None, ANY_TEXT))
        else:
            self._needed.append(self._sequence(items, flags, None, ANY_TEXT))
        self._is_ahead = self._is_wide = False

    def _complement(self, items: Sequence[Any], flags: int) -> str:
        """Return the pattern of texts that do not begin with a sequence."""
        automaton = Automaton([[]])
        items = list(items)
        is_at_end = False
        while items and items[-1][0] is codes.AT and items[-1][1] in _ENDS:
            is_at_end = True
            self._anchored(items.pop()[1], flags)
        state = self._add(automaton, items, flags, 0)
        end = automaton.state()
        automaton.link(state, None, end)
        if is_at_end:
            automaton.link(state, ((0x0A, 0x0A),), end)
        else:
            automaton.link(end, ((0, LAST_CHARACTER),), end)
        return complement_pattern(automaton, end, _set)

    def _add(self, automaton: Automaton, items: Sequence[Any], flags: int, state: int) -> int:
        """Add a sequence after a state of an automaton; return the state after it."""
        for code, value in items:
            ranges = self._ranges(code, value, flags)
            if ranges is not None:
                end = automaton.state()
                automaton.link(state, ranges, end)
            elif code is codes.SUBPATTERN:
                _, added, removed, inner = value
                end = self._add(automaton, inner, (flags | added) & ~removed, state)
            elif code is codes.BRANCH:
                end = automaton.state()
                for option in value[1]:
                    automaton.link(self._add(automaton, option, flags, state), None, end)
            elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
                end = self._add_repeat(automaton, value, flags, state)
            else:
                raise self._unsupported(code, value)
            state = end
        return state

    def _add_repeat(self, automaton: Automaton, value: Any, flags: int, state: int) -> int:
        low, high, items = value
        for _ in range(low):
            state = self._add(automaton, items, flags, state)
        end = automaton.state()
        automaton.link(state, None, end)
        if high == codes.MAXREPEAT:
            automaton.link(self._add(automaton, items, flags, end), None, end)
            return end
        for _ in range(high - low):
            state = self._add(automaton, items, flags, state)
            automaton.link(state, None, end)
        return end

    def _part(self, code: Any, value: Any, flags: int, left: str | None, right: str | None) -> str:
        if code is codes.SUBPATTERN:
            _, added, removed, items = value
            return f"(?:{self._sequence(items, (flags | added) & ~removed, left, right)})"
        if code is codes.BRANCH:
            options = [self._sequence(items, flags, left, right) for items in value[1]]
            return f"(?:{'|'.join(options)})"
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            low, high, items = value
            max_count = "" if high == codes.MAXREPEAT else str(int(high))
            return f"(?:{self._sequence(items, flags, None, None)}){{{low},{max_count}}}"
        ranges = self._ranges(code, value, flags)
        if ranges is None:
            raise self._unsupported(code, value)
        return _set(ranges)

    def _unsupported(self, code: Any, value: Any) -> ValueError:
        name = str(value if code is codes.AT else code)
        if code is codes.AT and value in _BEGINS + _ENDS:
            return ValueError("pattern: an anchor inside the pattern is not supported")
        return ValueError(f"pattern: {_NAMES.get(name, name)} is not supported")

    def _ranges(self, code: Any, value: Any, flags: int) -> Ranges | None:
        """Return the characters of a part that matches one character; None for any other part."""
        if flags & re.IGNORECASE:
            raise ValueError("pattern: the flag i is not supported")
        if code is codes.LITERAL:
            return ((value, value),)
        if code is codes.NOT_LITERAL:
            return _complement(((value, value),))
        if code is codes.ANY:
            return self._dot(flags)
        if code is codes.IN:
            return self._members(value, flags)
        return None

    def _dot(self, flags: int) -> Ranges:
        if flags & re.DOTALL:
            return ((0, LAST_CHARACTER),)
        if self._is_python or self._is_wide:
            return _complement(((0x0A, 0x0A),))
        return _complement(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))

    def _members(self, items: Sequence[Any], flags: int) -> Ranges:
        """Return the set in brackets: the intersection of both dialects, or their union if `_is_wide`."""
        if self._is_python:
            return self._set_in(items, is_ascii=bool(flags & re.ASCII), is_ecma=False)
        python_ranges = self._set_in(items, is_ascii=False, is_ecma=False)
        ecma_ranges = self._set_in(items, is_ascii=True, is_ecma=True)
        if self._is_wide:
            return _union(python_ranges, ecma_ranges)
        return _complement(_union(_complement(python_ranges), _complement(ecma_ranges)))

    def _set_in(self, items: Sequence[Any], *, is_ascii: bool, is_ecma: bool) -> Ranges:
        ranges: Ranges = ()
        is_negated = False
        for code, value in items:
            if code is codes.NEGATE:
                is_negated = True
            elif code is codes.LITERAL:
                ranges += ((value, value),)
            elif code is codes.RANGE:
                ranges += (value,)
            else:
                name = str(value).removeprefix("CATEGORY_")
                kind = name.removeprefix("NOT_")
                if is_ecma:
                    category = _ECMA[kind]
                elif is_ascii:
                    category = _ASCII[kind]
                else:
                    category = _unicode(kind)
                ranges += category if name == kind else _complement(category)
        ranges = _union(ranges)
        return _complement(ranges) if is_negated else ranges


def _has_anchor(code: Any, value: Any) -> bool:
    """Return whether a part is an anchor or a choice with an anchor."""
    if code is codes.AT:
        return True
    if code is codes.SUBPATTERN:
        return any(_has_anchor(*item) for item in value[3])
    if code is codes.BRANCH:
        return any(_has_anchor(*item) for option in value[1] for item in option)
    return False


def _from_ecma(text: str) -> str:
    r"""Convert an ECMAScript pattern to Python's syntax, except for the meaning of \d and similar classes."""
    if "[]" in text or "[^]" in text:
        raise ValueError("pattern: an empty set of characters is not supported")
    if "{," in text:
        raise ValueError("pattern: a number of times without its least is not supported")
    pieces = []
    for match in _CHARACTERS.finditer(text):
        point, high, low, escape, character = match.groups()
        if point is not None or high is not None:
            if point is not None:
                code = int(point, 16)
            else:
                code = 0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF)
            pieces.append(f"\\U{code:08x}")
        elif escape is None:
            pieces.append(character)
        elif escape.isascii() and escape.isalnum() and escape not in _ECMA_ESCAPES:
            raise ValueError(f"pattern: \\{escape} is not supported")
        else:
            pieces.append("\\" + escape)
    python = "".join(pieces)
    if "(?P" in python or "(?#" in python:
        raise ValueError("pattern: (?P and (?# are not in ECMAScript")
    return re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", python)


@lru_cache
def _unicode(kind: str) -> Ranges:
    r"""Return the code points that \d, \s or \w match in this Python's `re`."""
    text = "".join(map(chr, range(LAST_CHARACTER + 1)))
    ranges = [(match.start(), match.end() - 1) for match in re.finditer(f"{_LETTERS[kind]}+", text)]
    return tuple(ranges)


def _union(*sets: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for ranges in sets for pair in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    gaps = []
    start = 0
    for first, last in _union(ranges):
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= LAST_CHARACTER:
        gaps.append((start, LAST_CHARACTER))
    return tuple(gaps)


def _set(ranges: Ranges) -> str:
    """Return the pattern of a set, without surrogates, which texts cannot contain."""
    ranges = _complement(_union(_complement(ranges), _SURROGATES))
    if not ranges:
        raise ValueError("pattern: a set without characters matches nothing")
    if ranges == ((ranges[0][0], ranges[0][0]),):
        return _character(ranges[0][0])
    return f"[{''.join(f'{_character(first)}-{_character(last)}' for first, last in ranges)}]"


def _character(code: int) -> str:
    """Return the pattern of a single character."""
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"the surrogate U+{code:04X} stands in no text")
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{code:X}}}"
