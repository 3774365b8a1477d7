"""Decode steps beside busy processes of other users, by their number of threads and how these wait for each other.

Every way has a process of its own, because libgomp reads how threads wait when it is loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import paged
from paged.bench.benchmark import Json, Setting
from paged.bench.contest import OURS, beside
from paged.bench.engine import busy_process
from paged.bench.engine.peer_process import PeerProcess
from paged.bench.limits import at_least, at_most, times_us
from paged.bench.neighbours import cores_left, neighbours
from paged.bench.watchdog import WATCHDOG
from paged.executors.thread_waits import SPIN_VARIABLE, without_our_choice

MODEL = "Llama-20M"
# libgomp's default number of spin rounds before a waiting thread sleeps. They take 3 ms or more.
_DEFAULT_SPIN = "300000"
_LIBGOMPS = "all threads, spin 300000"
_SEQUENCES, _NEIGHBOURS = (1, 8), (0, 1, 2, 4)
_INVARIANT_SEQUENCES, _DTYPES = (8, 64), ("float32", "bfloat16")
# Number of turns of each process, and seconds of a turn.
_TURNS, _SECONDS = 5, 1.0
# Limit of a busy process's life, far above the time of a case, in which a step may take 200 ms.
MOST_LOAD_S = 600.0
# Goals: time relative to libgomp's default, time relative to the fair time, and batch-invariant speed relative to the
# plain speed.
_MOST_LOSS, _MOST_OVER_FAIR, _LEAST_INVARIANT = 1.03, 1.3, 0.6


class Case(NamedTuple):
    """Decode steps of this many sequences beside this many busy processes."""

    name: str
    sequences: int
    neighbours: int


def rows() -> list[Case]:
    """Return the cases of `busy`."""
    cases = []
    for sequences in _SEQUENCES:
        for count in _NEIGHBOURS:
            cases.append(Case(f"busy.{sequences}.{count}", sequences, count))
    return cases


def invariant_rows() -> list[tuple[str, Case]]:
    """Return the dtype and the case of each row of `invariant`."""
    cases = []
    for dtype in _DTYPES:
        for sequences in _INVARIANT_SEQUENCES:
            for count in (0, 1):
                name = f"busy.invariant.{dtype}.{sequences}.{count}"
                cases.append((dtype, Case(name, sequences, count)))
    return cases


def _variables(**choice: str) -> dict[str, str]:
    """Return an environment that imports this package from its folder. choice: variables for how threads wait."""
    variables = without_our_choice(os.environ)
    variables["PYTHONPATH"] = str(Path(paged.__file__).parents[1])
    return variables | choice


class Way(NamedTuple):
    """A way to run steps. variables: the environment. threads: "chosen" as the engine does, or "all" in every step."""

    variables: dict[str, str]
    threads: str = "chosen"


def _ways() -> dict[str, Way]:
    """Return the ways to run steps: how threads wait, and how many take part."""
    return {
        OURS: Way(_variables()),
        "all threads": Way(_variables(), threads="all"),
        "spin 30000": Way(_variables(**{SPIN_VARIABLE: "30000"})),
        _LIBGOMPS: Way(_variables(**{SPIN_VARIABLE: _DEFAULT_SPIN}), threads="all"),
        "one thread": Way(_variables(OMP_NUM_THREADS="1")),
    }


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the processes' logs. It is deleted with this process."""
    return tempfile.TemporaryDirectory()


@lru_cache(maxsize=8)
def process_of(way: str, dtype: str) -> PeerProcess:
    """Return a process that sleeps until it has work. It lives while it is among the last used ones."""
    log = Path(_folder().name) / f"{way}.{dtype}.log"
    variables, threads = _ways()[way]
    arguments = ("-m", busy_process.__name__, MODEL, dtype, threads)
    WATCHDOG.progress()
    return PeerProcess(way, Path(sys.executable), *arguments, log=log, variables=variables)


def step_seconds(process: PeerProcess, sequences: int, *, is_invariant: bool = False) -> float:
    """Return the mean seconds of a step in one turn."""
    WATCHDOG.progress()
    seconds: float = process.ask(sequences=sequences, seconds=_SECONDS, is_invariant=is_invariant)
    return seconds


def busy(case: Case, setting: Setting) -> Json:
    """Time a step in each way, in turns.

    The fair time of a step is its time without neighbours, divided by the share of the cores that remains for threads
    that never wait for each other.
    """
    processes = {way: process_of(way, "bfloat16") for way in _ways()}
    num_threads = processes[OURS].about["threads"]
    turns = min(_TURNS, setting.repeats)
    quiet, shares = [], []
    taken: dict[str, list[float]] = {way: [] for way in processes}
    for _ in range(turns):
        quiet.append(step_seconds(processes[OURS], case.sequences))
    with neighbours(case.neighbours, most_seconds=MOST_LOAD_S):
        for _ in range(turns):
            shares.append(cores_left(num_threads, _SECONDS) / num_threads)
            for way, process in processes.items():
                taken[way].append(step_seconds(process, case.sequences))
    ours, peers = beside(taken, times_us)
    row: Json = {"name": case.name, **ours, "peers": peers, "goals": []}
    if case.neighbours:
        fair_us = 1e6 * median(quiet) / median(shares)
        over_fair = ours["median_us"] / fair_us
        row["detail"] = {"threads": num_threads, "fair_us": fair_us, "cores_left": num_threads * median(shares)}
        row["goals"] = [at_most(f"{_MOST_OVER_FAIR} x the fair time", over_fair, _MOST_OVER_FAIR)]
    else:
        loss = 1 / peers[_LIBGOMPS]["ratio"]
        row["detail"] = {"threads": num_threads}
        row["goals"] = [at_most(f"{_MOST_LOSS} x the time of libgomp's default", loss, _MOST_LOSS)]
    return row


def invariant(dtype: str, case: Case, setting: Setting) -> Json:
    """Time a step under `batch_invariant` in turns with a plain one."""
    process = process_of(OURS, dtype)
    taken: dict[str, list[float]] = {OURS: [], "plain": []}
    with neighbours(case.neighbours, most_seconds=MOST_LOAD_S):
        for _ in range(min(_TURNS, setting.repeats)):
            for way, seconds in taken.items():
                seconds.append(step_seconds(process, case.sequences, is_invariant=way == OURS))
    ours, peers = beside(taken, times_us)
    goal = at_least(f"{_LEAST_INVARIANT} of the plain speed", peers["plain"]["ratio"], _LEAST_INVARIANT)
    return {"name": case.name, **ours, "peers": peers, "goals": [goal]}
