"""Answers taken apart: published samples, random conversations of every format, hostile texts, and forced calls."""

import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from tokenizers import Tokenizer

from paged import ChatTokenizer
from paged.executors.text.detokenizer import Detokenizer
from paged.serving.formats import answer_reader, answer_text, argument_reader
from paged.serving.formats.answer_reader import AnswerReader
from paged.serving.formats.answer_text import Delta
from paged.serving.formats.reasoning_formats import REASONING_FORMATS
from paged.serving.formats.tool_formats import TOOL_FORMATS, MarkedTokenizer, Tongue
from paged.serving.grammar.structured import GrammarCompiler
from paged.serving.text.chat_template import ChatTemplate
from tests.serving.grammar.test_structured import END, VOCABULARY, allowed, byte_tokenizer, sample
from tests.serving.text.spoken import conversation, read, reasoning_of, written

IS_LONG = bool(os.environ.get("SOAK"))
ARGUMENTS = {"city": "Köln </tool", "days": [1, {"a": "}"}]}
GIVEN = json.dumps(ARGUMENTS, ensure_ascii=False)
XML = (
    f"<function=look>\n<parameter=city>\n{ARGUMENTS['city']}\n</parameter>\n"
    '<parameter=days>\n[1, {"a": "}"}]\n</parameter>\n</function>'
)
CALL = ("call", "look", ARGUMENTS)
THINK = "think"
# format of calls, of reasoning, text, whether the prompt ends within reasoning, what it holds
CASES: list[tuple[str, str, str, bool, list[Any]]] = [
    (
        "hermes",
        THINK,
        f'Hm.\n<tool_call>\n{{"name": "look", "arguments": {GIVEN}}}\n</tool_call>',
        False,
        [("content", "Hm."), CALL],
    ),
    ("hermes", THINK, '<tool_call>{"arguments": {}, "id": 1, "name": "b"}</tool_call>', False, [("call", "b", {})]),
    ("qwen_xml", THINK, f"<tool_call>{XML}</tool_call>\n<tool_call>{XML}</tool_call>", False, [CALL, CALL]),
    ("hermes", THINK, "a <tool_call>{} </tool_call> b", False, [("content", "a <tool_call>{} </tool_call> b")]),
    ("hermes", THINK, "a <tool_call>{", False, [("content", "a <tool_call>{")]),
    (
        "hermes",
        THINK,
        '<tool_call><tool_call>{"name": "look", "arguments": {}}</tool_call>',
        False,
        [("content", "<tool_call>"), ("call", "look", {})],
    ),
    ("glm", THINK, "<tool_call> is a tag", False, [("content", "<tool_call> is a tag")]),
    ("glm", THINK, "<tool_call>stop</tool_call>", False, [("call", "stop", {})]),
    ("mistral_list", THINK, f'[TOOL_CALLS] [{{"name": "look", "arguments": {GIVEN}}}]', False, [CALL]),
    (
        "mistral",
        THINK,
        f"Hm.[TOOL_CALLS]look[ARGS]{GIVEN}[TOOL_CALLS]look{GIVEN}",
        False,
        [("content", "Hm."), CALL, CALL],
    ),
    ("mistral", THINK, f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{GIVEN}", False, [CALL]),
    (
        "llama3",
        THINK,
        f'{{"name": "look", "parameters": {GIVEN}}}; {{"name": "look", "parameters": {GIVEN}}}',
        False,
        [CALL] * 2,
    ),
    ("llama3", THINK, f'<|python_tag|>{{"type": "function", "name": "look", "parameters": {GIVEN}}}', False, [CALL]),
    ("llama3", THINK, '{"a": 1}', False, [("content", '{"a": 1}')]),
    (
        "llama3",
        THINK,
        '{"name": "unknown", "parameters": {}}',
        False,
        [("content", '{"name": "unknown", "parameters": {}}')],
    ),
    ("llama4", THINK, "[a](b) and [1]", False, [("content", "[a](b) and [1]")]),
    (
        "llama4",
        THINK,
        "[look(city=\"a'b\\n\\u00fc\", days=(1, -2.5, None), ok=True, more={'k': [{}]})]",
        False,
        [("call", "look", {"city": "a'b\nü", "days": [1, -2.5, None], "ok": True, "more": {"k": [{}]}})],
    ),
    (  # as the template of LFM2 writes a quote in a text, and that of Seed-OSS what is no text
        "lfm2",
        THINK,
        "<|tool_call_start|>[look(city='a'b')]<|tool_call_end|>",
        False,
        [("call", "look", {"city": "a'b"})],
    ),
    (
        "seed_oss",
        THINK,
        "<seed:tool_call>\n<function=look>\n<parameter=city>None</parameter>\n<parameter=days>[{'a': None}, True]"
        "</parameter>\n<parameter=more>None</parameter>\n</function>\n</seed:tool_call>",
        False,
        [("call", "look", {"city": "None", "days": [{"a": None}, True], "more": "None"})],
    ),
    ("none", THINK, "<tool_call>{}</tool_call>", False, [("content", "<tool_call>{}</tool_call>")]),
    (
        "qwen_xml",
        THINK,
        f"<think>\na < b</think>\n\nYes.<tool_call>{XML}</tool_call>",
        False,
        [("reasoning", "a < b"), ("content", "Yes."), CALL],
    ),
    ("none", THINK, "a < b</think>Yes.</think>", True, [("reasoning", "a < b"), ("content", "Yes.</think>")]),
    ("none", THINK, "<think>a", False, [("reasoning", "a")]),
    ("none", THINK, "a <think>b</think>", False, [("content", "a <think>b</think>")]),
    ("none", THINK, "  <", False, [("content", "<")]),
    ("none", THINK, "", False, []),
    (
        "none",
        "hunyuan",
        "<think>\na\n</think>\n<answer>\nYes.\n</answer>",
        False,
        [("reasoning", "a"), ("content", "Yes.")],
    ),
    (
        "none",
        "ernie",
        "a\n</think>\n\n<response>\nYes.\n</response>\n",
        True,
        [("reasoning", "a"), ("content", "Yes.")],
    ),
    (
        "gemma4",
        "gemma4",
        '<|channel>thought\na<channel|><|tool_call>call:look{city:<|"|>K<|"|>,n:[1,{k:null}]}<tool_call|>',
        False,
        [("reasoning", "a"), ("call", "look", {"city": "K", "n": [1, {"k": None}]})],
    ),
    (
        "kimi_k2",
        THINK,
        f"<|tool_calls_section_begin|><|tool_call_begin|>look:0<|tool_call_argument_begin|>{GIVEN}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        False,
        [CALL],
    ),
    (  # a type says that 3 is a text
        "kimi_k3",
        "kimi_k3",
        "a<|close|>think<|sep|><|open|>response<|sep|>Hm.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="look" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>12'
        '<|close|>argument<|sep|><|open|>argument key="days" type="array"<|sep|>[1]<|close|>argument<|sep|>'
        '<|open|>argument key="more" type="string"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="look" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
        True,
        [
            *(("reasoning", "a"), ("content", "Hm.")),
            *(("call", "look", {"city": "12", "days": [1], "more": "3"}), ("call", "look", {})),
        ],
    ),
    ("harmony", "harmony", f" to=functions.look<|channel|>commentary json<|message|>{GIVEN}<|call|>", False, [CALL]),
    (  # an unclosed call, and what only the schema tells
        "minimax_m3",
        "minimax_m3",
        '</mm:think>]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="look">\n]<]minimax[>[<city>12'
        "]<]minimax[>[</city>"
        "]<]minimax[>[<days>]<]minimax[>[<day>1]<]minimax[>[</day>]<]minimax[>[</days>]<]minimax[>[</invoke>",
        False,
        [("content", "</mm:think>"), ("call", "look", {"city": "12", "days": [1]})],
    ),
    (
        "harmony",
        "harmony",
        "a<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        True,
        [("reasoning", "a"), ("content", "Yes.")],
    ),
    ("harmony", "harmony", "Yes.", False, [("content", "Yes.")]),
    (
        "none",
        "harmony",
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>",
        False,
        [("content", "{}")],
    ),
]
PARAMETERS = {"look": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}}}


