"""Busy processes beside a benchmark: each in a session of its own, ended in any case."""

import os
import subprocess
import sys
import time

import pytest

from paged.bench import neighbours as module
from paged.bench.neighbours import cores_left, neighbours
from tests.deadline import HANG_S
from tests.processes import is_alive, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are started."""
    pids: list[int] = []
    start = module._start

    def start_noted(count: int, seconds: float) -> object:
        process = start(count, seconds)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(module, "_start", start_noted)
    return pids


def test_they_are_busy_inside_and_gone_after(started: list[int]) -> None:
    def fail() -> None:
        with neighbours(2, most_seconds=60):
            assert len({os.getsid(pid) for pid in started} | {os.getsid(0)}) == 3
            assert all(is_alive(pid) for pid in started)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any(is_alive(pid) for pid in started)


def test_they_end_without_their_owner(started: list[int]) -> None:
    with neighbours(1, most_seconds=0.1):
        wait_until(lambda: not is_alive(started[0]))


@pytest.mark.usefixtures("frozen_objects")
def test_cores_left_are_those_of_two_busy_processes() -> None:
    start = time.process_time()
    assert 0 < cores_left(2, 0.3) <= 2.1
    assert time.process_time() - start < 0.3


def test_they_end_with_a_benchmark_that_is_killed() -> None:
    code = """
import os
from paged.bench import neighbours
with neighbours.neighbours(1, most_seconds=600):
    os.kill(os.getpid(), 9)
"""
    # The busy process holds this pipe too: reading it to its end waits for the process.
    killed = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=HANG_S)
    assert killed.returncode == -9
