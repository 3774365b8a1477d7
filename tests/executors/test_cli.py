"""`paged generate` on the bundled checkpoint: right answers, options that reach the engine, named errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paged.executors import cli
from paged.models.recall.task import sample_prompts


def test_command_answers_its_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--count", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["summary"]["correct"] == 4
    assert result["summary"]["peak_blocks"] > 0
    assert [answer["text"] for answer in result["answers"]] == [answer["expected"] for answer in result["answers"]]
    assert cli.main(["generate", "--count", "3", "--dtype", "bfloat16"]) == 0
    table = capsys.readouterr().out
    assert table.count(" right") == 3 + 1
    assert "torch.bfloat16" in table


def test_command_takes_prompts_and_names_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (prompt,) = sample_prompts(3, 1)
    path = tmp_path / "prompts.txt"
    path.write_text(f"{prompt.text}\n\n")
    assert cli.main(["generate", "--prompts", str(path), "--prompt", prompt.text]) == 0
    assert capsys.readouterr().out.count(prompt.answer) >= 2
    for arguments, message in (
        ([str(tmp_path), "--prompt", "x"], "tokenizer.json: no such file"),
        ([str(tmp_path)], "no prompts"),
        (["--prompts", str(tmp_path / "none")], "No such file"),
        (["--num-blocks", "2"], "the cache holds 32"),
    ):
        assert cli.main(["generate", *arguments]) == 1
        assert message in capsys.readouterr().err


def test_chunks_and_budget_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    def summary(*arguments: str) -> dict[str, int]:
        assert cli.main(["generate", "--count", "3", "--json", *arguments]) == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)["summary"]
        return found

    whole, chunked = summary("--chunk-size", "512", "--token-budget", "2048"), summary("--token-budget", "32")
    assert whole["prefill_tokens"] == chunked["prefill_tokens"]
    assert chunked["steps"] >= whole["prefill_tokens"] / 32 > whole["steps"]
    assert chunked["mixed_steps"] > whole["mixed_steps"] == 0
    small = summary("--num-blocks", "48")
    assert small["correct"] == 3
    assert small["peak_blocks"] <= 48
