"""Answers taken apart: calls in the forms of four kinds of models, reasoning, and text that only resembles them."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from itertools import product

import pytest

from paged.executors.serving.answer_reader import AnswerReader, Delta
from paged.executors.serving.tool_formats import TOOL_FORMATS
from paged.interop.structured import GrammarCompiler
from tests.interop.test_structured import END, VOCABULARY, allowed, byte_tokenizer, sample

ARGUMENTS = {"city": "Köln </tool", "days": [1, {"a": "}"}]}
GIVEN = json.dumps(ARGUMENTS, ensure_ascii=False)
XML = (
    f"<function=look>\n<parameter=city>\n{ARGUMENTS['city']}\n</parameter>\n"
    '<parameter=days>\n[1, {"a": "}"}]\n</parameter>\n</function>'
)
CALL = ("call", "look", ARGUMENTS)
# format, text, whether the prompt ends within reasoning, what it holds
CASES = [
    (
        "hermes",
        f'Hm.\n<tool_call>\n{{"name": "look", "arguments": {GIVEN}}}\n</tool_call>',
        False,
        [("content", "Hm.\n"), CALL],
    ),
    ("hermes", f"<tool_call>{XML}</tool_call>\n<tool_call>{XML}</tool_call>", False, [CALL, CALL]),
    ("hermes", "a <tool_call>{} </tool_call> b", False, [("content", "a <tool_call>{} </tool_call> b")]),
    ("hermes", "a <tool_call>{", False, [("content", "a <tool_call>{")]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "look", "arguments": {GIVEN}}}]', False, [CALL]),
    ("mistral", f"Hm.[TOOL_CALLS]look[ARGS]{GIVEN}[TOOL_CALLS]look{GIVEN}", False, [("content", "Hm."), CALL, CALL]),
    (
        "llama3",
        f'{{"name": "look", "parameters": {GIVEN}}}; {{"name": "look", "parameters": {GIVEN}}}',
        False,
        [CALL, CALL],
    ),
    ("llama3", f'<|python_tag|>{{"name": "look", "parameters": {GIVEN}}}', False, [CALL]),
    ("llama3", '{"a": 1}', False, [("content", '{"a": 1}')]),
    ("none", "<tool_call>{}</tool_call>", False, [("content", "<tool_call>{}</tool_call>")]),
    (
        "hermes",
        f"<think>\na < b</think>\n\nYes.<tool_call>{XML}</tool_call>",
        False,
        [("reasoning", "\na < b"), ("content", "Yes."), CALL],
    ),
    ("none", "a < b</think>Yes.</think>", True, [("reasoning", "a < b"), ("content", "Yes.</think>")]),
    ("none", "<think>a", False, [("reasoning", "a")]),
    ("none", "a <think>b</think>", False, [("content", "a <think>b</think>")]),
    ("none", "  <", False, [("content", "  <")]),
    ("none", "", False, []),
]


@pytest.mark.parametrize(("form", "text", "thinks", "expected"), CASES, ids=range(len(CASES)))
def test_parts_do_not_depend_on_how_the_text_comes(
    form: str, text: str, thinks: bool, expected: list[tuple[object, ...]]
) -> None:
    for seed in range(40):
        rng, reader = random.Random(seed), AnswerReader(TOOL_FORMATS.get(form), has_thoughts=True, thinks=thinks)
        found: list[list[object]] = []
        rest = text
        while rest or not found:
            count = rng.randint(1, 7) if seed else len(text)
            deltas = reader.read(rest[:count], is_last=count >= len(rest))
            rest = rest[count:]
            for delta in deltas:
                if delta.kind == "call":
                    found.append(["call", delta.text, ""])
                elif delta.kind == "arguments":
                    found[-1][2] = f"{found[-1][2]}{delta.text}"
                elif found and found[-1][0] == delta.kind:
                    found[-1][1] = f"{found[-1][1]}{delta.text}"
                else:
                    found.append([delta.kind, delta.text])
            if not text:
                break
        found = [[*one[:2], json.loads(str(one[2]))] if one[0] == "call" else one for one in found]
        assert found == list(map(list, expected))
        assert reader.num_calls == [one[0] for one in expected].count("call")


# What texts are made of: markers, whole and cut, valid calls and their pieces, quotes, escapes, braces, white space.
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *('{"name": "look", "arguments": ', '{"name": "look", "parameters": ', '{"type": "function", "name": "a", '),
    *('{"arguments": {"a": 1}, "name": "b"}', '{"a": "}\\"{"}', '{"b": [1, {}]}', "{}", "{", "}", "[", "]", '"name"'),
    *("<function=look>", "<parameter=city>", "</parameter>", "</function>", "<param", "</", "<", "[TOOL", "\n3\n"),
    *(" ", "\n", "  \n\n ", "\u3000", ",", ";", ":", '"', "\\", "look", "Köln", "🙂", " x", '"q"'),
]


LONGEST_HEAD = 512


def read_in_pieces(form: str | None, pieces: Sequence[str], has_thoughts: bool, thinks: bool) -> list[Delta]:
    """What an answer holds, with neighbours of a kind joined."""
    reader = AnswerReader(TOOL_FORMATS.get(form or ""), has_thoughts=has_thoughts, thinks=thinks)
    deltas = []
    for piece in pieces:
        deltas += reader.read(piece)
        assert len(reader._text) - reader._at < LONGEST_HEAD  # all that is looked at again
    joined: list[Delta] = []
    for kind, text in deltas + reader.read("", is_last=True):
        if joined and joined[-1].kind == kind != "call":
            joined[-1] = Delta(kind, joined[-1].text + text)
        else:
            joined.append(Delta(kind, text))
    return joined


def cut(text: str, rng: random.Random) -> list[str]:
    longest, pieces = rng.choice([1, 2, 5, 20]), []
    while text:
        count = rng.randint(1, longest)
        pieces.append(text[:count])
        text = text[count:]
    return pieces


@pytest.mark.parametrize("form", [*TOOL_FORMATS, None])
@pytest.mark.parametrize("num_texts", [400, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_every_way_to_cut_a_text_gives_what_the_whole_gives(form: str | None, num_texts: int) -> None:
    for seed in range(num_texts):
        rng = random.Random(seed)
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 14)))
        if form is not None and rng.random() < 0.6:
            text = TOOL_FORMATS[form].begin + text
        text = "".join(letter for letter in text if rng.random() > 0.01)
        mode = (rng.random() < 0.5, rng.random() < 0.2)
        expected = read_in_pieces(form, [text], *mode)
        for _ in range(3):
            assert read_in_pieces(form, cut(text, rng), *mode) == expected, (text, mode)
        if text and form is None and not any(mode):
            assert expected == [("content", text)]


FLOODS = [
    *(" ", "\n ", "a", "{", "[", '"', "\\", "<", "[TOOL_CALLS]", "<tool_call>", "</tool_call", '{"a": ', ", ; ", "{} "),
    *(
        "<parameter=a>",
        "<parameter=a></parameter>",
        '{"name": "a", "arguments": {}}',
        '{"arguments": {}, "name": "b"} ',
    ),
]


def cpu_seconds(form: str | None, text: str) -> float:
    pieces = [text[start : start + 8] for start in range(0, len(text), 8)]
    reader = AnswerReader(TOOL_FORMATS.get(form or ""), has_thoughts=True, thinks=False)
    begin = time.thread_time()
    for piece in pieces:
        reader.read(piece)
    reader.read("", is_last=True)
    return time.thread_time() - begin


@pytest.mark.parametrize("form", [*TOOL_FORMATS, None])
def test_the_time_of_an_answer_is_linear_in_its_length(form: str | None) -> None:
    """Four times the flood, behind each beginning of a call or of reasoning, takes four times as long, not sixteen."""
    beginnings = ["", "<think>"]
    if form is not None:
        begin = TOOL_FORMATS[form].begin
        heads = [
            "",
            "a ",
            '{"name": "',
            '{"name": "a", "arguments": {"b": "',
            "<function=a>",
            "<function=a><parameter=b>",
        ]
        beginnings = [*beginnings, *(begin + head for head in heads)]
    for beginning, flood in product(beginnings, FLOODS):
        text = beginning + flood * (2400 // len(flood))
        longer = text + flood * (3 * len(text) // len(flood))
        ratios: list[float] = []
        while not ratios or (ratios[-1] > 6 and len(ratios) < 8):
            ratios.append(cpu_seconds(form, longer) / min(cpu_seconds(form, text) for _ in range(2)))
        assert ratios[-1] <= 6, (beginning, flood, ratios)


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", 'a "b"']}, "days": {"type": "integer", "minimum": 1, "maximum": 42}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


NOTHING = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_calls_that_a_grammar_forces_are_read(form: str) -> None:
    """Random ways through the grammar of one or two tools, token by token; with reasoning, no call before its end."""
    tokenizer, tools = byte_tokenizer(), TOOL_FORMATS[form]
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [END])
    for seed in range(8):
        is_one = seed % 2 == 0
        parameters: dict[str, object] = {"look": CITY} if is_one else {"look": CITY, "stop": NOTHING}
        matcher = asyncio.run(
            compiler.compile("structural_tag", tools.grammar(parameters, is_one=is_one, thinks=False))
        )
        tokens = sample(matcher, seed, 2000)
        if not is_one and tools.separator is not None:  # a second one in place of the end
            matcher.rollback(1)
            more = tokenizer.encode(tools.separator + tools.call[0][0]).ids
            assert all(map(matcher.accept_token, more))
            tokens = tokens[:-1] + more + sample(matcher, seed, 2000)
        text = tokenizer.decode(tokens)
        reader = AnswerReader(tools, has_thoughts=False, thinks=False)
        deltas = [delta for letter in text for delta in reader.read(letter)] + reader.read("", is_last=True)
        assert {delta.kind for delta in deltas} == {"call", "arguments"}, text
        calls: list[list[str]] = []
        for kind, text in deltas:
            if kind == "call":
                calls.append([text, ""])
            calls[-1][1] += text * (kind == "arguments")
        for name, given in calls:
            arguments = json.loads(given)
            assert name in parameters
            assert name == "stop" or (arguments["city"].strip() in ("Köln", 'a "b"') and 1 <= arguments["days"] <= 42)
        assert reader.num_calls == 2 - (is_one or tools.separator is None)
    thinking = asyncio.run(compiler.compile("structural_tag", tools.grammar({"a": {}}, is_one=True, thinks=True)))
    assert all(thinking.accept_token(one) for one in tokenizer.encode("Hm. </think>\n\n").ids)
    assert tokenizer.encode(tools.call[0][0]).ids == allowed(thinking)
