"""Regular expressions against Python's own: whole answers, and patterns in JSON schemas."""

import json
import random
import re

import pytest

from tests.serving.grammar.walks import accepts, compiler, walk

pytest.importorskip("xgrammar", reason="needs the extra serve")
pytest.importorskip("llguidance", reason="needs the extra serve")


ATOMS = [
    *(
        "a",
        "b",
        "é",
        "😀",
        ".",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        "[a-c]",
        "[^ab]",
        r"[\d_]",
        r"[^\d😀]",
        r"\.",
        r"\n",
    ),
    *(
        "^",
        "$",
        r"\A",
        r"\Z",
        r"\b",
        "(?=a)",
        "(?!b)",
        "(?!a$)",
        "(?=.*b$)",
        "(?!.*aa)",
        "(?<=a)",
        r"\x41",
        r"\u0042",
        "(?i:a)",
        "(?s:.)",
        r"\z",
        r"\1",
    ),
]
TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "ba",
    "aab",
    "A",
    "B",
    "_",
    "7",
    "٣",
    "é",
    "😀",
    "a\n",
    "\n",
    " ",
    "\xa0",
    "\x1c",
    "a.b",
    "z",
]


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.random() if depth else 0.0
    if kind < 0.4:
        return rng.choice(ATOMS)
    if kind < 0.7:
        return "".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3)))
    if kind < 0.8:
        return f"(?:{random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
    if kind < 0.85:
        return f"({random_pattern(rng, depth - 1)})"
    return f"(?:{random_pattern(rng, depth - 1)}){rng.choice(['*', '+', '?', '{2}', '{1,2}', '*?', '{,2}', '*+'])}"


@pytest.mark.parametrize("num_patterns", [60, pytest.param(3000, marks=pytest.mark.thorough)])
def test_whole_answers_match_as_in_python(num_patterns: int) -> None:
    """Every text that is written matches, and every text of a list is accepted if and only if it matches."""
    rng = random.Random(num_patterns)
    num_kept = 0
    for _ in range(num_patterns):
        pattern = random_pattern(rng)
        try:
            matcher = compiler().matcher("regex", pattern)
        except ValueError:
            continue
        num_kept += 1
        for text in TEXTS:
            assert accepts(matcher, text) == bool(re.fullmatch(pattern, text)), (pattern, text)
        written = walk(matcher, rng, 60)
        assert written is None or re.fullmatch(pattern, written), (pattern, written)
    assert num_kept > num_patterns / 3


@pytest.mark.parametrize("num_patterns", [60, pytest.param(3000, marks=pytest.mark.thorough)])
def test_patterns_of_schemas_are_found(num_patterns: int) -> None:
    """Texts that are accepted hold a match; ECMAScript and Python read the patterns, so a few texts may be missing."""
    rng = random.Random(num_patterns)
    num_kept = 0
    for _ in range(num_patterns):
        pattern = random_pattern(rng)
        try:
            matcher = compiler().matcher("json", json.dumps({"type": "string", "pattern": pattern, "maxLength": 9}))
        except ValueError:
            continue
        num_kept += 1
        for text in TEXTS:
            if accepts(matcher, json.dumps(text, ensure_ascii=False)):
                assert re.search(pattern, text), (pattern, text)
        written = walk(matcher, rng, 100)
        assert written is None or re.search(pattern, json.loads(written)), (pattern, written)
    assert num_kept > num_patterns / 4


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("ab", "xaby"), ("^ab", "abx"), ("ab$", "xab"), ("^a|b$", "ax"), ("(^|,)a(,|$)", "b,a"), (r"^\/\-$", "/-")],
)
def test_a_pattern_of_a_schema_may_be_found_anywhere(pattern: str, text: str) -> None:
    assert accepts(compiler().matcher("json", json.dumps({"type": "string", "pattern": pattern})), json.dumps(text))


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("a$b", "anchor"),
        (r"a\b", r"\\b"),
        (r"(a)\1", "backreference"),
        ("a(?=b)b", "lookahead"),
        ("(?i)a", "flag i"),
        ("a*+a", "possessive"),
        ("[^\\s\\S]", "matches nothing"),
        ("(a", "pattern"),
    ],
)
def test_what_is_not_supported_is_named(pattern: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        compiler().matcher("regex", pattern)


TEXTS_OF_ALL_PLANES = [
    "😀 good",
    "😢 bad",
    "\U0001d518",
    "\U0010ffff",
    "é",
    "杭州",
    'a"b\\',
    "\u2028",
    "\x7f",
    "/",
    "]",
    "\t\n",
]


@pytest.mark.parametrize("seed", range(3))
def test_choices_hold_any_character(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = [chr(code) for code in (*range(1, 128), 0x85, 0xFF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x1F600)]
    choices = [*TEXTS_OF_ALL_PLANES, *("".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(10))]
    grammars = [
        ("choice", choices),
        ("regex", "|".join(map(re.escape, choices))),
        ("grammar", "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in TEXTS_OF_ALL_PLANES[:8])),
        ("structural_tag", {"format": {"type": "or", "elements": [
            {"type": "const_string", "value": text} for text in choices
        ]}}),
    ]  # fmt: skip
    for kind, grammar in grammars:
        matcher = compiler().matcher(kind, grammar if isinstance(grammar, str) else json.dumps(grammar))
        expected = choices if kind != "grammar" else TEXTS_OF_ALL_PLANES[:8]
        for text in expected:
            assert accepts(matcher, text), (kind, text)
        assert walk(matcher, rng) in expected
    matcher = compiler().matcher("json", json.dumps({"enum": choices}))
    assert json.loads(walk(matcher, rng) or "") in choices


def test_a_choice_of_half_a_character_is_named() -> None:
    with pytest.raises(ValueError, match=r"U\+D83D"):
        compiler().matcher("choice", json.dumps(["\ud83d"]))
