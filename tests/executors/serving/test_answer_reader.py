"""Answers taken apart: calls in the forms of four kinds of models, reasoning, and text that only resembles them."""

import json
import random

import pytest

from paged.executors.serving.answer_reader import TOOL_FORMATS, AnswerReader

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
                if delta.call is not None:
                    found.append(["call", delta.call.name, json.loads(delta.call.arguments)])
                elif found and found[-1][0] == delta.kind:
                    found[-1][1] = f"{found[-1][1]}{delta.text}"
                else:
                    found.append([delta.kind, delta.text])
            if not text:
                break
        assert found == list(map(list, expected))
        assert reader.num_calls == [one[0] for one in expected].count("call")
