"""Notifications of a KV cache: memory pressure, and blocks that are published or withdrawn."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from operator import call as call_of
from threading import RLock, get_ident
from typing import Any, TypeVar
from weakref import WeakSet

from paged.cache.blocks.rollback import Rollback
from paged.errors import InvalidInputError
from paged.kernels.common.scalars import shown

C = TypeVar("C", bound=type)

_LOG = logging.getLogger("paged")


class MemoryPressure(Enum):
    """Memory pressure, by the fraction of the pool that can be handed out, evictable cached blocks included.

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


CacheEvent = BlocksStored | BlockRemoved | CacheCleared


class Notifier:
    """The cache's lock as a context manager: rolls back after an error, otherwise notifies listeners.

    If an exception leaves the block, every change recorded in `rollback` since then is undone. Otherwise callbacks run
    outside the lock, after the outermost block. Every listener gets all events in order; calls that end during a
    delivery append to it. Errors in callbacks are logged; KeyboardInterrupt and the like are raised after the delivery.

    An exception such as Ctrl-C can also interrupt `__enter__` or `__exit__`: `recover` then undoes the call. A process
    forked while another thread holds the lock gets a new lock and undoes that thread's call.
    """

    def __init__(self, pressure: Callable[[], MemoryPressure]) -> None:
        self._lock = RLock()
        # By thread: for each call in progress, the lengths of `rollback` and `_events` at its start. Calls nest if the
        # garbage collector makes one.
        self._marks: dict[int, list[tuple[int, int]]] = {}
        # A call is final when its marks are cleared; the next call settles its entries and events.
        self._leave: tuple[Callable[[], None], ...] = (self._marks.clear, self._lock.release)
        self.rollback = Rollback()
        self._events: list[CacheEvent] = []
        self._pressure = pressure
        self._last_pressure = MemoryPressure.LOW
        self._pressure_listeners: list[Callable[[MemoryPressure], None]] = []
        self._event_listeners: list[Callable[[CacheEvent], None]] = []
        self._calls: deque[tuple[Callable[..., None], object]] = deque()
        self._is_delivering = False
        _GUARDS.add(self)

    @property
    def has_event_listeners(self) -> bool:
        """Whether there are listeners to events."""
        return bool(self._event_listeners)

    def listen_to_pressure(self, callback: Callable[[MemoryPressure], None]) -> None:
        """Register a callback for every change of the level."""
        _check_callable(callback)
        with self:
            if not self._pressure_listeners:
                self._last_pressure = self._pressure()
            self._pressure_listeners.append(callback)

    def listen_to_events(self, callback: Callable[[CacheEvent], None]) -> None:
        """Register a callback for every event."""
        _check_callable(callback)
        with self:
            self._event_listeners.append(callback)

    def add(self, event: CacheEvent) -> None:
        """Queue an event to deliver after the call, unless the call fails; the caller holds the lock."""
        self._events.append(event)

    def __enter__(self) -> None:
        thread = get_ident()
        if thread not in self._marks:
            self._lock.acquire()
            self._settle()
            self._marks[thread] = []
        self._marks[thread].append((len(self.rollback), len(self._events)))

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        marks = self._marks[get_ident()]
        if exc_type is not None:
            self._undo(marks, len(marks) - 1)
        elif len(marks) > 1:
            marks.pop()
            return
        if exc_type is None or not marks:
            # In C and on one line: no exception can come between the first two, and few before the third.
            any(map(call_of, self._leave)) or self._deliver()  # type: ignore[func-returns-value]

    @property
    def depth(self) -> int:
        """Number of nested calls in progress in this thread."""
        return len(self._marks.get(get_ident(), ()))

    def recover(self, depth: int) -> None:
        """Undo calls beyond `depth` that an exception interrupted; if it is 0, release the lock."""
        thread = get_ident()
        if thread in self._marks:
            self._undo(self._marks[thread], depth)
        if depth == 0:
            self._marks.pop(thread, None)
            with suppress(RuntimeError):  # this thread does not hold it
                self._lock.release()

    def renew_lock(self) -> None:
        """Replace the lock in a forked process, where the other threads do not exist."""
        if get_ident() not in self._marks:
            self._lock, self._is_delivering = RLock(), False
            self._leave = (self._marks.clear, self._lock.release)
            for marks in self._marks.values():
                self._undo(marks, 0)
            self._marks.clear()

    def _undo(self, marks: list[tuple[int, int]], depth: int) -> None:
        """Undo the calls beyond `depth`."""
        while len(marks) > depth:
            mark, num_events = marks[-1]
            del self._events[num_events:]
            self.rollback.put_back(mark)
            marks.pop()

    def _settle(self) -> None:
        """Make the previous call final and queue its notifications."""
        self.rollback.clear()
        if self._events:
            self._calls.extend((callback, event) for event in self._events for callback in self._event_listeners)
            self._events.clear()
        if self._pressure_listeners:
            level = self._pressure()
            if level is not self._last_pressure:
                self._calls.extend((callback, level) for callback in self._pressure_listeners)
                self._last_pressure = level

    def _deliver(self) -> None:
        if not (self._event_listeners or self._pressure_listeners):
            return
        with self._lock:
            self._settle()
            if self._is_delivering or not self._calls:
                return
            self._is_delivering = True
        ending: BaseException | None = None
        try:
            while (told := self._next_call()) is not None:
                callback, argument = told
                try:
                    callback(argument)
                except Exception:
                    _LOG.exception("a callback of the KV cache failed on %r", argument)
                except BaseException as error:
                    ending = error
                self._calls.popleft()
        except BaseException:  # the next call resumes the delivery
            self._is_delivering = False
            raise
        if ending is not None:
            raise ending

    def _next_call(self) -> tuple[Callable[..., None], object] | None:
        with self._lock:
            if not self._calls:
                self._is_delivering = False
                return None
            return self._calls[0]


def recovering(cls: C) -> C:
    """Wrap those methods of a class that use its `_guard`, so that an exception recovers it."""
    for name, method in list(vars(cls).items()):
        function: Any = method.fget if isinstance(method, property) else method
        if "_guard" in getattr(getattr(function, "__code__", None), "co_names", ()) and name != "__init__":
            recovered = _recovering(function)
            setattr(cls, name, property(recovered) if isinstance(method, property) else recovered)
    return cls


def _recovering(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: Notifier = self._guard
        depth = guard.depth
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            guard.recover(depth)
            raise

    return call


_GUARDS: WeakSet[Notifier] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: deque(map(Notifier.renew_lock, list(_GUARDS)), maxlen=0))


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise InvalidInputError(f"callback: {shown(callback)}, expected a function")
