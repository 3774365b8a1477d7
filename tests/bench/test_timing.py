"""How calls are timed on a GPU, with a clock that the calls advance, and the time that cores were away."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged.bench import timing
from paged.bench.timing import CompiledWhileTimedError, sampler, stolen_seconds, take, take_in_turns

CUDA = torch.device("cuda")


class _Clock:
    """Events that read a clock; a graph whose replay does again what was done during its capture."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captured: list[float] | None = None

    def call(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds
            if self.captured is not None:
                self.captured.append(seconds)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()

    def event(*, enable_timing: bool) -> Any:
        assert enable_timing
        made = SimpleNamespace(time=0.0, synchronize=lambda: None)
        made.record = lambda: vars(made).update(time=clock.now)
        made.elapsed_time = lambda end: (end.time - made.time) * 1e3
        return made

    class Graph:
        def replay(self) -> None:
            clock.now += sum(self.calls)

    @contextlib.contextmanager
    def capture(graph: Any) -> Iterator[None]:
        clock.captured = graph.calls = []
        yield
        clock.captured = None

    for name, fake in (("Event", event), ("CUDAGraph", Graph), ("graph", capture), ("synchronize", lambda *_: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    return clock


@pytest.mark.parametrize(
    ("num_sets", "seconds", "num_calls"),
    [(1, 1e-5, 8), (3, 1e-5, 8), (31, 1e-5, 31), (1, 1e-3, 4), (1, 0.2, 1), (2, 0.2, 2)],
)
def test_short_calls_share_a_graph(clock: _Clock, num_sets: int, seconds: float, num_calls: int) -> None:
    captured: list[int] = []
    call = clock.call(seconds)

    def counted() -> None:
        captured.append(clock.captured is not None)
        call()

    method, sample = sampler([counted] * num_sets, CUDA)
    assert method == "graph"
    assert sum(captured) == num_calls
    assert sample() == pytest.approx(seconds)


def test_what_a_graph_cannot_take_is_timed_by_events(clock: _Clock) -> None:
    method, sample = sampler([clock.call(1e-3), clock.call(3e-3)], CUDA, capturable=False)
    assert (method, sample()) == ("events", pytest.approx(2e-3))


_WAYS: dict[str, Callable[[Callable[[], float]], Any]] = {
    "take": lambda call: take([call], torch.device("cpu"), 3),
    "take in turns": lambda call: take_in_turns({"ours": lambda: 0.0, "a peer": call}, 3),
}


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("late", [1, 3])
def test_what_compiles_while_timed_is_refused(way: str, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first call or at a later one; Triton's hook is called as its JIT calls it, and stays the one it was."""
    triton = pytest.importorskip("triton")
    calls, seen = itertools.count(1), []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **given: seen.append(given))

    def call() -> float:
        if next(calls) == late:
            triton.knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="_late_kernel"))
        return 0.0

    if (way, late) == ("take", 1):  # which warms up by itself
        _WAYS[way](call)
    else:
        with pytest.raises(CompiledWhileTimedError, match="_late_kernel"):
            _WAYS[way](call)
    assert len(seen) == 1
    assert len(_WAYS[way](call)) > 0
    triton.knobs.runtime.jit_post_compile_hook(fn=None)
    assert len(seen) == 2


def test_stolen_time_is_that_of_our_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = ["cpu  9 9 9 9 9 9 9 99 0 0", "cpu0 1 2 3 4 5 6 7 150 9 9", "cpu1 9 9 9 9 9 9 9 70 9 9"]
    others = ["cpu2 1 2 3 4 5 6 7 25 0 0", "intr 8 1 2 3 4 5 6 7 8", "ctxt 3", ""]
    (tmp_path / "stat").write_text("\n".join([*cores, *others]))
    monkeypatch.setattr(timing, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda _: {2, 0})
    monkeypatch.setattr(timing.os, "sysconf", lambda _: 100)
    assert stolen_seconds() == [1.5, 0.25]
    monkeypatch.setattr(timing.os, "sched_getaffinity", lambda _: {64, 2})
    assert stolen_seconds() == [0.25, 0.0]
    monkeypatch.setattr(timing, "_STAT", tmp_path / "none")
    assert stolen_seconds() == [0.0]


def test_measured_rates() -> None:
    limits = timing.measured_ceilings(torch.device("cpu"), torch.float32, 1, max_bytes=1 << 20)
    assert min(limits.copy, limits.read, limits.matmul) > 0
