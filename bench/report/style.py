"""Whose colour is whose in a report: the same system looks alike wherever it appears."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """Whose times. role: its colour's name; systems of one role differ in marker and line."""

    label: str
    role: str
    marker: str
    line: str = "-"


OURS = System("ours", "ours", "o")
_SYSTEMS = {
    "vllm": System("vLLM", "vllm", "s"),
    "vllm-cpu": System("vLLM's CPU engine", "vllm", "s", "--"),
    "sdpa_cudnn": System("torch cuDNN", "torch", "^"),
    "sdpa_flash": System("torch flash", "torch", "v", "--"),
    "sdpa_math": System("torch math", "torch", "D", ":"),
    "flex": System("torch flex", "torch", "<", "-."),
    "torch_grouped_mm": System("torch grouped", "torch", ">"),
    "transformers": System("transformers", "transformers", "P"),
    "transformers_eager": System("transformers eager", "transformers", "h", "--"),
    "transformers_batched_mm": System("transformers batched", "transformers", "p", ":"),
    "flashinfer": System("FlashInfer", "flashinfer", "X"),
}

# Light and dark. The hues are Okabe and Ito's (https://jfly.uni-koeln.de/color/), which colour-blind readers tell
# apart, their yellow and pink darkened for lines on white.
COLOURS = {
    "ours": ("#0072b2", "#56b4e9"),
    "vllm": ("#d55e00", "#ff8c42"),
    "torch": ("#009e73", "#34c79a"),
    "transformers": ("#aa4499", "#dd88cf"),
    "flashinfer": ("#c79100", "#f0c44c"),
    "ink": ("#1f2328", "#e6e8eb"),
    "muted": ("#656d76", "#9aa4af"),
    "grid": ("#e4e7eb", "#30363d"),
}


def system(name: str) -> System:
    """The system of a peer's name in a row; an unknown one is drawn muted, under that name."""
    return _SYSTEMS.get(name, System(name, "muted", "*"))


def colour(role: str) -> str:
    return COLOURS[role][0]
