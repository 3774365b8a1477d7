"""Times of a function on one thread and on all, for steps that are too small for several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, thread_time

import torch

from .launch import set_own_threads

# Runs of each number of threads that are wanted, and the seconds after which fewer are enough.
_RUNS, _MOST_S = 8, 0.1


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch's operations and numba kernels inside run on the calling thread alone."""
    num_threads = torch.get_num_threads()
    set_own_threads(1)
    try:
        yield
    finally:
        set_own_threads(num_threads)


def seconds_saved_alone(run: Callable[[], object]) -> float | None:
    """Return how much sooner one thread runs a function than all threads, less than 0 if later.

    The times are the least CPU times of the calling thread. While it waits for the others it spins, and then sleeps:
    such runs do not count, because it waited for threads whose cores other processes had. Returns None if no run
    counts.
    """
    with one_thread():
        alone = _cpu_seconds(run)
    together = _cpu_seconds(run)
    if not alone or not together:
        return None
    return min(together) - min(alone)


def _cpu_seconds(run: Callable[[], object]) -> list[float]:
    """Return the calling thread's CPU times of the runs in which it did not sleep, after one that is not timed."""
    run()
    seconds: list[float] = []
    end = perf_counter() + _MOST_S
    while len(seconds) < _RUNS and perf_counter() < end:
        sleeps, start = _num_sleeps(), thread_time()
        run()
        taken = thread_time() - start
        if _num_sleeps() == sleeps:
            seconds.append(taken)
    return seconds


def _num_sleeps() -> int:
    """Return how often the calling thread has given up its core; 0 if the system does not tell."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
