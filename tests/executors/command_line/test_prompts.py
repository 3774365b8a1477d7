"""Where prompts come from."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from paged.executors.command_line import cli
from paged.models.recall.task import RecallPrompt
from tests.executors.command_line.commands import Generate, texts


def test_prompts_of_files_and_errors(
    capsys: pytest.CaptureFixture[str], generate: Generate, tmp_path: Path, prompt: RecallPrompt
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"{prompt.text}\n\n")
    assert cli.main(["generate", "--prompts", str(path), "--prompt", prompt.text]) == 0
    assert capsys.readouterr().out.count(f"\n{prompt.answer}\n") == 2
    for arguments, message in (
        (("--prompts", str(tmp_path / "none")), "No such file"),
        (("--num-blocks", "2"), "the cache holds 32"),
        (("--lora", "french"), "expected NAME=FOLDER"),
        (("--lora", "french=x", "--lora", "french=y"), "each name once"),
        (("--temperature", "-1"), "temperature: -1.0, expected"),
        (("--prompt", "x", "--chat"), "no chat template"),
        (("--device", "gpu"), "--device gpu: expected cpu, cuda"),
        *([] if torch.cuda.is_available() else [(("--device", "cuda"), "--device cuda: torch sees no GPU here")]),
    ):
        assert message in generate(*arguments, code=1)["error"]


def test_prompts_of_stdin(
    generate: Generate, copy: Path, prompt: RecallPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name, or where a model of one's own is given no prompts and stdin is no terminal."""
    for arguments in (("--prompts", "-"), (str(copy),)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{prompt.text}\n"))
        assert texts(generate(*arguments)) == [prompt.answer]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "no prompts" in generate(str(copy), code=1)["error"]
    assert generate("--count", "1")["summary"]["correct"] == 1, "the bundled task does not wait for stdin"
    terminal = io.StringIO("never read")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "no prompts" in generate(str(copy), code=1)["error"]
