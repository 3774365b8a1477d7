"""Notifications of a KV cache: memory pressure, and published blocks that come and go."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from threading import RLock

from paged.cache.blocks.rollback import Rollback
from paged.errors import InvalidInputError
from paged.kernels.common.scalars import shown

_LOG = logging.getLogger("paged")


class MemoryPressure(Enum):
    """Memory pressure, by the share of the pool that can be handed out, evictable cached blocks included.

    Attributes:
        LOW: at least `low_watermark`.
        HIGH: below `low_watermark`.
        CRITICAL: below `high_watermark`.
    """

    LOW = "low"
    HIGH = "high"
    CRITICAL = "critical"


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks of a sequence were published.

    Attributes:
        hashes: chained hash of each block.
        parent_hash: hash of the block before the first one; that of the namespace if there is none.
        token_ids: token ids of all these blocks.
    """

    hashes: tuple[int | bytes, ...]
    parent_hash: int | bytes
    token_ids: tuple[int, ...]
    namespace: Hashable


@dataclass(frozen=True)
class BlockRemoved:
    """A published block was withdrawn; `hash` is its chained hash."""

    hash: int | bytes


@dataclass(frozen=True)
class CacheCleared:
    """All published blocks were withdrawn."""


CacheEvent = BlocksStored | BlockRemoved | CacheCleared


class Notifier:
    """The cache's lock as a context manager, which rolls back on an error and notifies listeners otherwise.

    If a holder leaves by an exception, everything that `rollback` has kept since it entered is put back. Otherwise
    callbacks run once the outermost holder has left, outside the lock. Every listener gets everything in order: a call
    that ends during a delivery adds to it. Errors in callbacks are logged; KeyboardInterrupt and the like are raised
    once everything is delivered.
    """

    def __init__(self, pressure: Callable[[], MemoryPressure]) -> None:
        self._lock = RLock()
        self._depth = 0
        # Of each call within a call, as one that a caller's own code makes: where it began in `rollback` and in events.
        self._marks: list[tuple[int, int]] = []
        self.rollback = Rollback()
        self._events: list[CacheEvent] = []
        self._pressure = pressure
        self._last_pressure = MemoryPressure.LOW
        self._pressure_listeners: list[Callable[[MemoryPressure], None]] = []
        self._event_listeners: list[Callable[[CacheEvent], None]] = []
        self._calls: deque[tuple[Callable[..., None], object]] = deque()
        self._is_delivering = False

    @property
    def has_event_listeners(self) -> bool:
        """Whether anybody listens to events."""
        return bool(self._event_listeners)

    def listen_to_pressure(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Register a callback for every level that differs from the one before."""
        _check_callable(callback)
        with self._lock:
            if not self._pressure_listeners:
                self._last_pressure = self._pressure()
            self._pressure_listeners.append(callback)

    def listen_to_events(self, callback: Callable[[CacheEvent], None]) -> None:
        """Register a callback for every event."""
        _check_callable(callback)
        with self._lock:
            self._event_listeners.append(callback)

    def add(self, event: CacheEvent) -> None:
        """Add an event to deliver after the call, unless that fails; the caller holds the lock."""
        self._events.append(event)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth > 1:
            self._marks.append((len(self.rollback), len(self._events)))

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        deliver = False
        try:
            if self._depth == 1:
                if exc_type is not None:
                    self._events.clear()
                    self.rollback.put_back()
                self.rollback.clear()
                self._queue()
                deliver = bool(self._calls) and not self._is_delivering
                self._is_delivering |= deliver
            else:
                mark, num_events = self._marks.pop()
                if exc_type is not None:
                    del self._events[num_events:]
                    self.rollback.put_back(mark)
        finally:
            self._depth -= 1
            self._lock.release()
        if deliver:
            self._deliver()

    def _queue(self) -> None:
        """Queue the notifications of the call that ends."""
        if self._events:
            self._calls.extend((callback, event) for event in self._events for callback in self._event_listeners)
            self._events.clear()
        if self._pressure_listeners:
            level = self._pressure()
            if level is not self._last_pressure:
                self._last_pressure = level
                self._calls.extend((callback, level) for callback in self._pressure_listeners)

    def _deliver(self) -> None:
        ending: BaseException | None = None
        while True:
            with self._lock:
                if not self._calls:
                    self._is_delivering = False
                    break
                callback, argument = self._calls.popleft()
            try:
                callback(argument)
            except Exception:
                _LOG.exception("a callback of the KV cache failed on %r", argument)
            except BaseException as error:
                ending = error
        if ending is not None:
            raise ending


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise InvalidInputError(f"callback: {shown(callback)}, expected a function")
