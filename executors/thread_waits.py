"""How threads of GNU OpenMP wait for each other. Imports no torch, because it must run before torch is loaded.

`import paged` imports this file, so slow imports are within functions.

PyTorch's operations and the numba kernels share the threads of the libgomp that PyTorch loads. By default, a waiting
thread spins for some milliseconds, about as long as a time slice of another process. Therefore two threads beside a
busy process wait for each other most of the time. A thread that spins briefly and then sleeps frees its core for the
thread that it waits for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache

SPIN_VARIABLE = "GOMP_SPINCOUNT"
# Rounds that a waiting thread spins before it sleeps. Fewer rounds are faster beside a busy process, more rounds are
# faster on a quiet machine with many sequences. For times see docs/performance.md.
SPIN_COUNT = "1000"
# Variables by which users choose how threads wait. Intel's and LLVM's OpenMP also read variables that begin with KMP_.
_CHOICES = (SPIN_VARIABLE, "OMP_WAIT_POLICY")
_MAPS = "/proc/self/maps"


def chosen_wait(environment: Mapping[str, str]) -> str | None:
    """Return the environment's setting of how threads wait, as NAME=VALUE, or None."""
    for name, value in environment.items():
        if name in _CHOICES or name.startswith("KMP_"):
            return f"{name}={value}"
    return None


def set_spin_count() -> None:
    """Make threads of this process and its children spin briefly, unless the environment sets how they wait.

    libgomp reads the environment when it is loaded, so this has no effect if torch or a libgomp is already loaded.
    """
    if sys.platform != "linux" or "torch" in sys.modules or chosen_wait(os.environ) or _has_libgomp():
        return
    os.environ[SPIN_VARIABLE] = SPIN_COUNT


def warn_of_spinning(num_threads: int) -> None:
    """Warn once if waiting threads spin long, because a busy process then makes steps many times slower."""
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
    """Return whether torch uses libgomp, and not Intel's or LLVM's OpenMP, which have the same functions."""
    import ctypes

    functions = ctypes.CDLL(None)
    return hasattr(functions, "GOMP_parallel") and not hasattr(functions, "kmp_set_blocktime")


def wait_text() -> str:
    """Describe how threads wait for each other, and who chose it."""
    chosen = chosen_wait(os.environ)
    if chosen is None:
        return "the default of PyTorch's OpenMP"
    if chosen == f"{SPIN_VARIABLE}={SPIN_COUNT}":
        return f"{chosen}, which paged sets"
    return f"{chosen}, from the environment"


def without_our_choice(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the setting of `set_spin_count`, for other programs."""
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
