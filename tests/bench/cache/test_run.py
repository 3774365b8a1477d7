"""The cache benchmark: its arithmetic, that a wrong hit gets no speed, and a run with and without a peer."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paged import PagedKvCacheManager
from paged.bench.cache import run as bench_cache
from paged.bench.cache.cases import CASES, Case
from paged.bench.cache.run import PEER_VERSION, growth, main, measure_group, row
from paged.bench.cache.workload import BLOCK_SIZE, check_hit, decode_lengths, prompts
from paged.bench.check import WrongResultError

TIMED = Case("timed", lambda: iter([1e-5]))
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    bench_cache._rows.cache_clear()


@pytest.fixture
def _no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM is not on the path: importing it raises ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "paged.bench.cache.peer_vllm", raising=False)
    monkeypatch.setattr(bench_cache, "version", lambda name: PEER_VERSION)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases that take little time to set up."""
    names = ("allocate_free.prefix_cache", "prefix_match.4k_cached", "evict", "metadata.mixed")
    monkeypatch.setattr(bench_cache, "CASES", [case for case in CASES if case.name in names])


def test_ratio_is_the_peers_median_over_ours() -> None:
    result = row(TIMED, [2e-6, 1e-6, 3e-6], [9e-6, 6e-6, 60e-6])
    peer = {"median_us": 9.0, "p20_us": 7.2, "p80_us": 39.6, "ratio": 4.5}
    assert result["peers"]["vllm"] == pytest.approx(peer)
    assert (result["median_us"], result["p20_us"], result["p80_us"]) == pytest.approx((2.0, 1.4, 2.6))


@pytest.mark.parametrize(("theirs", "met"), [(3.0, True), (2.9, False), (None, None)])
def test_goal_of_a_case_with_a_peer(theirs: float | None, met: bool | None) -> None:
    result = row(TIMED, [1.0, 1.0], [] if theirs is None else [theirs, theirs])
    (goal,) = result["goals"]
    assert (goal["text"], goal["met"], goal["value"]) == ("at least 3x vLLM's manager", met, theirs)
    assert goal["reached"] == (None if theirs is None else pytest.approx(theirs / 3))


@pytest.mark.parametrize(("microseconds", "met"), [(99, True), (101, False)])
def test_goal_in_microseconds(microseconds: float, met: bool) -> None:
    case = Case("timed", TIMED.function, goal_us=100.0)
    result = row(case, [microseconds * 1e-6] * 2, [])
    (goal,) = result["goals"]
    assert (goal["text"], goal["met"], goal["reached"]) == ("at most 100 us", met, pytest.approx(100 / microseconds))


def test_growth_is_of_medians_of_rows_that_are_there() -> None:
    rows = [
        row(Case(name, TIMED.function), [seconds] * 2, []) for name, seconds in (("pool.1k", 2.0), ("pool.1M", 3.0))
    ]
    assert growth(rows) == {"pool.1M / pool.1k, input x1000": pytest.approx(1.5)}
    assert growth(rows[:1]) == {}


def test_samples_are_taken_in_turns_and_the_first_are_dropped() -> None:
    order: list[str] = []

    def samples(name: str) -> Iterator[float]:
        for index in itertools.count():
            order.append(name)
            yield float(index)

    def ours(name: str = "a") -> Iterator[float]:
        return samples(name)

    peer: Any = ModuleType("peer")
    peer.ours = lambda: samples("peer")
    cases = [Case("a", ours), Case("b", ours, {"name": "b"}, has_peer=False)]
    rows = measure_group(cases, peer, repeats=2)
    rounds = [tuple(order[start : start + 3]) for start in range(0, 15, 3)]
    assert (len(order), {tuple(sorted(names)) for names in rounds}) == (15, {("a", "b", "peer")})
    assert len(set(rounds)) > 1
    assert [result["median_us"] for result in rows.values()] == pytest.approx([3.5e6, 3.5e6])
    assert (rows["a"]["peers"]["vllm"]["median_us"], rows["b"]["peers"]) == (pytest.approx(3.5e6), {})


def test_hit_leaves_the_last_block_or_token() -> None:
    for found in (48, 63):
        check_hit(found, 64, cached=True)
    check_hit(0, 64, cached=False)
    for found, cached in ((47, True), (64, True), (16, False)):
        with pytest.raises(WrongResultError):
            check_hit(found, 64, cached=cached)


def test_workload_is_what_the_rows_say() -> None:
    lengths = decode_lengths()
    assert len(lengths) == 256
    assert sum(lengths) / 256 == pytest.approx(1000, abs=1)
    assert sum(length % BLOCK_SIZE == 0 for length in lengths) == 16
    first, second = itertools.islice(prompts(64), 2)
    assert first != second
    assert first == next(prompts(64))


@EACH_CASE
def test_every_case_gives_samples(case: Case) -> None:
    assert all(seconds > 0 for seconds in itertools.islice(case.ours(), 2))


def test_wrong_hit_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKvCacheManager, "commit", lambda *_: None)
    (case,) = (case for case in CASES if case.name == "prefix_match.4k_cached")
    with pytest.raises(WrongResultError):
        next(iter(case.ours()))


@pytest.mark.usefixtures("_no_peer", "_small")
def test_run_without_the_peer(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    lines: list[str] = []
    assert main(["--repeats", "5", "--json", str(path)], lines.append) == 0
    report = json.loads(path.read_text())
    assert report["absent"]["vllm"].startswith(f"skipped: vLLM {PEER_VERSION} is not on PYTHONPATH")
    assert any(report["absent"]["vllm"] in line for line in lines)
    assert [result["name"] for result in report["rows"]] == [case.name for case in bench_cache.CASES]
    for result in report["rows"]:
        assert 0 < result["p20_us"] <= result["median_us"] <= result["p80_us"]
        assert result["peers"] == {}
        assert any(line.startswith(result["name"]) for line in lines)


@pytest.mark.usefixtures("_small")
def test_run_with_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer that takes a second for everything."""
    path = tmp_path / "rows.json"
    lines: list[str] = []
    peer: Any = ModuleType("peer")
    peer.prefix_match = lambda *_, **__: itertools.repeat(1.0)
    monkeypatch.setattr(bench_cache, "load_peer", lambda: (peer, "slow"))
    assert main(["--repeats", "2", "--only", "prefix_match", "--json", str(path)], lines.append) == 0
    (result,) = json.loads(path.read_text())["rows"]
    assert result["peers"]["vllm"]["ratio"] == pytest.approx(1e6 / result["median_us"])
    assert "at least 3x vLLM's manager: met" in "\n".join(lines)


def test_peer_of_another_version_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cache, "version", lambda name: "0.1.0")
    assert bench_cache.load_peer() == (None, f"skipped: vLLM 0.1.0 is on PYTHONPATH, expected {PEER_VERSION}")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bench_cache, "version", missing)
    peer, message = bench_cache.load_peer()
    assert peer is None
    assert "not on PYTHONPATH" in message


def test_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        main([])
    assert "unset it" in capsys.readouterr().err
