"""A benchmark whose process ends goes on in another: every case gets its row or its refusal once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paged.bench import benchmark
from paged.bench.benchmark import DEVICE_LOST, Benchmark


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
