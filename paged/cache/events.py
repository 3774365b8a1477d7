"""Notifications of a KV cache: memory pressure, blocks published and withdrawn."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

from paged.cache.tiers.host_events import HostEvent
from paged.errors import InvalidInputError
from paged.kernels.core.errors import shown

_LOG = logging.getLogger("paged")


class MemoryPressure(Enum):
    """Memory pressure: how much of the pool can still be handed out, evictable cached blocks included.

    Attributes:
        LOW: at least the fraction `low_watermark` of all blocks.
        HIGH: less than `low_watermark`.
        CRITICAL: less than `high_watermark`.
    """

    LOW = "low"
    HIGH = "high"
    CRITICAL = "critical"


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive blocks of a sequence were published.

    Attributes:
        hashes: chained hash of each block.
        parent_hash: hash of the block before the first one, or of the namespace if there is none.
        token_ids: token ids of these blocks.
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


CacheEvent = BlocksStored | BlockRemoved | CacheCleared | HostEvent


class Listeners:
    """Callbacks for events and pressure, and the queue of undelivered notifications.

    Every callback gets every notification, in order. A call that ends during a delivery appends to that delivery.
    The caller holds the cache's lock, except for `deliver`.

    events: events of the call in progress, which `queue` takes over; removed if the call fails.
    """

    def __init__(self, measure_pressure: Callable[[], MemoryPressure]) -> None:
        self.on_event: list[Callable[[CacheEvent], None]] = []
        self.on_host_event: list[Callable[[CacheEvent], None]] = []
        self.on_pressure: list[Callable[[MemoryPressure], None]] = []
        self.events: list[CacheEvent] = []
        self._measure_pressure = measure_pressure
        self._last_pressure = MemoryPressure.LOW
        self._notifications: deque[tuple[Callable[..., None], object]] = deque()
        self._is_delivering = False

    def add_pressure_callback(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Register a callback for every change of the level."""
        _check_callable(callback)
        if not self.on_pressure:
            self._last_pressure = self._measure_pressure()
        self.on_pressure.append(callback)

    def add_event_callback(self, callback: Callable[[CacheEvent], None], *, with_host: bool) -> None:
        """Register a callback for every event; `with_host` adds the events of host memory."""
        _check_callable(callback)
        self.on_event.append(callback)
        if with_host:
            self.on_host_event.append(callback)

    def queue(self) -> None:
        """Queue the notifications of a call that can no longer fail."""
        if self.events:
            for event in self.events:
                callbacks = self.on_event
                if isinstance(event, HostEvent):
                    callbacks = self.on_host_event
                for callback in callbacks:
                    self._notifications.append((callback, event))
            self.events.clear()
        if self.on_pressure:
            level = self._measure_pressure()
            if level is not self._last_pressure:
                for listener in self.on_pressure:
                    self._notifications.append((listener, level))
                self._last_pressure = level

    def deliver(self, lock: AbstractContextManager[object]) -> None:
        """Call the callbacks without the lock, unless another delivery is running.

        Errors of callbacks are logged. KeyboardInterrupt and other BaseExceptions are raised after the delivery.
        """
        if not self._notifications:
            return
        with lock:
            if self._is_delivering:
                return
            self._is_delivering = True
        ending: BaseException | None = None
        try:
            notification = self._next_notification(lock)
            while notification is not None:
                callback, argument = notification
                try:
                    callback(argument)
                except Exception:
                    _LOG.exception("a callback of the KV cache failed on %r", argument)
                except BaseException as error:
                    ending = error
                notification = self._next_notification(lock)
        except BaseException:  # the next call resumes the delivery
            self._is_delivering = False
            raise
        if ending is not None:
            raise ending

    def _next_notification(self, lock: AbstractContextManager[object]) -> tuple[Callable[..., None], object] | None:
        with lock:
            if self._notifications:
                return self._notifications.popleft()
            self._is_delivering = False
            return None

    def renew(self) -> None:
        """Allow deliveries in a forked process, where a thread that was delivering does not exist."""
        self._is_delivering = False


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise InvalidInputError(f"callback: {shown(callback)}, expected a function")
