"""Grammar of tool call arguments in forms other than JSON objects, as elements of structural tags."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from paged.serving.grammar.json_schemas import SAYING_NOTHING, behind_references

Element = dict[str, Any]
_OF_ARGUMENTS = frozenset({"type", "properties", "required", "additionalProperties"})
_ITEM = "item"
_FREE_NAME = "[A-Za-z_][A-Za-z0-9_-]{0,40}"  # name of an argument that is not in the schema
# Type of a JSON schema -> type of a value; and a pattern of all of them but texts without quotes.
_TYPE_NAMES = {kind: kind for kind in ("number", "boolean", "array", "object", "null")} | {"integer": "number"}
_TYPES = "(number|boolean|array|object|null)"


class Layout(NamedTuple):
    """Layout of arguments.

    Attributes:
        begin: text before the name.
        middle: text between name and value. {is_text} is true for a text and false for JSON. {type} is the value's
            type in JSON.
        end: text after the value; may contain {name}.
        separator: text between arguments.
        quote: quote around texts; None if texts are written as JSON.
        end_of_text: string that must not occur in a text; "" for the quote.
        is_nested: whether objects and lists in arguments use the same layout, with items of lists named `item`.
    """

    begin: str
    middle: str
    end: str = ""
    separator: str = ""
    quote: str | None = ""
    end_of_text: str = ""
    is_nested: bool = False


def text_element(value: str) -> Element:
    return {"type": "const_string", "value": value}


def sequence(elements: list[Element]) -> Element:
    """Return a sequence of elements without empty texts."""
    elements = [element for element in elements if element.get("value") != ""]
    if not elements:
        return text_element("")
    if len(elements) == 1:
        return elements[0]
    return {"type": "sequence", "elements": elements}


def json_value(schema: Any) -> Element:
    # Limit white space, because a weak model may write nothing else.
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def arguments(schema: Any, layout: Layout, is_text: Callable[[Any], bool]) -> Element:
    """Return the element of a tool's arguments.

    Args:
        is_text: whether the reader of answers treats a value of a schema as text.

    Raises:
        ValueError: these forms cannot enforce a keyword of the schema.
    """
    return _Arguments(schema, layout, is_text).of(behind_references(schema, schema))


class _Arguments:
    def __init__(self, root: Any, layout: Layout, is_text: Callable[[Any], bool]) -> None:
        self._root, self._layout, self._is_text = root, layout, is_text

    def of(self, schema: Any) -> Element:
        """Return the element of an object's properties in order, required properties first."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("the arguments of a tool are an object")
        kind = schema.get("type", "object")
        if kind != "object" and kind != ["object"]:
            raise ValueError(f"type: {kind!r}, expected object for the arguments of a tool")
        for name in sorted(schema.keys() - _OF_ARGUMENTS - SAYING_NOTHING):
            raise ValueError(f"{name}: not supported for arguments in this model's form of calls")
        required = list(schema.get("required", ()))
        properties = dict(schema.get("properties", {}))
        for name in required:
            properties.setdefault(name, True)
        additional = schema.get("additionalProperties", True)
        if not properties and additional is not False:
            return self._free(additional)
        later: list[Element] = []  # the properties after the current one, each with a separator before it
        first = text_element("")  # the current and later properties
        separator = self._layout.separator
        in_order = sorted(properties.items(), key=lambda item: item[0] not in required)
        for name, value in reversed(in_order):
            if value is False:
                if name in required:
                    raise ValueError(f"required: {name!r} may have no value")
                continue
            argument = self._argument(name, value)
            alone = sequence([*argument, *later])
            if name in required:
                first = alone
                later = [text_element(separator), *argument, *later]
                continue
            first = {"type": "or", "elements": [alone, first]}
            behind = sequence([text_element(separator), *argument])
            later = [{"type": "optional", "content": behind}, *later]
        return first

    def _argument(self, name: str, schema: Any) -> list[Element]:
        layout = self._layout
        if layout.middle[:1] in name or "\n" in name:
            raise ValueError(f"properties: the name {name!r} cannot be written in this model's form of calls")
        middle = self._middle(schema, is_text=self._is_text(schema))
        after = layout.end.replace("{name}", name)
        return [text_element(layout.begin + name), *middle, self._value(schema), text_element(after)]

    def _middle(self, schema: Any, *, is_text: bool) -> list[Element]:
        """Return the text between the name and a value of a schema. is_text: whether it is written without quotes."""
        middle = self._layout.middle.replace("{is_text}", str(is_text).lower())
        if is_text:
            return [text_element(middle.replace("{type}", "string"))]
        before, place, after = middle.partition("{type}")
        if not place:
            return [text_element(middle)]
        kind = _TYPES
        if isinstance(schema, dict) and schema.get("type") in _TYPE_NAMES:
            kind = _TYPE_NAMES[schema["type"]]
        return [text_element(before), {"type": "regex", "pattern": kind}, text_element(after)]

    def _free(self, schema: Any) -> Element:
        """Return any number of arguments with names that are not in the schema."""
        layout = self._layout
        argument = [text_element(layout.begin), {"type": "regex", "pattern": _FREE_NAME}]
        argument += [*self._middle(schema, is_text=False), self._json(schema), text_element(layout.end)]
        if "{name}" in layout.end:
            return text_element("")
        more = {"type": "star", "content": sequence([text_element(layout.separator), *argument])}
        return {"type": "optional", "content": sequence([*argument, more])}

    def _value(self, schema: Any) -> Element:
        """Return one value: JSON, unless the layout writes texts differently."""
        layout = self._layout
        if layout.quote is not None and self._is_text(schema):
            content = self._json(schema) | {"style": "text", "excludes": [layout.end_of_text or layout.quote]}
            return sequence([text_element(layout.quote), content, text_element(layout.quote)])
        if layout.is_nested and isinstance(schema, dict):
            if schema.get("type") == "object" and schema.get("properties"):
                return self.of(schema)
            keywords = schema.keys() - SAYING_NOTHING
            if schema.get("type") == "array" and keywords == {"type", "items"}:
                return {"type": "star", "content": sequence(self._argument(_ITEM, schema["items"]))}
        return self._json(schema)

    def _json(self, schema: Any) -> Element:
        value = json_value(schema)
        if '"$ref"' in json.dumps(schema):
            value["root"] = self._root
        return value
