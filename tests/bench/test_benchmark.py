"""A benchmark whose process ends goes on in another: every case gets its row or its refusal once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paged.bench import benchmark
from paged.bench.benchmark import DEVICE_LOST, Benchmark
from paged.bench.timing import CompiledWhileTimedError


@dataclass(frozen=True)
class Case:
    name: str


def _benchmark(measured: list[str]) -> Benchmark:
    def measure(case: Case, _: Any) -> dict[str, Any]:
        measured.append(case.name)
        if case.name == "kills":
            raise KeyboardInterrupt  # as far as the loop goes, the process ends
        if case.name == "loses":
            raise RuntimeError("an illegal memory access was encountered")
        return {"name": case.name}

    cases = [Case(name) for name in ("first", "kills", "second", "loses", "third")]
    return Benchmark("some", "Some.", lambda _: cases, measure, {"cpu": 2}, device="cpu", has_limits=False)


def test_every_case_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(benchmark, "interpreting", lambda: False)
    measured: list[str] = []
    monkeypatch.setattr(benchmark, "_released", lambda _: measured[-1] != "loses")
    some, path = _benchmark(measured), tmp_path / "some.json"
    arguments = ["--json", str(path), "--resume"]
    with pytest.raises(KeyboardInterrupt):
        some.main(arguments, lambda _: None)
    assert some.main(arguments, lambda _: None) == DEVICE_LOST
    assert some.main(arguments, lambda _: None) == 1
    assert measured == ["first", "kills", "second", "loses", "third"]
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["first", "second", "third"]
    assert found["refused"]["kills"] == "it ended the process"
    assert "illegal memory access" in found["refused"]["loses"]
    assert found["not_run"] == []
    assert "running" not in found


def test_a_row_that_compiled_while_timed_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is refused where it does so every time."""
    monkeypatch.setattr(benchmark, "interpreting", lambda: False)
    measured: list[str] = []

    def measure(case: Case, _: Any) -> dict[str, Any]:
        measured.append(case.name)
        if case.name == "always" or measured.count(case.name) == 1:
            raise CompiledWhileTimedError("_late_kernel compiled while timed")
        return {"name": case.name}

    cases, path = [Case("once"), Case("always")], tmp_path / "some.json"
    some = Benchmark("some", "Some.", lambda _: cases, measure, {"cpu": 2}, device="cpu", has_limits=False)
    assert some.main(["--json", str(path)], lambda _: None) == 1
    assert measured == ["once", "once", "always", "always"]
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["once"]
    assert "_late_kernel" in found["refused"]["always"]
