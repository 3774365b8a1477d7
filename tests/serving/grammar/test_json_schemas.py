"""JSON schemas: what is written is valid, and what is not kept is refused by name."""

import json
import random
from typing import Any

import pytest

from tests.serving.grammar.walks import accepts, compiler, walk

pytest.importorskip("xgrammar", reason="needs the extra serve")
pytest.importorskip("llguidance", reason="needs the extra serve")
jsonschema = pytest.importorskip("jsonschema", reason="needs the extra test")


Schema = Any
NAMES = ["a", "b", "name", "x y", "é"]
PATTERNS = ["^a+$", "^[A-Z]+$", "b", r"^\d{2}", "^(ab|c)*$", "^[^a]$", "é|😀", r"^.{0,3}$", "(?=x)y", "^(?=.*b)[ab]+$"]
FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration", "phone", "iri"]
VALUES = ["x", "zz", "😀", "", "a", "ab", 0, 3, 7, 2.5, -1, True, False, None, [], ["a"], [1, 2], {}, {"a": 1}]


def some(rng: random.Random, keywords: dict[str, Any], probability: float = 0.35) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if rng.random() < probability}


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Keywords for every kind of value, in any combination, with or without a type."""
    if rng.random() < 0.04:
        return rng.random() < 0.7
    kind = rng.choice(["string", "string", "integer", "number", "object", "object", "array", "boolean", "null", "any"])
    if not depth and kind in ("object", "array", "any"):
        kind = "string"
    schema: dict[str, Any] = {} if kind == "any" else {"type": kind}
    if rng.random() < 0.08:
        schema["type"] = rng.sample(["string", "integer", "null", "object", "array"], 2)
    elif rng.random() < 0.1:
        schema.pop("type", None)
    inner = lambda: random_schema(rng, depth - 1)  # noqa: E731
    if kind in ("string", "any"):
        low = rng.randint(0, 3)
        lengths = {"minLength": low, "maxLength": low + rng.randint(0, 4)}
        schema |= some(rng, lengths | {"pattern": rng.choice(PATTERNS)}) | some(
            rng, {"format": rng.choice(FORMATS)}, 0.2
        )
    if kind in ("integer", "number", "any"):
        low = rng.randint(-9, 9)
        bounds = {"minimum": low, "maximum": low + rng.randint(0, 30), "exclusiveMinimum": low - 2}
        steps = {"multipleOf": rng.choice([1, 2, 3, 0.5, 0.25, 0.1, 7])}
        schema |= some(rng, bounds) | some(rng, steps, 0.2)
    if kind in ("object", "any") and depth:
        names = rng.sample(NAMES, rng.randint(0, 3))
        schema |= some(rng, {
            "properties": {name: inner() for name in names},
            "required": rng.sample(NAMES, rng.randint(0, 2)),
            "additionalProperties": rng.choice([False, True, inner()]),
        }, 0.6) | some(rng, {
            "patternProperties": {rng.choice(["^a", "^x", "e$"]): inner()},
            "propertyNames": rng.choice([{"pattern": "^a"}, {"enum": ["a", "q"]}, {"type": "string"}]),
            "minProperties": rng.randint(0, 2), "maxProperties": rng.randint(0, 3),
            "dependentRequired": {rng.choice(NAMES): [rng.choice(NAMES)]},
            "dependentSchemas": {rng.choice(NAMES): inner()}, "unevaluatedProperties": False,
        }, 0.08)  # fmt: skip
    if kind in ("array", "any") and depth:
        schema |= some(rng, {
            "items": inner(), "minItems": rng.randint(0, 2), "maxItems": rng.randint(0, 3),
        }) | some(rng, {
            "prefixItems": [inner(), inner()], "uniqueItems": True, "contains": inner(), "minContains": 2,
        }, 0.1)  # fmt: skip
    if rng.random() < 0.1:
        schema["enum"] = rng.sample(VALUES, rng.randint(1, 4))
    if rng.random() < 0.04:
        schema["const"] = rng.choice(VALUES)
    if depth:
        options = [inner() for _ in range(rng.randint(1, 3))]
        schema |= some(rng, {"allOf": options, "anyOf": options[::-1]}, 0.07)
        schema |= some(
            rng, {"oneOf": options, "not": inner(), "if": inner(), "then": inner(), "$ref": "#/$defs/n"}, 0.04
        )
    return schema


@pytest.mark.parametrize("num_schemas", [60, pytest.param(2000, marks=pytest.mark.thorough)])
def test_what_is_written_is_valid(num_schemas: int) -> None:
    """Every finished text is valid; refusals name a keyword or say that no value is possible."""
    rng = random.Random(num_schemas)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    num_kept = num_written = 0
    for _ in range(num_schemas):
        schema = random_schema(rng)
        if isinstance(schema, dict):
            schema["$defs"] = {"n": random_schema(rng, 1)}
        try:
            matcher = compiler().matcher("json", json.dumps(schema))
        except ValueError:
            continue
        num_kept += 1
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for _ in range(2):
            text = walk(matcher, rng)
            if text is None:
                break
            num_written += 1
            validator.validate(json.loads(text))
            matcher = compiler().matcher("json", json.dumps(schema))
    assert num_kept > num_schemas / 3
    assert num_written > num_schemas / 3


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"if": {"type": "string"}, "then": {"const": "a"}}, "if"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}, "enum": [["a"]]}, "uniqueItems"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({"type": "integer", "divisibleBy": 2}, "divisibleBy"),
        ({"type": "string", "format": "iri"}, "format"),
        ({"type": "string", "format": "phone"}, "format"),
        ({"type": "string", "pattern": r"\bA"}, "pattern"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "#"}, r"\$ref"),
        ({"$ref": "https://example.org/a.json"}, r"\$ref"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}, r"\$ref"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "propertyNames": {"minLength": 2}}, "propertyNames"),
        ({"type": "object", "propertyNames": 5}, "propertyNames"),
        (
            {
                "type": "object",
                "propertyNames": {"pattern": "^[a-z]+$"},
                "properties": {"a": {"type": "string"}},
                "additionalProperties": {"type": "integer"},
            },
            "propertyNames",
        ),
        ({"type": "object", "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluated"),
        ({"type": "string", "x-guidance": {"lenient": True}, "not": {}}, "not"),
        (False, "no value"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "nsatisfiable"),
        ({"type": "nothing"}, "type"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "object", "required": "a"}, "required"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(schema: Schema, name: str) -> None:
    """At the top, in a property, behind a reference and in a choice."""
    inside = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    places = [schema]
    if "$ref" not in str(schema) and schema is not False:
        behind = {"type": "array", "items": {"$ref": "#/$defs/s"}, "minItems": 1, "$defs": {"s": schema}}
        places += [inside, behind]
        if name != "nsatisfiable":
            places.append({"anyOf": [{"type": "boolean"}, schema]})
    for place in places:
        with pytest.raises(ValueError, match=name):
            compiler().matcher("json", json.dumps(place))


KEPT: list[tuple[Schema, list[Any], list[Any]]] = [
    ({"type": "string", "pattern": "^[A-Z]+$", "maxLength": 2}, ["AB"], ["ABC", "ab", ""]),
    ({"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+\.[a-z]{2,}$", "format": "email"},
     ["a.b@c.de"], [".a@c.de", "a..b@c.de", "a@c"]),
    ({"type": "string", "pattern": "^(?!admin$)[a-z]{3,}$"}, ["adm", "admins"], ["admin"]),
    ({"type": "string", "format": "date", "pattern": "^2"}, ["2024-02-29"], ["1999-01-01", "2023-02-29"]),
    ({"type": "string", "format": "email", "maxLength": 9}, ["a@b.de"], ["aa@bbbbbb.de", "a"]),
    ({"allOf": [{"type": "string"}, {"enum": ["zz", 1]}]}, ["zz"], [True, 1, "z"]),
    ({"type": "object", "properties": {"a": {"type": "string"}, "B": {}}, "required": ["a"],
      "additionalProperties": False, "propertyNames": {"pattern": "^[a-z]+$"}}, [{"a": "x"}], [{"a": "x", "B": 1}, {}]),
    ({"allOf": [{"properties": {"a": {"const": 1}}}, {"required": ["a"]}], "type": "object"},
     [{"a": 1}], [{}, {"a": 2}]),
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {"const": 1}, "b": {"const": 2}},
      "type": "object"}, [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}], [{}, {"a": 2}]),
    ({"type": "integer", "enum": [1, 5, 9], "minimum": 4}, [5, 9], [1, 4]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]},
     [{"a": 1, "z": None}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "dependentRequired": {"a": ["b"]},
      "additionalProperties": False}, [{}, {"b": None}, {"a": None, "b": None}], [{"a": None}]),
    ({"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True}, [[], ["y", "x"]], [["x", "x"]]),
    ({"type": "number", "multipleOf": 0.5, "minimum": 1, "maximum": 2}, [1.5, 2], [1.2, 2.5]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None]),
    ({"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"enum": ["k", "l"]}},
     [{}, {"k": None, "l": None}], [{"m": None}]),
    ({"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"pattern": "^k"}},
     [{"k1": None}], [{"l": None}]),
    ({"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
     [{"n": None}, {"n": {"n": None}}], [{}, {"n": {}}]),
    ({"minLength": 2, "type": ["string", "null"]}, ["ab", None], ["a"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://a.b/c", "title": "t", "description": "d",
      "default": 1, "examples": [1], "deprecated": True, "readOnly": True, "nullable": True, "x-own": {},
      "type": "null"},
     [None], [1]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "null"}],
      "additionalItems": False}, [[None]], [[None, None]]),
    ({"definitions": {"a b": {"const": 1}}, "$ref": "#/definitions/a%20b"}, [1], [2]),
    ({"$defs": {"bad": {"not": {}}}, "type": "null"}, [None], [1]),  # no $ref leads there
    ({"type": "integer", "format": "int32"}, [2147483647], [2147483648]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), KEPT)
def test_what_is_kept(schema: Schema, valid: list[Any], invalid: list[Any]) -> None:
    matcher = compiler().matcher("json", json.dumps(schema))
    for value in valid:
        assert accepts(matcher, json.dumps(value)), value
    for value in invalid:
        assert not accepts(matcher, json.dumps(value)), value
    text = walk(matcher, random.Random(1))
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


def tag_of(schema: Schema, kind: str) -> str:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    if kind == "triggered_tags":  # which xgrammar reads
        return json.dumps({"format": {"type": kind, "triggers": ["<a>"], "tags": [tag], "at_least_one": True}})
    return json.dumps({"format": tag})


@pytest.mark.parametrize("kind", ["tag", "triggered_tags"])
def test_schemas_in_tags_are_kept_or_refused(kind: str) -> None:
    """In tags that either engine reads."""
    rng = random.Random(1)
    num_written = 0
    for _ in range(60):
        schema = random_schema(rng, 2)
        try:
            matcher = compiler().matcher("structural_tag", tag_of(schema, kind))
        except ValueError:
            continue
        text = walk(matcher, rng)
        if text is not None:
            num_written += 1
            value = text.partition("<a>")[2].partition("</a>")[0]
            jsonschema.Draft202012Validator(schema).validate(json.loads(value))
    assert num_written > 5


@pytest.mark.parametrize("pattern", ["a$b", "a.b", r"\S{2}", r"\z"])
def test_patterns_in_tags_of_xgrammar_mean_pythons(pattern: str) -> None:
    """xgrammar reads an anchor as nothing and a dot as any character; a class in ASCII is narrower, and passes."""
    tags = [{"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": pattern}, "end": "</a>"}]
    tag = {"format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": tags, "at_least_one": True}}
    with pytest.raises(ValueError, match="pattern"):
        compiler().matcher("structural_tag", json.dumps(tag))
    tags[0]["content"] = {"type": "regex", "pattern": r"\d{2}"}
    assert accepts(compiler().matcher("structural_tag", json.dumps(tag)), "<a>12</a>")


CALLS: list[tuple[Schema, str]] = [
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^[A-Z]+$", "maxLength": 2}},
      "required": ["a"]}, ""),
    ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "pattern": r"^\d{3}$"}, {"type": "null"}]}},
      "required": ["a"]}, ""),
    ({"type": "object", "properties": {"a": {"allOf": [{"type": "string"}, {"enum": ["zz"]}]}}, "required": ["a"]}, ""),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "date", "minLength": 3},
      "b": {"type": "integer"}},
      "required": ["b", "a"]}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a", "z"],
      "$defs": {"n": {"type": "object", "properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}}}, ""),
    ({"$ref": "#/$defs/o", "$defs": {"o": {"type": "object", "properties": {"a": {"const": 3}},
      "required": ["a"]}}}, ""),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}, "required": ["a"]}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/o", "$defs": {"n": {"type": "null"}}}},
      "required": ["a"], "$defs": {"o": {"type": "object", "properties": {"n": {"$ref": "#/properties/b"}}}},
      "$comment": "b"}, r"\$ref"),
    ({"type": "object", "additionalProperties": {"type": "integer", "minimum": 3}}, ""),
    ({"type": "object", "properties": {"o": {"type": "object", "properties": {"l": {"type": "array", "items": {
        "type": "string", "maxLength": 3, "pattern": "^[a-z]*$"}}}, "required": ["l"]}}, "required": ["o"]}, ""),
    ({"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}}}, "minProperties"),
    ({"type": "object", "properties": {"a": {"type": "string", "not": {"const": "b"}}}}, "not"),
    ({"type": "object", "allOf": [{"required": ["a"]}]}, "allOf"),
    ({"type": "array"}, "type"),
]  # fmt: skip
FORMS = ["hermes", "glm", "qwen_xml", "deepseek_v32", "minimax_m3", "gemma4", "lfm2", "kimi_k3"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("schema", "refused"), CALLS)
def test_arguments_of_calls_are_valid(form: str, schema: Schema, refused: str) -> None:
    """As the reader of answers reads them, in each kind of form; JSON's own form keeps more."""
    from paged.serving.formats.answer_reader import AnswerReader
    from paged.serving.formats.tool_formats import TOOL_FORMATS

    def matcher() -> Any:
        tag = TOOL_FORMATS[form].grammar({"f": schema}, is_one=True)
        return compiler().matcher("structural_tag", json.dumps(tag))

    if refused and not (form == "hermes" and refused in ("minProperties", "allOf", "type")):
        with pytest.raises(ValueError, match=refused):
            matcher()
        return
    num_written = 0
    for seed in range(2):
        text = walk(matcher(), random.Random(seed), 600)
        if text is None:
            continue
        num_written += 1
        deltas = AnswerReader(TOOL_FORMATS[form], None, parameters={"f": schema}).read(text, is_last=True)
        arguments = "".join(delta.text for delta in deltas if delta.kind == "arguments")
        jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))
    assert num_written


def test_arguments_of_calls_keep_their_order() -> None:
    """Required ones first; each as the schema lists them."""
    from paged.serving.formats.tool_formats import TOOL_FORMATS

    names = ("c", "a", "d", "b")
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": ["b", "a"]}
    tag = json.dumps(TOOL_FORMATS["qwen_xml"].grammar({"f": schema}, is_one=True))

    def call(order: str) -> str:
        arguments = "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in order)
        return f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"

    for order in ("ab", "abc", "abd", "abcd"):
        assert accepts(compiler().matcher("structural_tag", tag), call(order)), order
    for order in ("ba", "abdc", "a", "cab"):
        assert not accepts(compiler().matcher("structural_tag", tag), call(order)), order
