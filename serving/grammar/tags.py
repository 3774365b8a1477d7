"""Translation of structural tags to llguidance grammars in its dialect of Lark.

A sequence of texts and patterns becomes one terminal, so that its parts are not lexed separately. JSON and choices
split the sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paged.serving.grammar.json_schemas import kept_schema, text_patterns
from paged.serving.grammar.patterns import ANY_TEXT, Pattern, literal, python_pattern


class UnknownTagError(ValueError):
    """A structural tag has an element that only xgrammar supports."""


def json_grammar(schema: Any) -> str:
    """Return the grammar of a schema's values, with one space after commas and colons.

    Raises:
        ValueError: a keyword of the schema is malformed or cannot be enforced.
    """
    separators = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"start: %json {json.dumps(kept_schema(schema) | {'x-guidance': separators})}"


def pattern_grammar(pattern: Pattern) -> str:
    """Return the grammar of a pattern's texts."""
    return f"start: T\nT: {_terminal(pattern)}"


def choice_grammar(texts: Sequence[str]) -> str:
    """Return the grammar of a choice of texts."""
    return pattern_grammar(Pattern("|".join(map(literal, texts))))


def tag_grammar(tag: Any, special: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag. special: id by text of special tokens, which are matched as tokens.

    Raises:
        UnknownTagError: it has an unknown element.
        ValueError: it is malformed, or a schema in it cannot be enforced.
    """
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise UnknownTagError("structural_tag: no format")
    return _Grammar(special).text(tag["format"])


def _terminal(pattern: Pattern) -> str:
    parts = [f"/(?:{part})/" for part in (pattern.body, *pattern.needed)]  # `//` begins a comment
    parts += [f"~/(?:{part})/" for part in pattern.banned]
    return " & ".join(parts)


class _Grammar:
    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []

    def text(self, element: Any) -> str:
        start = self._rule(self._parts(element))
        return "\n".join([f"start: {start}", *self._rules])

    def _parts(self, element: Any) -> list[str | Pattern]:
        """Translate an element to a sequence of patterns and rules."""
        kind = element.get("type") if isinstance(element, dict) else None
        if kind == "const_string":
            return self._literal(_text(element, "value"))
        if kind == "regex":
            return [python_pattern(_text(element, "pattern"))]
        if kind == "any_text":
            excludes = element.get("excludes") or []
            max_chars = element.get("max_chars")
            return [_without(Pattern(f"(?s:.){{0,{'' if max_chars is None else int(max_chars)}}}"), excludes)]
        if kind == "json_schema":
            return [self._json(element)]
        if kind == "sequence":
            return [part for inner in _elements(element, "elements") for part in self._parts(inner)]
        if kind == "or":
            options = [self._rule(self._parts(inner)) for inner in _elements(element, "elements")]
            return [self._named("rule", " | ".join(options))]
        if kind == "optional":
            return [self._named("rule", f"{self._rule(self._parts(element.get('content')))} |")]
        if kind == "star":
            return [self._named("rule", f"({self._rule(self._parts(element.get('content')))})*")]
        if kind == "tag":
            return self._tag(element)
        if kind == "tags_with_separator":
            return self._tags(element)
        raise UnknownTagError(f"structural_tag: {json.dumps(kind)[:60]} is not known here")

    def _literal(self, text: str) -> list[str | Pattern]:
        """Translate a text, in which special tokens are matched as tokens."""
        parts: list[str | Pattern] = []
        begin = 0
        while begin < len(text):
            at, token = self._next_token(text, begin)
            if begin < at:
                parts.append(Pattern(literal(text[begin:at])))
            begin = at + len(token)
            if token:
                parts.append(f"<[{self._special[token]}]>")
        return parts

    def _next_token(self, text: str, begin: int) -> tuple[int, str]:
        """Return position and text of the next special token (the longest one there), or the end and ""."""
        places = []
        for token in self._special:
            at = text.find(token, begin)
            if at >= 0:
                places.append((at, -len(token), token))
        if not places:
            return len(text), ""
        at, _, token = min(places)
        return at, token

    def _tag(self, element: Mapping[str, Any]) -> list[str | Pattern]:
        """Translate begin, content and end. A content of any text stops at the first end."""
        end = element.get("end")
        if not isinstance(end, str):
            raise UnknownTagError("structural_tag: several ends")
        content = element.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end and end not in self._special:
            inner = self._parts(content)[0]
            assert isinstance(inner, Pattern)
            with_end = Pattern(inner.body + literal(end), banned=(*inner.banned, f"{ANY_TEXT}{literal(end)}(?s:.)+"))
            return [*self._literal(_text(element, "begin")), with_end]
        return [*self._literal(_text(element, "begin")), *self._parts(content), *self._literal(end)]

    def _tags(self, element: Mapping[str, Any]) -> list[str | Pattern]:
        options = " | ".join(self._rule(self._parts(tag)) for tag in _elements(element, "tags"))
        tag = self._named("rule", options)
        rule = tag
        if not element.get("stop_after_first"):
            separator = self._rule(self._literal(_text(element, "separator")))
            rule = f"{tag} ({separator} {tag})*"
        if not element.get("at_least_one"):
            rule = f"({rule})?"
        return [self._named("rule", rule)]

    def _json(self, element: Mapping[str, Any]) -> str | Pattern:
        schema, style = element.get("json_schema"), element.get("style", "json")
        if style == "text":
            pattern = text_patterns(schema)
            return _without(pattern, element.get("excludes") or [])
        if style != "json":
            raise UnknownTagError(f"structural_tag: the style {json.dumps(style)[:60]} is not known here")
        max_spaces = element.get("max_whitespace_cnt")
        space = "[ \\n\\t]*" if max_spaces is None else f"[ \\n\\t]{{0,{int(max_spaces)}}}"
        guidance: dict[str, Any] = {"whitespace_pattern": space}
        if element.get("any_whitespace") is False:
            guidance = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        kept = kept_schema(schema, element.get("root"))
        return self._named("rule", f"%json {json.dumps(kept | {'x-guidance': guidance})}")

    def _rule(self, parts: Sequence[str | Pattern]) -> str:
        """Return the rule of a sequence of parts; adjacent patterns become one terminal."""
        names: list[str] = []
        run: list[Pattern] = []
        for part in (*parts, None):
            if isinstance(part, Pattern):
                run.append(part)
                continue
            if run:
                names.append(self._joined(run))
                run = []
            if part is not None:
                names.append(part)
        return " ".join(names) or '""'

    def _joined(self, run: Sequence[Pattern]) -> str:
        if not any(pattern.needed or pattern.banned for pattern in run):
            return self._named("T", f"/{''.join(f'(?:{pattern.body})' for pattern in run)}/")
        names = [self._named("T", _terminal(pattern)) for pattern in run]
        return self._named("T", " ".join(names)) if len(names) > 1 else names[0]

    def _named(self, prefix: str, definition: str) -> str:
        name = f"{prefix}{len(self._rules)}"
        self._rules.append(f"{name}: {definition}")
        return name


def _without(pattern: Pattern, excludes: Sequence[str]) -> Pattern:
    """Return the pattern of texts that contain none of some texts."""
    banned = [f"{ANY_TEXT}{literal(text)}{ANY_TEXT}" for text in excludes]
    return pattern._replace(banned=(*pattern.banned, *banned))


def _text(element: Mapping[str, Any], name: str) -> str:
    value = element.get(name)
    if not isinstance(value, str):
        raise UnknownTagError(f"structural_tag: {name} is no text")
    return value


def _elements(element: Mapping[str, Any], name: str) -> list[Any]:
    values = element.get(name)
    if not isinstance(values, list) or not values:
        raise UnknownTagError(f"structural_tag: {name} is empty")
    return values
