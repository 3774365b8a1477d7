"""A benchmark whose process ends goes on in another: every case gets its row or its refusal once."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paged.bench import benchmark
from paged.bench.benchmark import DEVICE_LOST, HUNG, Benchmark
from paged.bench.timing import CompiledWhileTimedError
from paged.errors import InvalidInputError
from tests.deadline import HANG_S

pytestmark = pytest.mark.usefixtures("by_pytorch")


@dataclass(frozen=True)
class Case:
    name: str


def _benchmark(names: str, measure: Callable[[str], None]) -> Benchmark:
    def row(case: Case, _: Any) -> dict[str, Any]:
        measure(case.name)
        return {"name": case.name}

    cases = [Case(name) for name in names.split()]
    return Benchmark("some", "Some.", lambda _: cases, row, {"cpu": 2}, device="cpu", has_limits=False)


def test_every_case_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(name: str) -> None:
        measured.append(name)
        if name == "kills":
            raise KeyboardInterrupt  # as far as the loop goes, the process ends
        if name == "loses":
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(benchmark, "released", lambda _: measured[-1] != "loses")
    some, path = _benchmark("first kills second loses third", measure), tmp_path / "some.json"
    arguments = ["--json", str(path), "--resume"]
    with pytest.raises(KeyboardInterrupt):
        some.main(arguments, lambda _: None)
    assert some.main(arguments, lambda _: None) == DEVICE_LOST
    lines: list[str] = []
    assert some.main(arguments, lines.append) == 1
    assert [line.split()[0] for line in lines if line.startswith("third")] == ["third"]
    assert measured == ["first", "kills", "second", "loses", "third"]
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["first", "second", "third"]
    assert found["refused"]["kills"] == "it ended the process"
    assert "illegal memory access" in found["refused"]["loses"]
    assert found["not_run"] == []
    assert "running" not in found


_HANGS = """
import sys, threading
from pathlib import Path
from typing import NamedTuple
from paged.bench.benchmark import Benchmark
from paged.bench.watchdog import WATCHDOG

class Case(NamedTuple):
    name: str

def measure(case, _):
    if case.name == "hangs":
        threading.Event().wait()
    for _ in range(3):  # together longer than the limit
        threading.Event().wait(0.7)
        WATCHDOG.progress()
    return {"name": case.name}

cases = [Case(name) for name in ("slow", "hangs", "last")]
benchmark = Benchmark("some", "Some.", lambda _: cases, measure, {"cpu": 2}, device="cpu", has_limits=False)
sys.exit(benchmark.main(sys.argv[1:]))
"""


def test_a_case_that_hangs_ends_its_process_alone(tmp_path: Path) -> None:
    """And the next process says where; a case that is slow but makes progress is let be."""
    path = tmp_path / "some.json"
    command = [sys.executable, "-c", _HANGS, "--json", str(path), "--resume", "--case-limit", "1.5"]
    first = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
    assert first.returncode == -signal.SIGALRM, first.stderr
    assert json.loads(path.read_text())["running"] == "hangs"
    second = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
    assert second.returncode == 1, second.stderr
    results = json.loads(path.read_text())
    assert [row["name"] for row in results["rows"]] == ["slow", "last"]
    assert results["refused"]["hangs"].startswith(f"{HUNG} at threading.py:")
    assert "<string>:" in results["refused"]["hangs"]


def test_results_are_gone_on_from(tmp_path: Path) -> None:
    """Also by a run of more cases; nothing is kept of another device's."""
    measured: list[str] = []
    some, path = _benchmark("one two", measured.append), tmp_path / "some.json"
    for only, others in (("one", []), ("", ["two"]), ("", ["two"])):
        options = ["--json", str(path), "--resume", "--only", only]
        assert some.main(options, lambda _: None) == 0
        assert measured == ["one", *others]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "another"}))
    assert some.main(options, lambda _: None) == 0
    assert measured == ["one", "two", "one", "two"]
    with pytest.raises(InvalidInputError, match="--only three: in the name of no case; there are one, two"):
        some.main([*options, "--only", "three"], lambda _: None)


def test_a_row_that_compiled_while_timed_is_measured_again(tmp_path: Path) -> None:
    """And is refused where it does so every time."""
    measured: list[str] = []

    def measure(name: str) -> None:
        measured.append(name)
        if name == "always" or measured.count(name) == 1:
            raise CompiledWhileTimedError("_late_kernel compiled while timed")

    path = tmp_path / "some.json"
    assert _benchmark("once always", measure).main(["--json", str(path)], lambda _: None) == 1
    assert measured == ["once", "once", "always", "always"]
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == ["once"]
    assert "_late_kernel" in found["refused"]["always"]


def test_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        _benchmark("one", lambda _: None).main([])
    assert "mean nothing; unset it to benchmark" in capsys.readouterr().err
