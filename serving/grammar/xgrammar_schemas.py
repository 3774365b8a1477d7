"""Checks of JSON schemas and patterns in structural tags that xgrammar compiles.

xgrammar silently ignores many keywords, so a schema may use only the combinations that it enforces. Its patterns are of
another dialect, so they may use only parts with the same or a narrower meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from paged.serving.grammar.patterns import python_pattern

_ANNOTATIONS = frozenset("$schema $defs definitions $comment title description default examples".split())
_KEYWORDS_BY_TYPE = {
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "number": frozenset[str](),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([A-Za-z0-9_.-]+)", re.ASCII)
# Parts of a pattern that match more characters in xgrammar: a dot also matches newlines, and a negated class excludes
# only ASCII characters.
_WIDER = re.compile(r"(?<!\\)(\\\\)*(\.|\\[DSW])")
_PATTERN = re.compile(r"\^[^\\.$|^(?]*\$", re.ASCII)


def check_tag(tag: Any) -> None:
    """Check all schemas and patterns in a structural tag.

    Raises:
        ValueError: a part may not be enforced by xgrammar.
    """
    for schema in _schemas(tag):
        _check(schema, schema)
    for pattern in _patterns(tag):
        python_pattern(pattern)
        if _WIDER.search(pattern) is not None:
            raise ValueError("pattern: a dot, \\D, \\S and \\W are not supported beside tags of this kind")


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        pattern = value.get("pattern")
        if value.get("type") == "regex" and isinstance(pattern, str):
            yield pattern
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _patterns(inner)


def _schemas(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("json_schema", "schema"):
                yield inner
            else:
                yield from _schemas(inner)
    if isinstance(value, list):
        for inner in value:
            yield from _schemas(inner)


def _check(schema: Any, root: Any) -> None:
    if schema is True:
        return
    if not isinstance(schema, dict):
        raise ValueError("structural_tag: a schema that is no object is not supported beside tags of this kind")
    for name in ("$defs", "definitions"):
        for inner in schema.get(name, {}).values():
            _check(inner, root)
    keywords = schema.keys() - _ANNOTATIONS
    kind = schema.get("type")
    if keywords in ({"const"}, {"enum"}) or not keywords:
        return
    if keywords == {"$ref"}:
        match = _REFERENCE.fullmatch(schema["$ref"])
        if match is None or match[2] not in root.get(match[1], {}):
            raise _unsupported("$ref")
        return
    if keywords == {"anyOf"} and isinstance(schema["anyOf"], list):
        for inner in schema["anyOf"]:
            _check(inner, root)
        return
    if kind == "string":
        _check_string(schema, keywords - {"type"})
        return
    allowed = _KEYWORDS_BY_TYPE.get(kind) if isinstance(kind, str) else None
    if allowed is None:
        raise _unsupported(next(iter(keywords - {"type"}), "type"))
    for name in sorted(keywords - {"type"} - allowed):
        raise _unsupported(name)
    for name in sorted(keywords & _KEYWORDS_BY_TYPE["integer"]):
        if type(schema[name]) is not int:
            raise _unsupported(name)
    properties = schema.get("properties", {})
    for inner in (*properties.values(), *(schema[name] for name in ("items",) if name in schema)):
        _check(inner, root)
    additional = schema.get("additionalProperties", False)
    if additional is not False:
        _check(additional, root)
    if not set(schema.get("required", ())) <= properties.keys():
        raise ValueError("structural_tag: required: names that are no properties are not supported here")


def _check_string(schema: dict[str, Any], keywords: set[str]) -> None:
    if keywords in ({"enum"}, {"const"}):
        values = schema.get("enum", [schema.get("const")])
        if not all(isinstance(value, str) for value in values):
            raise _unsupported("enum")
    elif keywords == {"pattern"}:
        if _PATTERN.fullmatch(schema["pattern"]) is None:
            raise _unsupported("pattern")
    elif keywords - {"minLength", "maxLength"}:
        raise _unsupported(min(keywords - {"minLength", "maxLength"}))


def _unsupported(name: str) -> ValueError:
    return ValueError(f"structural_tag: {name}: not supported, or not beside the others, in a schema among these tags")
