"""End this process if its case makes no progress: whoever waits for a GPU that hangs waits for good."""

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

# Between the stack and the end, so that the stack is written.
_GRACE_S = 1.0
# How much sooner than at its limit a case may end: putting the alarm off starts a thread, up to a millisecond.
_SLACK = 0.1
# Frames that say where a case hung.
_MOST_FRAMES = 4


class Watchdog:
    """An alarm that `progress` puts off.

    Neither the stack nor the alarm needs Python's lock, which a call into the driver may hold.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._begun = 0.0
        self._file: TextIO | None = None

    @contextmanager
    def watching(self, seconds: float, stack: Path) -> Iterator[None]:
        """After so many seconds without progress inside, write the stacks of all threads and end by SIGALRM."""
        self._seconds, self._begun = seconds, -math.inf
        with stack.open("w") as self._file:
            try:
                self.progress()
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                faulthandler.cancel_dump_traceback_later()
                self._file = None

    def progress(self) -> None:
        """Begin the time anew, if this process is watched."""
        now = time.monotonic()
        if self._file is not None and now - self._begun > _SLACK * self._seconds:
            self._begun = now
            faulthandler.dump_traceback_later(self._seconds, file=self._file)
            signal.setitimer(signal.ITIMER_REAL, self._seconds + _GRACE_S)


# A process has one alarm.
WATCHDOG = Watchdog()


def hung_at(stack: Path) -> str:
    """Return the main thread's innermost frames in a file that a watchdog wrote; "" if it wrote none."""
    if not stack.exists():
        return ""
    main_thread = stack.read_text().rpartition("(most recent call first):")[2]  # the main thread comes last
    frames = re.findall(r'File "(.+)", line (\d+) in', main_thread)[:_MOST_FRAMES]
    return ", ".join(f"{Path(file).name}:{line}" for file, line in frames)
