"""What a report reads: files that are not results are named with what is wrong, and runs are told apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged.bench.report.build import main
from paged.bench.report.results import ResultsError, load_runs

Json = dict[str, Any]


def _row(run: Json, **changes: Any) -> None:
    run["rows"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run.pop("benchmark"), "benchmark is None, expected one of attention, moe"),
        (lambda run: run.update(benchmark="soup"), "benchmark is 'soup'"),
        (lambda run: run.pop("device"), "no device, expected str"),
        (lambda run: run.pop("rows"), "no rows, expected list"),
        (lambda run: run.update(refused=["a"]), r"refused is \['a'\], expected dict"),
        (lambda run: run.update(refused={"a": 1}), "refused: a is 1, expected str"),
        (lambda run: run["rows"].insert(0, "row"), r"rows\[0\]: str, expected an object"),
        (lambda run: run["rows"][0].pop("median_us"), r"rows\[0\]: no median_us, expected int or float"),
        (lambda run: _row(run, median_us="12"), r"rows\[0\]: median_us is '12'"),
        (lambda run: _row(run, median_us=True), r"rows\[0\]: median_us is True"),
        (lambda run: _row(run, median_us=float("nan")), r"rows\[0\]: median_us is nan, expected a finite number"),
        (lambda run: _row(run, median_us=0.0), r"rows\[0\]: median_us is 0.0, expected more than 0"),
        (lambda run: _row(run, host_us="long"), r"rows\[0\]: host_us is 'long'"),
        (lambda run: _row(run, groups=[[1, 1]]), r"rows\[0\].groups\[0\]: no key length, expected int"),
        (lambda run: _row(run, peers={"vllm": {"median_us": 1.0}}), r"rows\[0\].peers.vllm: no ratio"),
        (lambda run: _row(run, goals=[{"text": "fast", "value": 1.0, "met": 1}]), r"goals\[0\]: met is 1"),
        (lambda run: _row(run, goals=[{"text": "fast", "value": None, "met": True}]), r"goals\[0\]: only one of"),
    ],
)
def test_malformed_results_are_named(
    change: Callable[[Json], None], said: str, results: dict[str, Path], tmp_path: Path
) -> None:
    run = json.loads(results["attention"].read_text())
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(run))
    assert len(load_runs([path])[0].rows) == len(run["rows"])
    change(run)
    path.write_text(json.dumps(run))
    with pytest.raises(ResultsError, match=f"rows.json: .*{said}|rows.json: {said}"):
        load_runs([path])


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\udcff"])
def test_what_is_no_json_is_an_error_that_writes_nothing(
    text: str, results: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "other.json", tmp_path / "out"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(SystemExit):
        main([str(results["cache"]), str(path), "--out", str(out)])
    assert f"ResultsError: {path}: " in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(ResultsError, match="cannot be read"):
        load_runs([tmp_path / "none.json"])


def test_runs_are_told_apart_by_as_little_as_it_takes(results: dict[str, Path], tmp_path: Path) -> None:
    run = json.loads(results["engine"].read_text())
    dates = ("2026-11-20T10:00:00+00:00", "2026-11-21T10:00:00+00:00", "2026-11-21T11:00:00+00:00")
    files = [("A", dates[0]), ("B", dates[0]), ("B", dates[1]), ("C", dates[1]), ("C", dates[2]), ("D", dates[0])]
    paths = []
    for index, (device, date) in enumerate([*files, files[-1]]):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(json.dumps({**run, "device": device, "date": date}))
    labels = [loaded.label for loaded in load_runs([*paths, results["cache"]]) if loaded.benchmark == "engine"]
    days = ["B, 2026-11-20", "B, 2026-11-21"]
    assert labels == ["A", *days, f"C, {dates[1]}", f"C, {dates[2]}", f"D, {paths[5]}", f"D, {paths[6]}"]
    assert len(load_runs([paths[0], paths[0]])) == 1
