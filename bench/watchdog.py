"""End this process if its case makes no progress: a call that waits for a hung GPU never returns."""

from __future__ import annotations

import faulthandler
import math
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

# Seconds from the limit to the end of the process, for writing the stacks.
_GRACE_S = 1.0
# A case may end early by this fraction of its limit: the alarm is not renewed more often, because each renewal costs up
# to a millisecond.
_SLACK = 0.1
# Number of innermost frames that say where a case hung.
_MAX_FRAMES = 4


class Watchdog:
    """An alarm that `progress` renews.

    Neither the stacks nor the alarm need Python's lock, which a call into the driver may hold.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last_renewal = 0.0
        self._file: TextIO | None = None

    @contextmanager
    def watching(self, seconds: float, stack: Path) -> Iterator[None]:
        """After this many seconds without progress inside, write the stacks of all threads and end by SIGALRM."""
        self._seconds, self._last_renewal = seconds, -math.inf
        with stack.open("w") as self._file:
            try:
                self.progress()
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                faulthandler.cancel_dump_traceback_later()
                self._file = None

    def progress(self) -> None:
        """Renew the alarm, if this process is watched."""
        now = time.monotonic()
        if self._file is not None and now - self._last_renewal > _SLACK * self._seconds:
            self._last_renewal = now
            faulthandler.dump_traceback_later(self._seconds, file=self._file)
            signal.setitimer(signal.ITIMER_REAL, self._seconds + _GRACE_S)


# The only watchdog, because a process has one alarm.
WATCHDOG = Watchdog()


def hung_at(stack: Path) -> str:
    """Return the main thread's innermost frames in a file that a watchdog wrote; "" if it wrote none."""
    if not stack.exists():
        return ""
    main_thread = stack.read_text().rpartition("(most recent call first):")[2]  # the main thread comes last
    frames = re.findall(r'File "(.+)", line (\d+) in', main_thread)[:_MAX_FRAMES]
    return ", ".join(f"{Path(file).name}:{line}" for file, line in frames)
