"""Microbenchmarks through pytest-benchmark: implementations of a case in one group, wrong ones without a time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paged.bench.gpu import ROOT
from paged.bench.timing import SampleClock
from tests.deadline import HANG_S

PLUGIN = """
import paged
right = paged.merge_attn_states

def wrong(*args, **options):
    result = right(*args, **options)
    result[0].view(-1)[-1] += 1
    return result

paged.merge_attn_states = wrong
"""


def _run(folder: Path, keyword: str, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output, and the results by name."""
    path = folder / "results.json"
    environment = {}
    for name, value in os.environ.items():
        # pytest-benchmark times nothing in a worker of pytest-xdist.
        if name != "TRITON_INTERPRET" and not name.startswith("PYTEST_"):
            environment[name] = value
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment |= {"PAGED_BACKEND": "torch"}
    command = [sys.executable, "-m", "paged", "bench", "micro", "-k", keyword, "--benchmark-json", str(path), *options]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=2 * HANG_S
    )
    results = {}
    if path.exists() and path.stat().st_size:
        for result in json.loads(path.read_text())["benchmarks"]:
            results[result["param"]] = result
    return run.returncode, run.stdout + run.stderr, results


def test_a_group_holds_the_implementations_of_a_case(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    code, output, results = _run(tmp_path, "(prefill and 1x16.h) or merge_attn or metadata.mixed")
    assert code == 0, output
    attention = "attention.prefill.1x16.h32_8.b16"
    merge, metadata = "kernels.merge_attn_states-ours", "cache.metadata.mixed-ours"
    assert results.keys() == {f"{attention}-ours", f"{attention}-sdpa", merge, metadata}
    assert {results[f"{attention}-{name}"]["group"] for name in ("ours", "sdpa")} == {attention}
    for result in (results[f"{attention}-sdpa"], results[merge]):
        median_us = result["stats"]["median"] * 1e6
        assert result["extra_info"]["median_us"] == pytest.approx(median_us)
        assert result["extra_info"]["percent"] == pytest.approx(100 * result["extra_info"]["bound_us"] / median_us)
    assert results[metadata]["stats"]["rounds"] == 100
    assert f"benchmark '{attention}': 2 tests" in output


def test_a_wrong_result_gets_no_time(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "planted.py").write_text(PLUGIN)
    code, output, results = _run(tmp_path, "merge_attn", "-p", "planted")
    assert (code, results) == (1, {}), output
    assert "WrongResultError" in output


def test_clock_counts_samples_alone() -> None:
    clock = SampleClock()
    for seconds in (0.25, 1.0):
        before = clock()
        clock.run(lambda: seconds)  # noqa: B023
        assert clock() - before == seconds
