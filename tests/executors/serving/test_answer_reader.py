"""Answers taken apart: calls in the forms of four kinds of models, reasoning, and text that only resembles them."""

import asyncio
import json
import random

import pytest

from paged.executors.serving.answer_reader import AnswerReader
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
