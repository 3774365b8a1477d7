"""Conversations as a model writes them: random parts of answers, and their text by the description of a format."""

import json
import random
from collections.abc import Sequence
from typing import Any

from paged.serving.formats.answer_reader import AnswerReader
from paged.serving.formats.answer_text import Delta
from paged.serving.formats.reasoning_formats import REASONING_FORMATS, Reasoning
from paged.serving.formats.tool_formats import GEMMA_QUOTE, ToolFormat

Part = tuple[str, ...] | tuple[str, str, dict[str, Any]]
WORDS = [
    *(
        "a",
        "Köln",
        "杭州",
        "🙂",
        "e\u0301",
        "x y",
        '"',
        "'",
        "\\",
        "\n",
        "\\n",
        "\t",
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        "&",
    ),
    *(",", ":", "=", "(", ")", "</", "<|", "```", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>"),
    *("<|end|>", "<arg_value>", "</parameter>", '{"name": "a"}', "12", "true", "null", "None", "\u2028", "\x7f"),
]
NAMES = ["look", "get_weather", "a.b-c", "files/read", "Ü1"]
KEYS = ["city", "days", "a_b", "Größe", "x1"]
REASONING = {
    "harmony": "harmony",
    "seed_oss": "seed",
    "gemma4": "gemma4",
    "mistral": "mistral",
    "hunyuan": "hunyuan",
    "minimax_m3": "minimax_m3",
    "kimi_k3": "kimi_k3",
}


def reasoning_of(name: str) -> Reasoning:
    return REASONING_FORMATS[REASONING.get(name, "think")]


def text(rng: random.Random, without: Sequence[str] = (), longest: int = 8) -> str:
    """A text that holds none of some markers."""
    while True:
        drawn = "".join(rng.choices(WORDS, k=rng.randint(1, longest)))
        if not any(marker in drawn for marker in without):
            return drawn


def value(rng: random.Random, without: Sequence[str], depth: int = 2) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind < 2:
        return text(rng, without) if rng.random() < 0.9 else ""
    if kind == 6:
        return [value(rng, without, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice(KEYS): value(rng, without, depth - 1) for _ in range(rng.randrange(3))}
    return rng.choice([0, -7, 12, 1.5, 1e-7, True, False, None])


def conversation(rng: random.Random, form: ToolFormat, reasoning: Reasoning) -> tuple[list[Part], dict[str, Any]]:
    """Return parts of an answer, and the schemas of the tools that say which arguments are texts."""
    markers = [form.begin, form.end, *form.other_begins, form.tags.end.strip(), GEMMA_QUOTE]
    if reasoning.has_channels:
        markers += ["<|"]
    markers += [reasoning.begin.strip(), reasoning.end.strip(), *(marker.strip() for marker in reasoning.frame)]
    without = [marker for marker in markers if marker]
    if form.arguments in ("object", "json", "python") or form.tags.begin == "":
        in_values = [GEMMA_QUOTE] if form.arguments == "braces" else []
    else:
        in_values = [form.tags.end.strip() or form.tags.begin]
    schemas: dict[str, Any] = {name: {"type": "object", "properties": {}} for name in NAMES}
    parts: list[Part] = []
    if rng.random() < 0.5:
        parts.append(("reasoning", text(rng, without).strip() or "a"))
    if rng.random() < 0.5 and not form.bare:
        parts.append(("content", f"Hm{text(rng, without).strip()}."))
    for _ in range(rng.randrange(3)):
        for _ in range(rng.randint(1, 1 if form.separator is None else 3)):
            name = rng.choice(NAMES)
            arguments = {key: value(rng, in_values) for key in rng.sample(KEYS, rng.randrange(4))}
            if form.arguments == "elements":
                arguments = {key: _told_apart(argument) for key, argument in arguments.items()}
            for key, argument in arguments.items():
                schema = schemas[name]["properties"].setdefault(key, {"type": "string"})
                if not isinstance(argument, str):
                    schema.pop("type", None)
            parts.append(("call", name, arguments))
        if rng.random() < 0.4:
            parts.append(("reasoning", text(rng, without).strip() or "b"))
        if rng.random() < 0.4:
            parts.append(("content", f"Then {text(rng, without).strip()}."))
            if form.bare:
                break
    return _typed(parts, schemas), schemas


def _told_apart(argument: Any, *, is_inner: bool = False) -> Any:
    """Return an argument whose elements tell texts from values, and lists from objects, without a schema of theirs."""
    if isinstance(argument, list):
        return [_told_apart(inner, is_inner=True) for inner in argument] or [0]
    if isinstance(argument, dict):
        return {key: _told_apart(inner, is_inner=True) for key, inner in argument.items()} or {"a": None}
    return f"x{argument}" if is_inner and isinstance(argument, str) else argument


def _typed(parts: list[Part], schemas: dict[str, Any]) -> list[Part]:
    """Drop texts where another call has no text: without quotes their kinds cannot be told apart."""
    for part in parts:
        if part[0] != "call":
            continue
        name, arguments = part[1], part[2]
        assert isinstance(arguments, dict)
        for key in [*arguments]:
            if isinstance(arguments[key], str) and "type" not in schemas[name]["properties"][key]:
                del arguments[key]
    return parts


def written(parts: list[Part], form: ToolFormat, reasoning: Reasoning) -> str:
    """Return the text of an answer by the description of its format."""
    if reasoning.has_channels:
        return _in_channels(parts, form, reasoning)
    pieces: list[str] = []
    index = 0
    while index < len(parts):
        part = parts[index]
        if part[0] == "call":
            run = []
            while index < len(parts) and parts[index][0] == "call":
                run.append(parts[index])
                index += 1
            pieces.append(_calls(run, form))
            continue
        if part[0] == "reasoning":
            pieces.append(f"{reasoning.begin}{part[1]}{reasoning.end}\n\n")
        elif reasoning.frame:
            pieces.append(f"{reasoning.frame[0]}{part[1]}{reasoning.frame[1]}")
        else:
            pieces.append(str(part[1]))
        index += 1
    return "".join(pieces)


def _in_channels(parts: list[Part], form: ToolFormat, reasoning: Reasoning) -> str:
    pieces = []
    for index, part in enumerate(parts):
        if part[0] == "call":
            pieces.append(_calls([part], form))
        elif part[0] == "reasoning":
            pieces.append(f"{reasoning.begin}{part[1]}{reasoning.end}")
        else:
            channel = "final" if index == len(parts) - 1 else "commentary"
            pieces.append(f"<|channel|>{channel}<|message|>{part[1]}<|end|>")
    return "<|start|>assistant".join(pieces)


def _calls(run: Sequence[Part], form: ToolFormat) -> str:
    begin, end = (form.begin, form.end) if not form.bare else ("", "")
    opening, closing = begin + "[" * form.is_list, "]" * form.is_list + end
    calls = []
    for index, (_, name, arguments) in enumerate(run):
        before, after, last = form.call
        after = after.replace("{index}", str(index)).replace("{id}", "aB3dE6gH9")
        calls.append(f"{before}{name}{after}{_arguments(arguments, form)}{last}")
    separator = form.separator or ""
    if form.is_section:
        return opening + separator.join(calls) + closing
    return separator.join(opening + call + closing for call in calls)


def _arguments(arguments: Any, form: ToolFormat) -> str:
    if form.arguments in ("object", "json"):
        return json.dumps(arguments, ensure_ascii=False)
    if form.arguments == "python":
        return ", ".join(f"{key}={argument!r}" for key, argument in arguments.items()) + ")"
    if form.arguments == "braces":
        return ",".join(f"{key}:{_in_braces(argument)}" for key, argument in arguments.items()) + "}"
    if form.arguments == "elements":
        return "".join(_element(key, argument, form) for key, argument in arguments.items())
    pieces = []
    for key, argument in arguments.items():
        is_text = isinstance(argument, str)
        shown = argument if is_text else json.dumps(argument, ensure_ascii=False)
        lines = "\n" * form.tags.is_in_lines
        middle = form.tags.middle.replace("{is_text}", str(is_text).lower())
        middle = middle.replace("{type}", "string" if is_text else "object")
        pieces.append(f"{form.tags.begin}{key}{middle}{lines}{shown}{lines}{form.tags.end}")
    return "".join(pieces)


def _element(name: str, argument: Any, form: ToolFormat) -> str:
    if isinstance(argument, list):
        content = "\n".join(_element("item", inner, form) for inner in argument)
    elif isinstance(argument, dict):
        content = "".join(_element(key, inner, form) for key, inner in argument.items())
    else:
        content = argument if isinstance(argument, str) else json.dumps(argument)
    return f"{form.tags.begin}{name}>{content}{form.tags.begin}/{name}>"


def _in_braces(argument: Any) -> str:
    if isinstance(argument, str):
        return f"{GEMMA_QUOTE}{argument}{GEMMA_QUOTE}"
    if isinstance(argument, list):
        return "[" + ",".join(map(_in_braces, argument)) + "]"
    if isinstance(argument, dict):
        return "{" + ",".join(f"{key}:{_in_braces(inner)}" for key, inner in argument.items()) + "}"
    return json.dumps(argument)


def read(reader: AnswerReader, pieces: Sequence[str]) -> list[Part]:
    """Return the parts that a reader finds, contents and reasoning stripped."""
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.read(piece)
    deltas += reader.read("", is_last=True)
    joined: list[list[str]] = []
    for kind, piece in deltas:
        if kind == "call":
            joined.append(["call", piece, ""])
        elif kind == "arguments":
            assert joined[-1][0] == "call", deltas
            joined[-1][2] += piece
        elif joined and joined[-1][0] == kind:
            joined[-1][1] += piece
        else:
            joined.append([kind, piece])
    parts: list[Part] = []
    for entry in joined:
        if entry[0] == "call":
            parts.append(("call", entry[1], json.loads(entry[2])))
        elif entry[1].strip():
            parts.append((entry[0], entry[1].strip()))
    return parts
