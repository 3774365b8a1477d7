"""Rewriting of JSON schemas so that llguidance enforces every keyword.

llguidance refuses most keywords that it cannot enforce. Keywords that it would misread are replaced here by keywords
that it enforces, with the same values or fewer, or refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from paged.serving.grammar.formats import NUMBER_RANGES, STANDARD_FORMATS, TEXT_PATTERNS, WITHOUT_MEANING
from paged.serving.grammar.patterns import ANY_TEXT, Pattern, ecma_pattern, literal

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
SAYING_NOTHING = frozenset(
    "$schema $id $anchor $comment $vocabulary $defs definitions title description default examples deprecated readOnly "
    "writeOnly discriminator contentEncoding contentMediaType contentSchema x-guidance".split()
)
"""Keywords without effect on a value; they are not passed to llguidance."""

# Keywords that apply further schemas to the same value.
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_OF_LISTS = ("items", "prefixItems", "additionalItems", "uniqueItems", "contains", "unevaluatedItems", "minItems")
_OF_OBJECTS = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
    "minProperties",
)  # fmt: skip
_OF_DRAFT_3 = ("extends", "disallow", "divisibleBy")
_MOST_UNIQUE = 8  # largest enum whose lists without repetition are enumerated
_MOST_PERMUTED = 4  # largest enum whose lists are enumerated in every order
_MOST_LISTS = 512


def kept_schema(schema: Any, root: Any = None) -> dict[str, Any]:
    """Return an equivalent schema that llguidance enforces, or that it refuses by the name of a keyword.

    Objects and lists without a rule for further members allow none.

    root: the schema that contains this one, to resolve $ref; None if this is the whole schema.

    Raises:
        ValueError: a keyword is malformed or cannot be enforced.
    """
    return _Rewriter(schema if root is None else root).rewritten(schema)


def behind_references(root: Any, schema: Any) -> Any:
    """Return the schema at the end of a chain of $ref within `root`.

    Raises:
        ValueError: a $ref has no target.
    """
    return _Rewriter(root)._behind(schema)


def text_patterns(schema: Any) -> Pattern:
    """Return the pattern of a schema that allows only strings, and perhaps null.

    Raises:
        ValueError: it has a keyword that cannot be enforced.
    """
    keywords = {name: value for name, value in schema.items() if name not in SAYING_NOTHING and name != "type"}
    _check_numbers(keywords)
    parts = [_pattern_of(keywords), *map(text_patterns, keywords.pop("allOf", ()))]
    if "anyOf" in keywords or "oneOf" in keywords:
        options = keywords.pop("anyOf", None) or keywords.pop("oneOf", None)
        if not options:
            raise ValueError("anyOf: no options")
        parts.append(_union_of_texts(options))
    values = keywords.pop("enum", None)
    if "const" in keywords:
        values = [keywords.pop("const")]
    if values is not None:
        texts = [literal(value) for value in values if isinstance(value, str)]
        if not texts:
            raise ValueError("enum: no text among the values")
        parts.append(Pattern("|".join(texts)))
    if "minLength" in keywords or "maxLength" in keywords:
        parts.append(Pattern(f"(?s:.){{{keywords.pop('minLength', 0)},{keywords.pop('maxLength', '')}}}"))
    for name in _IN_PLACE:
        if name in keywords:
            raise ValueError(f"{name}: not supported for a text in this form of calls")
    return _all_of(parts)


def _union_of_texts(options: Sequence[Any]) -> Pattern:
    """Return the pattern of the strings of any option, except null."""
    patterns = [text_patterns(option) for option in options if option != {"type": "null"}]
    if len(patterns) == 1:
        return patterns[0]
    if any(pattern.needed or pattern.banned for pattern in patterns):
        raise ValueError("anyOf: several kinds of texts with several rules are not supported in this form of calls")
    return Pattern("|".join(f"(?:{pattern.body})" for pattern in patterns))


def _all_of(patterns: Sequence[Pattern | None]) -> Pattern:
    """Return the pattern of texts that match all patterns."""
    needed: list[str] = []
    banned: list[str] = []
    for pattern in patterns:
        if pattern is not None:
            needed += [pattern.body, *pattern.needed]
            banned += pattern.banned
    needed = needed or [ANY_TEXT]
    return Pattern(needed[0], tuple(needed[1:]), tuple(banned))


class _Rewriter:
    """Rewrites a schema or part of one. Every target of a $ref becomes a definition of the new schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._definitions: dict[str, Any] = {}
        self._names: dict[tuple[int, bool], str] = {}  # names of definitions, by id(target) and `is_alone`
        self._waiting: list[tuple[str, Any, bool]] = []
        self._base = root.get("$id", "") if isinstance(root, dict) else ""
        self._checked: set[int] = set()  # targets without reference loops

    def rewritten(self, part: Any) -> dict[str, Any]:
        schema: Any = self._schema(part, is_alone=True)
        while self._waiting:
            name, target, is_alone = self._waiting.pop()
            self._definitions[name] = self._schema(target, is_alone=is_alone)
        if schema is False:
            raise ValueError("the schema allows no value")
        if schema is True:
            schema = {}
        rewritten: dict[str, Any] = schema
        if self._definitions:
            rewritten["$defs"] = self._definitions
        return rewritten

    def _schema(self, schema: Any, *, is_alone: bool) -> Any:
        """Rewrite a schema; is_alone: whether no other schema describes the same value."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"a schema is an object or a boolean, not {json.dumps(schema)[:60]}")
        if schema is not self._root and "$id" in schema and "$ref" in json.dumps(schema):
            raise ValueError("$ref: not supported below an inner $id")
        kept = {name: value for name, value in schema.items() if name not in SAYING_NOTHING}
        for name in _OF_DRAFT_3:
            if name in kept:
                raise ValueError(f"{name}: not supported; it is of an old draft of JSON Schema")
        parts = [name for name in (*_IN_PLACE, *_DEPENDENT) if name in kept]
        is_union = parts in (["$ref"], ["anyOf"], ["oneOf"]) or (parts == ["allOf"] and len(kept["allOf"]) == 1)
        if parts and (not is_union or any(name in kept for name in (*_OF_LISTS, *_OF_OBJECTS))):
            is_alone = False
        further: list[Any] = []  # schemas that must also hold
        _check_numbers(kept)
        self._texts(kept, further)
        self._lists(kept, is_alone=is_alone)
        self._objects(kept, further, is_alone=is_alone)
        self._references(kept, is_alone=is_alone)
        if further:
            kept["allOf"] = [*kept.get("allOf", ()), *further]
        return kept

    def _each(self, name: str, schemas: Any, *, is_alone: bool) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            raise ValueError(f"{name}: expected a list of schemas")
        return [self._schema(schema, is_alone=is_alone) for schema in schemas]

    def _named(self, name: str, schemas: Any, *, is_alone: bool) -> dict[str, Any]:
        if not isinstance(schemas, dict):
            raise ValueError(f"{name}: expected schemas by name")
        return {key: self._schema(schema, is_alone=is_alone) for key, schema in schemas.items()}

    def _texts(self, kept: dict[str, Any], further: list[Any]) -> None:
        """Rewrite pattern and format."""
        if kept.get("format") in NUMBER_RANGES:
            low, high = NUMBER_RANGES[kept["format"]]
            further.append({"minimum": low, "maximum": high})
        pattern = _pattern_of(kept)
        kept.pop("format", None)
        kept.pop("pattern", None)
        if pattern is None:
            return
        further += [{"pattern": f"^(?:{part})$"} for part in (pattern.body, *pattern.needed)]

    def _lists(self, kept: dict[str, Any], *, is_alone: bool) -> None:
        """Rewrite the keywords of lists."""
        if isinstance(kept.get("items"), list):  # before draft 2020-12
            kept["prefixItems"] = kept.pop("items")
            if "additionalItems" in kept:
                kept["items"] = kept["additionalItems"]
            if not kept["prefixItems"]:
                del kept["prefixItems"]
        kept.pop("additionalItems", None)
        if "unevaluatedItems" in kept and not any(name in kept for name in (*_IN_PLACE, "contains")):
            kept.setdefault("items", kept.pop("unevaluatedItems"))
            kept.pop("unevaluatedItems", None)
        if kept.get("uniqueItems") is False or kept.get("maxItems", 2) <= 1:
            kept.pop("uniqueItems", None)
        if kept.get("uniqueItems") is True:
            self._write_out_unique(kept)
        if "prefixItems" in kept:
            kept["prefixItems"] = self._each("prefixItems", kept["prefixItems"], is_alone=is_alone)
            if is_alone and kept.get("minItems", 0) <= len(kept["prefixItems"]):
                kept.setdefault("items", False)
        if "items" in kept:
            kept["items"] = self._schema(kept["items"], is_alone=is_alone)

    def _write_out_unique(self, kept: dict[str, Any]) -> None:
        """Replace a list of unique values of a short enum by an enum of lists."""
        values = self._values(kept.get("items"))
        if values is None or len(values) > _MOST_UNIQUE or "prefixItems" in kept or "contains" in kept:
            raise ValueError("uniqueItems: supported only for the values of a short enum")
        if "enum" in kept:
            raise ValueError("uniqueItems: not supported beside an enum of lists")
        choose = itertools.permutations if len(values) <= _MOST_PERMUTED else itertools.combinations
        min_size, max_size = kept.pop("minItems", 0), min(kept.pop("maxItems", len(values)), len(values))
        lists = [list(choice) for size in range(min_size, max_size + 1) for choice in choose(values, size)]
        if not lists or len(lists) > _MOST_LISTS:
            raise ValueError("uniqueItems: no list is long enough")
        if kept.get("type") == "array":
            del kept["type"], kept["items"], kept["uniqueItems"]
            kept["enum"] = lists
        else:
            raise ValueError("uniqueItems: only with the type array")

    def _values(self, schema: Any) -> list[Any] | None:
        """Return the distinct values of an enum, or None for any other schema."""
        schema = self._behind(schema)
        if not isinstance(schema, dict):
            return None
        names = schema.keys() - SAYING_NOTHING - {"type"}
        if names == {"const"}:
            values = [schema["const"]]
        elif names == {"enum"} and isinstance(schema["enum"], list):
            values = schema["enum"]
        else:
            return None
        if not all(isinstance(value, str) for value in values) or schema.get("type", "string") != "string":
            return None
        return list(dict.fromkeys(values))

    def _objects(self, kept: dict[str, Any], further: list[Any], *, is_alone: bool) -> None:
        """Rewrite the keywords of objects."""
        if "unevaluatedProperties" in kept and not any(name in kept for name in (*_IN_PLACE, *_DEPENDENT)):
            kept.setdefault("additionalProperties", kept.pop("unevaluatedProperties"))
            kept.pop("unevaluatedProperties", None)
        if "propertyNames" in kept:
            self._name_properties(kept)
        if "properties" in kept:
            kept["properties"] = self._named("properties", kept["properties"], is_alone=is_alone)
        if "patternProperties" in kept:
            by_pattern: dict[str, Any] = {}
            patterns = self._named("patternProperties", kept["patternProperties"], is_alone=is_alone)
            for text, schema in patterns.items():
                pattern = ecma_pattern(text)
                if pattern.needed:
                    raise ValueError("patternProperties: a lookahead is not supported")
                by_pattern[f"^(?:{pattern.body})$"] = schema
            if len(by_pattern) < len(patterns):
                raise ValueError("patternProperties: two patterns of the same names are not supported")
            kept["patternProperties"] = by_pattern
        required = kept.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise ValueError("required: expected names")
        least = kept.get("minProperties", 0)
        if is_alone and "additionalProperties" not in kept:
            missing = [name for name in required if name not in kept.get("properties", {})]
            if "patternProperties" in kept:
                if not missing and least <= 1:
                    kept["additionalProperties"] = False
            elif "properties" in kept and least <= len(kept["properties"]) + len(missing):
                kept["properties"] |= dict.fromkeys(missing, True)
                kept["additionalProperties"] = False
        _count_properties(kept, further)
        is_open = kept.get("additionalProperties", True) is not False or "patternProperties" in kept
        if is_open and kept.get("minProperties", 0) > max(1, len(set(required))):
            raise ValueError("minProperties: above 1 only with all names listed, as a name may come twice")
        if "additionalProperties" in kept:
            kept["additionalProperties"] = self._schema(kept["additionalProperties"], is_alone=is_alone)
        for name in _DEPENDENT:
            if name in kept:
                further += self._dependents(name, kept.pop(name))

    def _dependents(self, keyword: str, dependents: Any) -> Iterator[Any]:
        """Yield a schema for each property that requires others."""
        if not isinstance(dependents, dict):
            raise ValueError(f"{keyword}: expected an object")
        for name, value in dependents.items():
            if isinstance(value, list):
                consequence: Any = {"required": value}
            else:
                consequence = self._schema(value, is_alone=False)
            yield {"anyOf": [{"properties": {name: False}}, consequence]}

    def _name_properties(self, kept: dict[str, Any]) -> None:
        """Replace propertyNames by other keywords of objects."""
        names = self._behind(kept.pop("propertyNames"))
        if names is True:
            return
        if names is False:
            kept["maxProperties"] = 0
            return
        if not isinstance(names, dict):
            raise ValueError("propertyNames: expected a schema")
        keywords = names.keys() - SAYING_NOTHING
        if keywords <= {"type"}:
            if keywords and names["type"] != "string":
                raise ValueError("propertyNames: names are strings")
            return
        if "patternProperties" in kept or keywords - {"type"} not in ({"enum"}, {"const"}, {"pattern"}):
            raise ValueError("propertyNames: only an enum or a pattern, without patternProperties, is supported")
        additional = kept.pop("additionalProperties", True)
        properties = kept.get("properties", {})
        kept["additionalProperties"] = False
        if "pattern" in keywords:
            expression = re.compile(names["pattern"])
            forbidden = [name for name in properties if expression.search(name) is None]
            says_nothing = additional is True or additional == {}
            if additional is not False and not says_nothing and len(forbidden) < len(properties):
                raise ValueError("propertyNames: a pattern beside properties and a schema of others is not supported")
            if additional is not False:
                kept["patternProperties"] = {names["pattern"]: additional}
            added: Mapping[str, Any] = {}
        else:
            allowed = names["enum"] if "enum" in keywords else [names["const"]]
            allowed = [name for name in allowed if isinstance(name, str)]
            forbidden = [name for name in properties if name not in allowed]
            added = {name: additional for name in allowed if name not in properties}
        kept["properties"] = properties | dict.fromkeys(forbidden, False) | added

    def _references(self, kept: dict[str, Any], *, is_alone: bool) -> None:
        """Rewrite the keywords that apply further schemas to the same value."""
        if "$ref" in kept:
            target = self._target(kept["$ref"])
            self._check_loops(target, ())
            key = (id(target), is_alone)
            if key not in self._names:
                self._names[key] = f"d{len(self._names)}"
                self._waiting.append((self._names[key], target, is_alone))
            kept["$ref"] = f"#/$defs/{self._names[key]}"
        if "oneOf" in kept and isinstance(kept["oneOf"], list) and "anyOf" not in kept:
            pairs = itertools.combinations(kept["oneOf"], 2)
            if all(self._are_disjoint(*pair) for pair in pairs):
                kept["anyOf"] = kept.pop("oneOf")
        for name in ("allOf", "anyOf"):
            if name in kept:
                kept[name] = self._each(name, kept[name], is_alone=is_alone)
        if "oneOf" in kept:
            kept["oneOf"] = self._each("oneOf", kept["oneOf"], is_alone=False)

    def _target(self, reference: Any) -> Any:
        """Return the schema that a $ref names."""
        place = _text("$ref", reference)
        if self._base:
            place = place.removeprefix(self._base)
        if not place.startswith("#"):
            raise ValueError(f"$ref: {reference[:60]!r} is not in the schema")
        place = unquote(place[1:])
        if place and not place.startswith("/"):
            return self._anchored(place)
        target = self._root
        for part in place.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part.isdecimal() and int(part) < len(target):
                target = target[int(part)]
            else:
                raise ValueError(f"$ref: {reference[:60]!r} is not in the schema")
        return target

    def _anchored(self, name: str) -> Any:
        values = [self._root]
        while values:
            value = values.pop()
            if isinstance(value, dict):
                if value.get("$anchor") == name or value.get("$id") == f"#{name}":
                    return value
                value = list(value.values())
            if isinstance(value, list):
                values += value
        raise ValueError(f"$ref: '#{name}' is not in the schema")

    def _check_loops(self, schema: Any, above: tuple[int, ...]) -> None:
        """Raise ValueError if a schema refers to itself for the same value."""
        if not isinstance(schema, dict) or id(schema) in self._checked:
            return
        if id(schema) in above:
            raise ValueError("$ref: leads back to itself")
        above = (*above, id(schema))
        if "$ref" in schema:
            self._check_loops(self._target(schema["$ref"]), above)
        for name in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                for part in schema[name]:
                    self._check_loops(part, above)
        self._checked.add(id(schema))

    def _behind(self, schema: Any) -> Any:
        """Return the schema at the end of a chain of $ref without other keywords."""
        for _ in range(8):
            if not isinstance(schema, dict) or schema.keys() - SAYING_NOTHING != {"$ref"}:
                break
            schema = self._target(schema["$ref"])
        return schema

    def _are_disjoint(self, first: Any, second: Any) -> bool:
        """Return whether two schemas provably have no common value."""
        first, second = self._behind(first), self._behind(second)
        if not isinstance(first, dict) or not isinstance(second, dict):
            return False
        kinds, other_kinds = _types(first), _types(second)
        if not kinds & other_kinds:
            return True
        values, other_values = self._values(first), self._values(second)
        if values is not None and other_values is not None:
            return not set(values) & set(other_values)
        if kinds & other_kinds != {"object"}:
            return False
        for name in {*first.get("required", ())} & {*second.get("required", ())}:
            values = self._values(first.get("properties", {}).get(name))
            other_values = self._values(second.get("properties", {}).get(name))
            if values is not None and other_values is not None and not set(values) & set(other_values):
                return True
        return False


def _count_properties(kept: dict[str, Any], further: list[Any]) -> None:
    """Express minProperties and maxProperties by names of properties, where possible."""
    if "minProperties" in kept and kept["minProperties"] <= len(set(kept.get("required", ()))):
        del kept["minProperties"]
    if kept.get("additionalProperties", True) is not False or "patternProperties" in kept:
        return
    names = [name for name, schema in kept.get("properties", {}).items() if schema is not False]
    if kept.get("maxProperties", -1) >= len(names):
        del kept["maxProperties"]
    least = kept.get("minProperties", 0)
    if least == len(names) > 0:
        del kept["minProperties"]
        kept["required"] = names
    elif least == 1 and names:
        del kept["minProperties"]
        further.append({"anyOf": [{"required": [name]} for name in names]})


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema's `type` allows."""
    kinds = schema.get("type", ["string", "number", "boolean", "null", "array", "object"])
    if isinstance(kinds, str):
        kinds = [kinds]
    return {"number" if kind == "integer" else kind for kind in kinds}


