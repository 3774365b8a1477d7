"""How threads of GNU OpenMP wait for each other; this file takes no torch, because it must run before torch is loaded.

`import paged` imports it, so modules that take milliseconds are imported where they are needed.

PyTorch's operations and the numba kernels share the threads of the libgomp that PyTorch loads. By default a thread that
waits spins for 300,000 rounds, some milliseconds, which is as long as the system lets another process have its core. So
two threads beside a busy process wait for each other most of the time. A thread that spins briefly and then sleeps
leaves its core to the thread that it waits for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache

SPIN_VARIABLE = "GOMP_SPINCOUNT"
# A compromise: beside a busy process fewer rounds are faster, and quiet steps of many sequences like more. The times of
# each count are in docs/performance.md.
SPIN_COUNT = "1000"
# Variables by which users choose how threads wait. Those of Intel's and LLVM's OpenMP begin with KMP_.
_CHOICES = (SPIN_VARIABLE, "OMP_WAIT_POLICY")
_MAPS = "/proc/self/maps"


def chosen_wait(environment: Mapping[str, str]) -> str | None:
    """Return the variable by which an environment says how threads wait, as NAME=VALUE; None if none does."""
    for name, value in environment.items():
        if name in _CHOICES or name.startswith("KMP_"):
            return f"{name}={value}"
    return None


def set_spin_count() -> None:
    """Let threads of this process and of those that it starts spin briefly, unless the environment says how they wait.

    libgomp reads the environment when it is loaded, so nothing changes if torch or a libgomp is loaded already.
    """
    if sys.platform != "linux" or "torch" in sys.modules or chosen_wait(os.environ) or _has_libgomp():
        return
    os.environ[SPIN_VARIABLE] = SPIN_COUNT


def warn_of_spinning(num_threads: int) -> None:
    """Warn once if threads spin long for each other: a busy process beside them makes steps many times slower."""
    if num_threads > 1 and sys.platform == "linux" and chosen_wait(os.environ) is None and _uses_gnu_openmp():
        _warn(num_threads)


@cache
def _warn(num_threads: int) -> None:
    import logging

    text = (
        "%d threads spin while they wait for each other, and are slow beside other busy processes, because torch or a "
        "libgomp was loaded before paged: import paged first, or run with %s=%s"
    )
    logging.getLogger("paged").warning(text, num_threads, SPIN_VARIABLE, SPIN_COUNT)


def _uses_gnu_openmp() -> bool:
    """Return whether torch's threads are libgomp's. Intel's and LLVM's OpenMP has its functions, too."""
    import ctypes

    functions = ctypes.CDLL(None)
    return hasattr(functions, "GOMP_parallel") and not hasattr(functions, "kmp_set_blocktime")


def wait_text() -> str:
    """Return how threads wait for each other, and who chose it."""
    chosen = chosen_wait(os.environ)
    if chosen is None:
        return "the default of PyTorch's OpenMP"
    if chosen == f"{SPIN_VARIABLE}={SPIN_COUNT}":
        return f"{chosen}, which paged sets"
    return f"{chosen}, from the environment"


def without_our_choice(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment as it was before `set_spin_count`, for programs that are not ours."""
    kept = dict(environment)
    if kept.get(SPIN_VARIABLE) == SPIN_COUNT:
        del kept[SPIN_VARIABLE]
    return kept


def _has_libgomp() -> bool:
    try:
        with open(_MAPS) as maps:
            return "/libgomp" in maps.read()
    except OSError:
        return False
