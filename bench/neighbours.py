"""Busy processes beside a benchmark, like other users of a machine, and the cores that they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Script that keeps COUNT processes of one session busy, and prints the CPU seconds that they got. It ends after SECONDS
# or, if that is earlier, with the process BENCHMARK.
_SCRIPT = """
import ctypes, os, signal, sys, time
count, seconds, benchmark = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != benchmark:
    sys.exit()
print("busy", flush=True)
parent = os.getpid()
end = time.monotonic() + seconds
for _ in range(count):
    if not os.fork():
        while time.monotonic() < end and os.getppid() == parent:
            pass
        os._exit(0)
for _ in range(count):
    os.wait()
times = os.times()
print(times.children_user + times.children_system, flush=True)
"""


def _start(count: int, seconds: float) -> subprocess.Popen[str]:
    """Start `count` busy processes in one new session: Linux shares cores among sessions first (sched_autogroup)."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SCRIPT, str(count), str(seconds), str(os.getpid())],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _wait_until_busy(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "busy\n":
        raise RuntimeError(f"a busy process ended at once, with status {process.wait()}")


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@contextmanager
def neighbours(count: int, *, most_seconds: float) -> Iterator[None]:
    """Keep `count` processes busy inside, each in a session of its own.

    They end after `most_seconds`, or when this process dies.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            processes.append(_start(1, most_seconds))
        for process in processes:
            _wait_until_busy(process)
        yield
    finally:
        for process in processes:
            _end(process)


def cores_left(count: int, seconds: float) -> float:
    """Return the cores that `count` threads of one session get now, if none waits for another."""
    process = _start(count, seconds)
    try:
        _wait_until_busy(process)
        assert process.stdout is not None
        return float(process.stdout.readline()) / seconds
    finally:
        _end(process)