def _pattern_of(schema: Mapping[str, Any]) -> Pattern | None:
    """Return the pattern of strings that `pattern` and `format` allow; None for any string."""
    patterns = []
    if "pattern" in schema:
        patterns.append(ecma_pattern(_text("pattern", schema["pattern"])))
    if "format" in schema:
        name = _text("format", schema["format"])
        if name in TEXT_PATTERNS:
            patterns.append(ecma_pattern(TEXT_PATTERNS[name]))
        elif name not in NUMBER_RANGES and name not in WITHOUT_MEANING and (name in STANDARD_FORMATS or not patterns):
            raise ValueError(f"format: {name[:60]!r} is not supported")
    if not patterns:
        return None
    return _all_of(patterns)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, not {json.dumps(value)[:60]}")
    return value


def _check_numbers(kept: dict[str, Any]) -> None:
    """Check the numbers of a schema; convert counts to integers."""
    for name in (*_COUNTS, *_BOUNDS):
        if name not in kept:
            continue
        value = kept[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name}: expected a number, not {json.dumps(value)[:60]}")
        if name in _COUNTS:
            if value != int(value) or value < 0:
                raise ValueError(f"{name}: expected a count, not {value}")
            kept[name] = int(value)
    step = kept.get("multipleOf", 1)
    if step != int(step) and step * 1024 != int(step * 1024):
        raise ValueError(f"multipleOf: {step} has no exact binary fraction, so readers disagree about its multiples")