@pytest.mark.parametrize(("form", "reasoning", "text", "thinks", "expected"), CASES, ids=range(len(CASES)))
def test_published_samples_and_what_resembles_them(
    form: str, reasoning: str, text: str, thinks: bool, expected: list[Any]
) -> None:
    for size in (1, 2, 3, 7, len(text) or 1):
        reader = AnswerReader(
            TOOL_FORMATS.get(form), REASONING_FORMATS[reasoning], thinks=thinks, parameters=PARAMETERS
        )
        assert read(reader, [text[at : at + size] for at in range(0, len(text), size)]) == expected
        assert reader.num_calls == [part[0] for part in expected].count("call")


def cut(text: str, rng: random.Random) -> list[str]:
    longest, pieces = rng.choice([1, 2, 5, 20]), []
    while text:
        count = rng.randint(1, longest)
        pieces.append(text[:count])
        text = text[count:]
    return pieces


def marked_tokenizer(name: str) -> tuple[Tokenizer, MarkedTokenizer]:
    """A tokenizer with a token for each marker of a format, and for each byte; and what the engine decodes with."""
    form, reasoning, tokenizer = TOOL_FORMATS[name], reasoning_of(name), byte_tokenizer()
    markers = {form.begin, form.end, *form.other_begins, reasoning.begin, reasoning.end, *reasoning.frame}
    tokenizer.add_special_tokens(sorted({marker.strip() for marker in markers} - {""}))
    chat = ChatTokenizer(tokenizer, ChatTemplate({}, {}, "here"))
    return tokenizer, MarkedTokenizer(chat, Tongue(form, reasoning, ("", ""), ""))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_conversations_are_read_as_the_format_writes_them(name: str) -> None:
    form, reasoning = TOOL_FORMATS[name], reasoning_of(name)
    tokenizer, decoder = marked_tokenizer(name)
    for seed in range(2000 if IS_LONG else 30):
        rng = random.Random(seed)
        parts, schemas = conversation(rng, form, reasoning)
        text = written(parts, form, reasoning)
        detokenizer, ids = Detokenizer(decoder), tokenizer.encode(text).ids
        tokens = [detokenizer.read(ids, end, is_last=end == len(ids)) for end in range(1, len(ids) + 1)]
        for pieces in ([text], list(text), cut(text, rng), tokens):
            reader = AnswerReader(form, reasoning, parameters=schemas)
            assert read(reader, pieces) == parts, (seed, text)
        kinds = [part[0] for part in parts]
        up_to_first_call = parts[: kinds.index("call") + 1] if "call" in kinds else parts
        for pieces in ([text], list(text), cut(text, rng), tokens):
            first = AnswerReader(form, reasoning, parameters=schemas, is_one=True)
            assert read(first, pieces) == up_to_first_call, (seed, text)
            assert first.is_complete == ("call" in kinds)
        thoughts = [str(part[1]).encode() for part in parts if part[0] == "reasoning"]
        spaces = len(reasoning.end) - len(reasoning.end.lstrip())
        assert reader.num_reasoning == sum(map(len, thoughts)) + spaces * len(thoughts)


