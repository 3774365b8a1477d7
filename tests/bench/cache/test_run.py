"""The cache benchmark: its arithmetic, that a wrong hit gets no speed, and a run without its peer."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import PagedKvCacheManager
from paged.bench.benchmark import Setting
from paged.bench.cache import run as bench_cache
from paged.bench.cache.cases import CASES, Case, check_hit
from paged.bench.cache.run import PEER_VERSION, goals, main
from paged.bench.check import WrongResultError
from paged.bench.contest import Contest

pytestmark = pytest.mark.usefixtures("by_pytorch")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` runs the cases that take little time to set up."""
    names = ("allocate_free.prefix_cache", "prefix_match.4k_cached", "evict", "metadata.mixed")
    monkeypatch.setattr(bench_cache, "CASES", [case for case in CASES if case.name in names])


def _timed(goal_us: float | None = None) -> Case:
    return Case("timed", lambda: iter([1e-5]), goal_us=goal_us)


def _row(**seconds: list[float]) -> dict[str, Any]:
    """The row of a contest whose samples take so many seconds."""
    repeats = len(seconds["ours"])
    samples = {name: iter(values).__next__ for name, values in seconds.items()}
    return Contest({"name": "timed"}, Setting(torch.device("cpu"), repeats), samples=samples).row()


def test_ratio_is_the_peers_median_over_ours() -> None:
    result = _row(ours=[2e-6, 1e-6, 3e-6], vllm=[9e-6, 6e-6, 60e-6])
    peer = {"median_us": 9.0, "p20_us": 7.2, "p80_us": 39.6, "ratio": 4.5}
    assert result["peers"]["vllm"] == pytest.approx(peer)
    assert (result["median_us"], result["p20_us"], result["p80_us"]) == pytest.approx((2.0, 1.4, 2.6))


def test_goals() -> None:
    """Beside a peer and in microseconds."""
    for ratio, met in ((3.0, True), (2.9, False), (None, None)):
        peers = {} if ratio is None else {"vllm": {"ratio": ratio}}
        (goal,) = goals(_timed(), {"peers": peers})
        assert (goal["text"], goal["met"], goal["value"]) == ("at least 3x vLLM's manager", met, ratio)
    for microseconds, met in ((99, True), (101, False)):
        (goal,) = goals(_timed(goal_us=100.0), {"median_us": microseconds})
        assert (goal["text"], goal["met"]) == ("at most 100 us", met)


def test_hit_leaves_the_last_block_or_token() -> None:
    for found in (48, 63):
        check_hit(found, 64, cached=True)
    check_hit(0, 64, cached=False)
    for found, cached in ((47, True), (64, True), (16, False)):
        with pytest.raises(WrongResultError):
            check_hit(found, 64, cached=cached)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gives_samples(case: Case) -> None:
    assert all(seconds > 0 for seconds in itertools.islice(case.ours(), 2))


def test_wrong_hit_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKvCacheManager, "commit", lambda *_: None)
    (case,) = (case for case in CASES if case.name == "prefix_match.4k_cached")
    with pytest.raises(WrongResultError):
        next(iter(case.ours()))


def test_run_without_the_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where vLLM is not on the path: importing it raises ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "paged.bench.cache.peer_vllm", raising=False)
    monkeypatch.setattr(bench_cache, "version", lambda name: PEER_VERSION)
    path, lines = tmp_path / "rows.json", []
    assert main(["--repeats", "2", "--json", str(path)], lines.append) == 0
    report = json.loads(path.read_text())
    assert sum(f"vllm: skipped: vLLM {PEER_VERSION} is not on PYTHONPATH" in line for line in lines) == 1
    assert [result["name"] for result in report["rows"]] == [case.name for case in bench_cache.CASES]
    assert [result["peers"] for result in report["rows"]] == [{}] * 4
