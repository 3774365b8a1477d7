"""The number of threads of steps, by times of a machine that other processes use and leave."""

import random
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise

import pytest
import torch

from paged.models.step_threads import StepThreads

# Milliseconds of a step on all threads and on one, quiet and beside busy processes.
QUIET, BUSY, SPINNING = (2.4, 4.0), (6.0, 4.4), (220.0, 4.4)
SMALL = (0.6, 0.4)
EQUAL = (4.0, 3.9)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """Runs steps that take as long as `times` says; each may take a random share of that more or less."""

    def __init__(self, *, noise: float = 0.0) -> None:
        self.now = 0.0
        self.times = QUIET
        self.counts: list[int] = []
        self._noise, self._random = noise, random.Random(0)
        self._threads = StepThreads(lambda: self.now)

    def step(self) -> None:
        count = torch.get_num_threads()
        self.counts.append(count)
        factor = 1 + self._noise * self._random.uniform(-1, 1)
        self.now += 1e-3 * self.times[count == 1] * factor

    def run(self, times: tuple[float, float], seconds: float) -> float:
        """Run steps for some seconds; return their mean time as a multiple of the faster way's."""
        self.times = times
        self.counts.clear()
        start = self.now
        while self.now < start + seconds:
            self._threads.run(self.step)
        return (self.now - start) * 1e3 / len(self.counts) / min(times)

    def run_once(self, step: Callable[[], None]) -> None:
        self._threads.run(step)

    def num_changes(self) -> int:
        """How often the number of threads has changed for longer than a trial."""
        lasting = []
        for count, steps in groupby(self.counts):
            if len(list(steps)) > 8:
                lasting.append(count)
        return sum(before != after for before, after in pairwise(lasting))


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize(
    ("times", "threads", "most"),
    [(QUIET, 2, 1.01), (BUSY, 1, 1.03), (SPINNING, 1, 1.06), (SMALL, 1, 1.03), ((2.4, 60.0), 2, 1.01)],
)
def test_the_faster_way_is_found_and_trials_cost_little(
    times: tuple[float, float], threads: int, most: float, noise: float
) -> None:
    """Also where trials of one thread are 25 times slower, as on a machine of many cores."""
    machine = Machine(noise=noise)
    machine.run(times, seconds=2)
    assert machine.run(times, seconds=60) < most
    assert machine.num_changes() == 0
    assert machine.counts.count(threads) > 0.9 * len(machine.counts)


@pytest.mark.parametrize(("busy", "most_seconds"), [(BUSY, 1.5), (SPINNING, 15)])
def test_processes_come_and_leave(busy: tuple[float, float], most_seconds: float) -> None:
    """If they come, as soon as steps are slower than on one thread; if they leave, with the next trial."""
    machine = Machine(noise=0.1)
    machine.run(QUIET, seconds=10)
    for _ in range(3):
        machine.run(busy, seconds=20)
        assert machine.num_changes() <= 1
        assert machine.counts[80:].count(2) < 0.05 * len(machine.counts)
        machine.run(QUIET, most_seconds)
        assert machine.run(QUIET, seconds=10) < 1.01
        assert machine.num_changes() == 0


def test_a_slow_step_alone_changes_nothing() -> None:
    """Even in a trial; processes that come next are noticed as soon."""
    machine = Machine()
    machine.run(QUIET, seconds=2)
    for _ in range(50):
        machine.run((100.0, 100.0), seconds=0.05)  # one step
        machine.run(QUIET, seconds=0.5)
        assert machine.counts.count(1) <= 8
        assert machine.num_changes() == 0
    machine.run(BUSY, seconds=20)
    assert machine.counts[80:].count(2) < 0.05 * len(machine.counts)


def test_ways_that_take_as_long_do_not_alternate() -> None:
    machine = Machine(noise=0.05)
    machine.run(EQUAL, seconds=60)
    assert machine.num_changes() <= 1


def test_a_step_that_fails_does_not_count() -> None:
    machine = Machine()

    def fail() -> None:
        machine.step()
        machine.now += 1e3
        raise ValueError("a bad step")

    machine.run(BUSY, seconds=1)
    assert machine.counts[-1] == 1
    for _ in range(10):
        with pytest.raises(ValueError, match="a bad step"):
            machine.run_once(fail)
        assert torch.get_num_threads() == 2
    assert machine.run(BUSY, seconds=1) < 1.1


def test_with_one_thread_nothing_is_timed() -> None:
    torch.set_num_threads(1)
    calls: list[int] = []

    def clock() -> float:
        raise AssertionError

    StepThreads(clock).run(lambda: calls.append(1))
    assert calls == [1]


def test_long_steps_are_not_tried_on_one_of_many_threads() -> None:
    """A request would wait for the trial."""
    torch.set_num_threads(8)
    machine = Machine()
    machine.run((100.0, 800.0), seconds=60)
    assert set(machine.counts) == {8}
