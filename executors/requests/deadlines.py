"""When requests have to be done."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from itertools import count

from paged.executors.requests.request import Request

# With fewer entries than this it is not worth looking for those of requests that have ended.
_FEW = 64


class Deadlines:
    """The requests with a deadline, the earliest first. Those that have ended are swept out when there are many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._order = count()
        self._sweep_at = _FEW

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline == math.inf:
            return
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].output.finished]
            heapify(self._heap)
            self._sweep_at = max(2 * len(self._heap), _FEW)
        heappush(self._heap, (request.deadline, next(self._order), request))

    def passed(self, now: float) -> list[Request]:
        """The requests whose time is over at `now`, seconds of `perf_counter`; they are watched no longer."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if not request.output.finished:
                found.append(request)
        return found
