"""Bars: on a terminal alone, of what takes time, in the right words."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paged import Engine, LlmExecutor, SamplingParams
from paged.executors import progress
from paged.serving.command_line.cli import RECALL
from paged.serving.command_line.safe_output import safe_output

ROOT = Path(progress.__file__).resolve().parents[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(*, is_shown: bool = True) -> LlmExecutor:
    return LlmExecutor.from_pretrained(
        RECALL, num_blocks=16, block_size=16, device="cpu", cuda_graphs=(1, 2), progress=is_shown
    )


@pytest.fixture(scope="module")
def executor() -> LlmExecutor:
    return load()


def generate(executor: LlmExecutor, is_shown: bool) -> object:
    return Engine(executor).generate([[5, 6]], SamplingParams(max_tokens=2), progress=is_shown)


CALLS: dict[str, tuple[Callable[[LlmExecutor, bool], object], str]] = {
    "read": (lambda _, is_shown: load(is_shown=is_shown), r"weights: .*\d[kMG]?B/s"),
    "pack": (lambda one, is_shown: one.warmup(progress=is_shown), r"packing: .*\d[kMG]?B/s"),
    "warm up": (lambda one, is_shown: one.warmup(progress=is_shown), r"recorded steps: 100%.*step"),
    "generate": (generate, r"generate: 100%.*prompt"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bar_is_for_a_terminal_alone(name: str, executor: LlmExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    call, pattern = CALLS[name]
    for stream, is_shown in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        call(executor, is_shown)
        has_bar = stream.isatty() and is_shown
        assert bool(re.search(pattern, stream.getvalue())) == has_bar
        assert has_bar or not stream.getvalue()
        assert "CUDA" not in stream.getvalue(), "there is none on a CPU"


def test_commands_pass_the_terminal_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their stream escapes what a bar needs; a closed one has none."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with safe_output():
        assert list(progress.tracked([1, 2], desc="x", unit="y")) == [1, 2]
    assert "\r" in terminal.getvalue()
    terminal.close()
    assert list(progress.tracked([1, 2], desc="x", unit="y")) == [1, 2]


def test_nothing_else_makes_bars() -> None:
    folders = ("bench", "executors", "kernels", "models", "paged/cache", "paged/interop")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    makers = {file.name for file in sources if re.search(r"^\s*(from|import) tqdm", file.read_text(), re.MULTILINE)}
    assert makers == {"progress.py", "backend.py"}, "the latter's folder may not import the former"


@pytest.mark.thorough  # imports torch in a process of its own, 2 s
def test_reading_takes_no_symbolic_shapes() -> None:
    """They are of sympy, which takes a quarter of a second to import, and no weight needs it."""
    text = (
        f"import sys; from paged import LlmExecutor; LlmExecutor.from_pretrained({str(RECALL)!r}, device='cpu'); "
        "print('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "False\n"
