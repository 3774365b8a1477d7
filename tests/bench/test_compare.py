"""`paged bench compare`: ratios, their intervals, and when a case counts as slower."""

import json
import random
from pathlib import Path

import pytest

from paged.bench.compare import ratio, run_of
from paged.serving.command_line import cli

ROUNDS, SAMPLES = 200, 50


def _samples(generator: random.Random, scale: float, spread: float) -> list[float]:
    return [scale * generator.lognormvariate(0, spread) for _ in range(SAMPLES)]


def _file(path: Path, **times: list[float]) -> str:
    """As pytest-benchmark writes it."""
    path.write_text(json.dumps({"benchmarks": [{"name": n, "stats": {"data": data}} for n, data in times.items()]}))
    return str(path)


def test_the_interval_holds_the_true_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In at least 85 % of two-sided comparisons that promise 95 %; more noise makes it wider."""
    generator, hits = random.Random(1), 0
    for _ in range(ROUNDS):
        runs = []
        for scale in (1.0, 1.3):
            data = sorted(_samples(generator, scale, 0.2))
            runs.append(run_of(data[SAMPLES // 2], data[SAMPLES // 5], data[4 * SAMPLES // 5], SAMPLES))
        result = ratio(runs[:1], runs[1:])
        hits += result.low <= 1.3 <= result.high
    assert hits >= 0.85 * ROUNDS
    quiet, loud = (ratio([run_of(1, 1 - noise, 1 + noise, 50)] * 2, [run_of(1, 1, 1, 50)] * 2) for noise in (0.1, 0.3))
    assert loud.high - loud.low > 2 * (quiet.high - quiet.low)
    apart = ratio([run_of(1, 0.9, 1.1, 50), run_of(2, 1.9, 2.1, 50)], [run_of(1.5, 1.4, 1.6, 50)] * 2)
    assert apart.high / apart.low > 2, "runs that differ say more than the noise within them"


@pytest.mark.parametrize("times", [
    ("NaN", "1", "1"), ("1", "NaN", "1"), ("Infinity", "1", "1"), ("0", "0", "0"), ("-1", "1", "1"), ("1", "2", "1"),
    ("1", "1", "Infinity"), ("1e400", "1", "1"), ("1", "0", "1"),
])  # fmt: skip
def test_times_that_no_run_has_are_refused(
    times: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No ratio with them is above a threshold."""
    right = _file(tmp_path / "right.json", case=[1e-6, 2e-6, 3e-6])
    median, p20, p80 = times
    row = f'{{"name": "case", "median_us": {median}, "p20_us": {p20}, "p80_us": {p80}, "samples": 9}}'
    (tmp_path / "odd.json").write_text(f'{{"rows": [{row}]}}')
    assert cli.main(["bench", "compare", right, str(tmp_path / "odd.json")]) == 1
    assert "no results of a benchmark" in capsys.readouterr().err


def test_slower_cases_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = random.Random(2)
    same, slow = _samples(generator, 1e-3, 0.05), _samples(generator, 1.4e-3, 0.05)
    base = _file(tmp_path / "base.json", same=same, slower=same, faster=slow, gone=same)
    candidate = _file(tmp_path / "candidate.json", same=same, slower=slow, faster=same, noisy=same)
    assert cli.main(["bench", "compare", base, candidate]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "1.000x (" in lines["same"]
    assert lines["slower"].endswith("SLOWER")
    assert lines["faster"].endswith("faster")
    assert lines["in"] == "in one of both only: gone, noisy"
    assert lines["1"] == "1 of 3 cases slower by more than 1.1x"
    assert cli.main(["bench", "compare", base, candidate, "--threshold", "2"]) == 0
    rows = {"rows": [{"name": "slower", "median_us": 1400, "p20_us": 1390, "p80_us": 1410, "samples": 20}]}
    (tmp_path / "ours.json").write_text(json.dumps(rows))
    assert cli.main(["bench", "compare", base, str(tmp_path / "ours.json")]) == 1
    capsys.readouterr()
    (tmp_path / "other.json").write_text("{}")
    for path, error in (("other.json", "no times, expected a file"), ("none.json", "no results of a benchmark")):
        assert cli.main(["bench", "compare", base, str(tmp_path / path)]) == 1
        assert error in capsys.readouterr().err


@pytest.mark.thorough
def test_two_checkouts_run_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pytest_benchmark")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # with it pytest-benchmark measures nothing
    for name in ("base", "candidate"):
        (tmp_path / name / "bench").mkdir(parents=True)
        seconds = {"base": 0.001, "candidate": 0.01}[name]
        text = f"import time\ndef test_wait(benchmark):\n    benchmark.pedantic(time.sleep, ({seconds},), rounds=5)\n"
        (tmp_path / name / "bench" / "test_wait.py").write_text(text)
    checkouts = [str(tmp_path / name) for name in ("base", "candidate")]
    assert cli.main(["bench", "compare", *checkouts, "--rounds", "2", "--benchmark-warmup=off"]) == 1
    assert "test_wait" in capsys.readouterr().out
    assert cli.main(["bench", "compare", *checkouts[::-1], "--rounds", "1"]) == 0
