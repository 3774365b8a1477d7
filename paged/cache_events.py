"""What the cache tells others: how full it is, and which published blocks come and go."""

from __future__ import annotations

import logging
from collections import deque
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

    Every listener hears of everything in order: whoever leaves the lock while a delivery is under way adds to it. An
    error in a callback is logged: the call that caused it has done its work.
    """

    def __init__(self, pressure: Callable[[], MemoryPressure]) -> None:
        self._lock = RLock()
        self._depth = 0
        self._pressure = pressure
        self._last_pressure = MemoryPressure.LOW
        self._pressure_listeners: list[Callable[[MemoryPressure], None]] = []
        self._event_listeners: list[Callable[[CacheEvent], None]] = []
        self._calls: deque[tuple[Callable[..., None], object]] = deque()
        self._is_delivering = False

    @property
    def has_event_listeners(self) -> bool:
        """Whether events need to be made at all."""
        return bool(self._event_listeners)

    def listen_to_pressure(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Call back with every level that differs from the one before, from now on."""
        with self._lock:
            if not self._pressure_listeners:
                self._last_pressure = self._pressure()
            self._pressure_listeners.append(callback)

    def listen_to_events(self, callback: Callable[[CacheEvent], None]) -> None:
        """Call back with every event from now on."""
        with self._lock:
            self._event_listeners.append(callback)

    def add(self, event: CacheEvent) -> None:
        """Queue an event, with the lock held."""
        self._calls.extend((callback, event) for callback in self._event_listeners)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._pressure_listeners:
            level = self._pressure()
            if level is not self._last_pressure:
                self._last_pressure = level
                self._calls.extend((callback, level) for callback in self._pressure_listeners)
        deliver = self._depth == 0 and bool(self._calls) and not self._is_delivering
        if deliver:
            self._is_delivering = True
        self._lock.release()
        if deliver:
            self._deliver()

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._is_delivering = False
                    return
                callback, argument = self._calls.popleft()
            try:
                callback(argument)
            except Exception:
                _LOG.exception("a callback of the KV cache failed on %r", argument)
