"""Busy processes beside a benchmark, as other users of a machine are, and what they leave of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Keeps COUNT processes of one session busy for SECONDS, and prints the CPU seconds that they got.
_SCRIPT = """
import os, sys, time
count, seconds = int(sys.argv[1]), float(sys.argv[2])
print("busy", flush=True)
end = time.monotonic() + seconds
for _ in range(count):
    if not os.fork():
        while time.monotonic() < end:
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
        [sys.executable, "-I", "-S", "-c", _SCRIPT, str(count), str(seconds)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@contextmanager
def neighbours(count: int, *, most_seconds: float) -> Iterator[None]:
    """Keep `count` processes busy inside, each in a session of its own. They end after `most_seconds` in any case."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            processes.append(_start(1, most_seconds))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it runs
        yield
    finally:
        for process in processes:
            _end(process)


def cores_left(count: int, seconds: float) -> float:
    """Return the cores that `count` threads of one session get now, if none waits for another."""
    process = _start(count, seconds)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        return float(process.stdout.readline()) / seconds
    finally:
        _end(process)
