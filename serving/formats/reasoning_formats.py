"""Formats of reasoning as data: the markers around it, by the name of `--reasoning-parser`.

`AnswerReader` in `answer_reader.py` separates reasoning from content by them.
"""

from __future__ import annotations

from typing import NamedTuple


class Reasoning(NamedTuple):
    """Format of a model's reasoning.

    Attributes:
        models: models whose chat template shows it.
        hints: texts that all occur in such a template.
        begin: marker before reasoning.
        end: marker after reasoning.
        frame: markers around the rest of an answer, which are removed.
        has_channels: whether an answer consists of messages in channels, as in OpenAI's harmony.
    """

    models: str
    hints: tuple[str, ...]
    begin: str
    end: str
    frame: tuple[str, ...] = ()
    has_channels: bool = False


REASONING_FORMATS = {
    "harmony": Reasoning(
        "gpt-oss", ("<|channel|>", "<|message|>"), "<|channel|>analysis<|message|>", "<|end|>", has_channels=True
    ),
    "kimi_k3": Reasoning(
        "Kimi K3", ("<|open|>", "<|sep|>"), "<|open|>think<|sep|>", "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "seed": Reasoning("Seed-OSS", ("</seed:think>",), "<seed:think>", "</seed:think>"),
    "minimax_m3": Reasoning("MiniMax M3", ("</mm:think>",), "<mm:think>", "</mm:think>"),
    "mistral": Reasoning("Magistral", ("[/THINK]",), "[THINK]", "[/THINK]"),
    "gemma4": Reasoning("Gemma 4", ("<channel|>",), "<|channel>thought\n", "<channel|>"),
    "hunyuan": Reasoning(
        "Hunyuan A13B", ("</think>", "<answer>"), "<think>\n", "\n</think>", ("<answer>\n", "\n</answer>", "</answer>")
    ),
    "ernie": Reasoning(
        "Ernie 4.5", ("</think>", "<response>", "<tool_call>"), "<think>", "</think>",
        ("<response>\n", "\n</response>", "</response>"),
    ),
    "think": Reasoning("most others", ("</think>",), "<think>", "</think>"),
}  # fmt: skip
