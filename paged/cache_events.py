"""What the cache tells others: how full it is, and which published blocks come and go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from threading import RLock

_LOG = logging.getLogger("paged")


class MemoryPressure(Enum):
    """How much of the pool can still be handed out, evictable cached blocks included."""

    LOW = "low"
    HIGH = "high"
    CRITICAL = "critical"


@dataclass(frozen=True)
class BlocksStored:
    """Blocks became findable: their chained hashes, the hash they follow, and their token ids."""

    hashes: tuple[int | bytes, ...]
    parent_hash: int | bytes
    token_ids: tuple[int, ...]
    namespace: Hashable


@dataclass(frozen=True)
class BlockRemoved:
    """A block is no longer findable."""

    hash: int | bytes


@dataclass(frozen=True)
class CacheCleared:
    """No block is findable any more."""


CacheEvent = BlocksStored | BlockRemoved | CacheCleared


class Notifier:
    """The cache's lock as a context manager that calls back once the outermost holder has left it.

    An error in a callback is logged: the call that caused it has done its work.
    """

    def __init__(self, pressure: Callable[[], MemoryPressure]) -> None:
        self._lock = RLock()
        self._depth = 0
        self._pressure = pressure
        self._last_pressure = MemoryPressure.LOW
        self._events: list[CacheEvent] = []
        self.on_pressure: list[Callable[[MemoryPressure], None]] = []
        self.on_event: list[Callable[[CacheEvent], None]] = []

    def add(self, event: CacheEvent) -> None:
        """Queue an event; call it with the lock held, and only while somebody listens."""
        self._events.append(event)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        calls: list[tuple[Callable[..., None], object]] = []
        if self._depth == 0 and (self.on_pressure or self._events):
            events, self._events = self._events, []
            calls = [(callback, event) for event in events for callback in self.on_event]
            level = self._pressure()
            if level is not self._last_pressure:
                self._last_pressure = level
                calls += [(callback, level) for callback in self.on_pressure]
        self._lock.release()
        for callback, argument in calls:
            try:
                callback(argument)
            except Exception:
                _LOG.exception("a callback of the KV cache failed on %r", argument)
