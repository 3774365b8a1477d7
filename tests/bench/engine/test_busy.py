"""Rows of steps beside busy processes: what is compared, and in which environments."""

from typing import Any

import pytest
import torch

from paged.bench.benchmark import Setting, line
from paged.bench.contest import OURS
from paged.bench.engine import busy, busy_process, models
from paged.executors.thread_waits import SPIN_COUNT, SPIN_VARIABLE

TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3}
SETTING = Setting(torch.device("cpu"), 2)


class _Process:
    """Steps of one way to wait. With neighbours they take as much longer as `slower` says."""

    def __init__(self, seconds: float) -> None:
        self.about = {"threads": 2}
        self.seconds, self.slower = seconds, 1.0

    def ask(self, *, sequences: int, seconds: float, is_invariant: bool) -> float:
        return self.seconds * self.slower * (1 + is_invariant)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, _Process]:
    made = {way: _Process(1e-3) for way in busy._ways()}

    class Load:
        def __init__(self, count: int, **_: float) -> None:
            self.count = count

        def __enter__(self) -> None:
            for process in made.values():
                process.slower = 1.0 + self.count

        def __exit__(self, *_: object) -> None:
            for process in made.values():
                process.slower = 1.0

    monkeypatch.setattr(busy, "process_of", lambda way, dtype: made[way])
    monkeypatch.setattr(busy, "neighbours", Load)
    monkeypatch.setattr(busy, "cores_left", lambda count, seconds: 1.0)
    return made


def _measure(name: str) -> dict[str, Any]:
    (case,) = (case for case in busy.rows() if case.name == name)
    return busy.busy(case, SETTING)


def test_beside_neighbours_the_goal_is_the_fair_time(processes: dict[str, _Process]) -> None:
    """With half of the cores left, a step may take twice its quiet time; here it takes three times as long."""
    row = _measure("busy.8.2")
    assert row["detail"] == {"threads": 2, "fair_us": pytest.approx(2e3), "cores_left": pytest.approx(1.0)}
    [goal] = row["goals"]
    assert (goal["value"], goal["met"]) == (pytest.approx(1.5), False)
    assert _measure("busy.8.1")["goals"][0]["met"]
    assert "all threads, spin 300000 1.00x" in line(row)


def test_without_neighbours_the_goal_is_libgomps_default(processes: dict[str, _Process]) -> None:
    assert _measure("busy.1.0")["goals"][0]["met"]
    processes[OURS].seconds = 1.1e-3
    [goal] = _measure("busy.1.0")["goals"]
    assert (goal["value"], goal["met"]) == (pytest.approx(1.1), False)


@pytest.mark.usefixtures("processes")
def test_invariant_steps_beside_plain_ones() -> None:
    dtype, case = busy.invariant_rows()[0]
    row = busy.invariant(dtype, case, SETTING)
    assert row["name"] == "busy.invariant.float32.8.0"
    assert row["goals"][0]["value"] == pytest.approx(0.5)


def test_each_way_is_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """How threads wait in ours is set by the process itself."""
    monkeypatch.setenv(SPIN_VARIABLE, SPIN_COUNT)
    ways = busy._ways()
    assert SPIN_VARIABLE not in ways[OURS].variables
    assert ways["all threads, spin 300000"].variables[SPIN_VARIABLE] == "300000"
    assert ways["one thread"].variables["OMP_NUM_THREADS"] == "1"
    assert [name for name, way in ways.items() if way.threads == "all"] == ["all threads", "all threads, spin 300000"]


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.parametrize("is_invariant", [False, True])
def test_steps_of_a_process_go_on_when_sequences_end(is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_process, "_NEW_TOKENS", 6)
    executor = models.random_executor(models.MODELS["Llama-10M"] | TINY, torch.device("cpu"), 512)
    assert busy_process.decode(executor, sequences=3, seconds=0.05, is_invariant=is_invariant) > 0
    assert executor.kv_manager is not None
    assert executor.kv_manager.handles() == ()