# What hostile texts are made of beside the format's own markers.
PIECES = [
    *('{"name": "look", "arguments": ', '{"name": "look", "parameters": ', '{"type": "function", "name": "a", '),
    *('{"arguments": {"a": 1}, "name": "b"}', '{"a": "}\\"{"}', '{"b": [1, {}]}', "{}", "{", "}", "[", "]", '"name"'),
    *(
        "look(",
        "a=1",
        "b='x'",
        ")",
        "'",
        "look{",
        "call:look{",
        "\\x4",
        "\\ud800",
        "\\",
        "None",
        "-1e9",
        "(",
        "<",
        "</",
    ),
    *(" ", "\n", "  \n\n ", "\u3000", ",", ";", ":", '"', "look", "Köln", "🙂", " x", '"q"', "to=functions.look"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
]


def markers_of(name: str) -> list[str]:
    form, reasoning = TOOL_FORMATS[name], reasoning_of(name)
    texts = [form.begin, form.end, *form.call, *form.tags[:3], *form.other_begins, form.extra, reasoning.begin]
    texts += [reasoning.end, *reasoning.frame]
    if reasoning.has_channels:
        texts += ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|channel|>analysis<|message|>"]
    return [text for text in texts if text]


def joined(form: str, pieces: Sequence[str], thinks: bool) -> list[Delta]:
    """What an answer holds, with neighbours of a kind joined."""
    reader = AnswerReader(TOOL_FORMATS[form], reasoning_of(form), thinks=thinks)
    deltas: list[Delta] = []
    for piece in [*pieces, ""]:
        for kind, text in reader.read(piece, is_last=piece == ""):
            if deltas and deltas[-1].kind == kind != "call":
                deltas[-1] = Delta(kind, deltas[-1].text + text)
            else:
                deltas.append(Delta(kind, text))
        assert len(reader._text) - reader._at < 64  # all that is looked at again: less than a marker
    return deltas


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_hostile_texts_are_read_the_same_however_they_are_cut(name: str) -> None:
    own = markers_of(name)
    for seed in range(100_000 if IS_LONG else 100):
        rng = random.Random(seed)
        pieces = [rng.choice(own if rng.random() < 0.5 else PIECES) for _ in range(rng.randint(1, 14))]
        text = "".join(letter for letter in "".join(pieces) if rng.random() > 0.01)
        thinks = rng.random() < 0.2
        expected = joined(name, [text], thinks)
        assert joined(name, cut(text, rng), thinks) == expected, (seed, text)


FLOODS = [" ", "a", "{", "[", '"', "\\", "<", "'", "(", ",", '{"name": "a", "arguments": {}}', '{"a": ', "{} ", "a="]


def count_work(form: str, text: str) -> int:
    """Lines that the reader runs for a text in pieces of 8 characters."""
    count = 0
    files = {module.__file__ for module in (answer_reader, argument_reader, answer_text)}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        return trace

    reader = AnswerReader(TOOL_FORMATS[form], reasoning_of(form))
    sys.settrace(trace)
    try:
        for at in range(0, len(text), 8):
            reader.read(text[at : at + 8])
        reader.read("", is_last=True)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_work_of_an_answer_is_linear_in_its_length(name: str) -> None:
    """Ten times the flood, behind a beginning of calls, takes ten times as many lines, not a hundred."""
    form = TOOL_FORMATS[name]
    beginning = form.begin + "[" * form.is_list + form.call[0] + "look" + form.call[1]
    floods = [*FLOODS, *markers_of(name)]
    if not IS_LONG:
        floods = random.Random(name).sample(floods, 2)
    for begin in ("", form.begin, beginning, beginning + form.tags.begin + "a" + form.tags.middle):
        for flood in floods:
            count = 100 // len(flood) + 1
            assert count_work(name, begin + flood * 10 * count) <= 12 * count_work(name, begin + flood * count), (
                begin,
                flood,
            )


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Köln", 'a "b"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 42},
        "why": {"type": "string", "maxLength": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


FORMS = ("harmony", "glm", "minimax_m3", "step3", "gemma4", "lfm2", "hermes")  # each kind of arguments


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FORMS else pytest.mark.thorough) for name in TOOL_FORMATS]
)
def test_calls_that_a_grammar_forces_are_read(name: str) -> None:
    """Random ways through the grammar of one or two tools, token by token; with reasoning, no call before its end."""
    tokenizer, form, reasoning = byte_tokenizer(), TOOL_FORMATS[name], reasoning_of(name)
    city: dict[str, Any] = CITY
    if form.arguments == "elements":  # xgrammar refuses the length of texts in them
        city = CITY | {"properties": CITY["properties"] | {"why": {"type": "string", "enum": ["a & <b>"]}}}
    compiler = GrammarCompiler(tokenizer, VOCABULARY, [END])
    for seed in range(16 if IS_LONG else 2):
        is_one = seed % 2 == 0
        parameters: dict[str, object] = {"look": city} if is_one else {"look": city, "stop": NOTHING}
        grammar = form.grammar(parameters, is_one=is_one)
        matcher = asyncio.run(compiler.compile("structural_tag", grammar))
        text = tokenizer.decode(sample(matcher, seed, 4000))
        calls = read(AnswerReader(form, reasoning, parameters=parameters), list(text))
        assert calls, text
        assert len(calls) == 1 or not is_one
        for call in calls:
            assert call[0] == "call", (text, calls)
            arguments: Any = call[2]
            if call[1] == "stop":
                assert arguments == {}
                continue
            assert call[1] == "look"
            assert arguments["city"].strip() in ("Köln", 'a "b"')
            assert 1 <= arguments["days"] <= 42
            assert isinstance(arguments.get("why", ""), str)
    begin = form.grammar({"a": NOTHING}, is_one=True)
    thinking = form.grammar({"a": NOTHING}, is_one=True, reasoning=reasoning, thinks=True)
    firsts = []
    for grammar, before in ((begin, ""), (thinking, f"Hm. {reasoning.end}\n\n")):
        matcher = asyncio.run(compiler.compile("structural_tag", grammar))
        assert all(matcher.accept_token(token) for token in tokenizer.encode(before).ids)
        firsts.append(allowed(matcher))
    assert firsts[0] == firsts[1]
