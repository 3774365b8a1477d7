"""`paged bench`: presets reach their modules with the arguments that follow them."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paged.bench import benchmark
from paged.bench.limits import Ceilings
from paged.bench.moe import run as bench_moe
from paged.serving.command_line import bench, cli
from paged.serving.command_line.bench import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_module(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert callable(importlib.import_module(f"paged.bench.{PRESETS[name].module}").main)
    if PRESETS[name].needs_gpu and not torch.cuda.is_available():
        assert cli.main(["bench", name]) == 1
        assert f"UnsupportedError: paged bench {name} needs a GPU" in capsys.readouterr().err


def test_arguments_go_to_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[Any] = []
    monkeypatch.setattr(bench_moe, "main", lambda argv: given.append((sys.argv[0], argv)) or 1)
    before = sys.argv[0]
    assert cli.main(["bench", "moe", "--only", "Mixtral", "--json", "x.json"]) == 1
    assert given == [("paged bench moe", ["--only", "Mixtral", "--json", "x.json"])]
    assert sys.argv[0] == before
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "attention", "--help"])
    assert end.value.code == 0
    assert "usage: paged bench attention" in capsys.readouterr().out


def test_a_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`quick` has arguments of its own, and the caller's win."""
    monkeypatch.setenv("PAGED_BACKEND", "torch")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(benchmark, "ceilings", lambda *_: Ceilings(1e11, 1e11, 1e12))
    path = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--only", "merge_attn", "--repeats", "2", "--json", str(path)]
    assert cli.main(["bench", "quick", *arguments]) == 0
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["merge_attn_states"]
    assert "merge_attn_states" in capsys.readouterr().out


def test_all_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What wrote results is reported, and the exit code is the worst."""
    calls: list[Sequence[str]] = []

    def call(*arguments: str) -> int:
        calls.append(arguments)
        if arguments[0] not in ("moe", "report"):
            Path(arguments[2]).write_text("{}")
        return int(arguments[0] == "moe")

    monkeypatch.setattr(bench, "_call", call)
    assert cli.main(["bench", "all", "--out", str(tmp_path / "out"), "--repeats", "2"]) == 1
    assert [arguments[0] for arguments in calls] == ["attention", "moe", "kernels", "engine", "cache", "report"]
    assert calls[0][-2:] == ("--repeats", "2")
    written = [str(tmp_path / "out" / f"{name}.json") for name in ("attention", "kernels", "engine", "cache")]
    assert calls[-1] == ("report", *written, "--out", str(tmp_path / "out"))
