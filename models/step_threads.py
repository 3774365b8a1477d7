"""Whether steps run on one thread or on all, by their times, while other processes use the CPU or leave it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from paged.kernels.cpu.launch import one_thread

# Most steps of a trial. The trial's way replaces the preferred one if its time is less than this fraction.
_TRIAL_STEPS, _WORTH = 8, 0.95
# Trials may add 1 / n of the time. On all threads trials are rare, because a trial starts early if steps become slower.
# On one thread trials are more frequent, because nothing else shows that other processes have left the CPU.
_SHARE_ON_ALL, _SHARE_ON_ONE = 512, 64
_LEAST_STEPS_BETWEEN = 32
# Longest step of a trial in seconds, because a request waits for it. One thread takes at most as many times
# as long as there are threads.
_LONGEST_STEP = 0.5
# The usual time is a moving average over this many steps. In averages a slow step counts at most as this many usual
# ones.
_AVERAGED_STEPS, _MOST_COUNTED = 16, 4


class StepThreads:
    """Runs steps of one kind on all threads or on the calling one, whichever took less time lately.

    All threads wait for each other after every kernel. If another process runs on the core of one thread, all threads
    wait for this process, and one thread alone is faster. One thread is also faster if steps have little work.

    Now and then a trial runs a few steps the other way, and the faster way is kept. A trial starts if steps have become
    slower than those of the last trial, or if enough time has passed since then: the more a trial costs, the rarer it
    is.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """clock: returns seconds."""
        self._clock = clock
        self._prefers_one = False
        self._usual = 0.0  # seconds of a step in the preferred way; 0 before the first
        self._shortest = float("inf")  # seconds of the shortest step
        self._other = float("inf")  # mean seconds of a step in the last trial
        self._trial: list[float] | None = None  # seconds of each step in the running trial; None if none runs
        # The next trial may start when no steps and no seconds are left. If steps have become slower than in the last
        # trial, it does not wait for the seconds.
        self._steps_left, self._seconds_left = _TRIAL_STEPS, 0.0

    def run(self, step: Callable[[], None]) -> None:
        """Run a step and take its time into account, unless it raises an error."""
        if torch.get_num_threads() == 1:
            step()
            return
        is_trial = self._trial is not None
        start = self._clock()
        if self._prefers_one == is_trial:
            step()
        else:
            with one_thread():
                step()
        seconds = self._clock() - start
        if self._trial is None:
            self._note_usual(seconds)
        else:
            self._note_trial(self._trial, seconds)

    def _note_usual(self, seconds: float) -> None:
        """Count a step in the preferred way, and start a trial if it is due."""
        if self._usual == 0:
            self._usual = seconds
        self._usual += (self._counted(seconds) - self._usual) / _AVERAGED_STEPS
        self._shortest = min(self._shortest, seconds)
        self._steps_left -= 1
        self._seconds_left -= seconds
        is_other_faster = self._other < _WORTH * self._usual
        is_bearable = self._prefers_one or self._shortest * torch.get_num_threads() < _LONGEST_STEP
        if self._steps_left <= 0 and is_bearable and (is_other_faster or self._seconds_left <= 0):
            self._trial = []

    def _note_trial(self, trial: list[float], seconds: float) -> None:
        """Count a step of a trial, and end the trial if it has enough steps or takes too long."""
        trial.append(seconds)
        if len(trial) < _TRIAL_STEPS and sum(trial) < _TRIAL_STEPS * self._usual:
            return
        mean = sum(map(self._counted, trial)) / len(trial)
        self._trial = None
        self._steps_left, self._seconds_left = _LEAST_STEPS_BETWEEN, 0.0
        if mean < _WORTH * self._usual:
            self._prefers_one = not self._prefers_one
            self._other, self._usual = self._usual, mean
            return
        added = sum(trial) - len(trial) * self._usual
        self._other = mean
        if self._prefers_one:
            self._seconds_left = _SHARE_ON_ONE * added
        else:
            self._seconds_left = _SHARE_ON_ALL * added

    def _counted(self, seconds: float) -> float:
        """Return a step's seconds for averages: a slow step counts at most as a few usual ones."""
        return min(seconds, _MOST_COUNTED * self._usual)
