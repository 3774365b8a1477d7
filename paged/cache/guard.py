"""The guard of a cache's calls: one lock, interrupts that wait, undo after an error, and notifications at the end."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal takes 5 us (it looks up enums); this takes 0.5 us
import os
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from signal import SIGINT
from threading import RLock, get_ident, main_thread
from types import FrameType
from typing import Any
from weakref import WeakSet

from paged.cache.events import Listeners, MemoryPressure


class Rollback(list[Sequence[Any]]):
    """State before a call that cannot be derived: sequences, publications, and the order of free blocks.

    `recount` derives the rest, such as reference counts. Before code changes a value, it appends a function and the
    arguments that restore it. Without entries nothing is restored, so an essential entry comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recount: Callable[[], None] = lambda: None

    def keep_fields(self, owner: object, names: Sequence[str]) -> None:
        """Save two or more fields of an object."""
        self.append((_set_fields, owner, names, attrgetter(*names)(owner)))

    def keep_end(self, items: list[Any], start: int) -> None:
        """Save the items of a list from `start` on, and its length."""
        self.append((list.__setitem__, items, slice(start, None), items[start:]))

    def keep_absence(self, mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
        """Save that a dictionary has none of `keys`."""
        self.append((_remove, mapping, keys))

    def keep_lost(self, function: Callable[[Any], None], argument: Any) -> None:
        """Call `function` after a rollback, even of an outer call, for a change that cannot be undone."""
        self.append((None, function, argument))

    def put_back(self, start: int = 0) -> None:
        """Undo all entries after the first `start`."""
        if len(self) == start:
            return
        lost = []
        while len(self) > start:
            function, *arguments = self.pop()
            if function is None:
                lost.append(arguments)
            else:
                function(*arguments)
        self.recount()
        for function, argument in reversed(lost):
            self.keep_lost(function, argument)
            function(argument)


def _set_fields(owner: object, names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(owner, name, value)


def _remove(mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
    for key in keys:
        mapping.pop(key, None)


_EVENTS = """prefix_hits prefix_misses prefix_hit_tokens evictions cow_copies swapped_out_blocks swapped_in_blocks
    state_hits state_evictions host_stored_blocks host_loaded_blocks host_dropped_blocks host_hits host_misses
    host_query_tokens host_hit_tokens host_loaded_states""".split()


class EventCounts:
    """What has happened since the start, by names of `CacheStats`; a call that fails counts nothing."""

    def __init__(self, rollback: Rollback) -> None:
        self.by_name = dict.fromkeys(_EVENTS, 0)
        self._rollback = rollback

    def add(self, name: str, number: int) -> None:
        """Count more of one kind."""
        before = self.by_name[name]
        self._rollback.append((self.by_name.__setitem__, name, before))
        self.by_name[name] = before + number


class HeldInterrupts:
    """Makes the handler of SIGINT wait while the main thread is in a call; calls nest.

    Between `hold` and the last `release` another handler only notes the signal. Elsewhere nothing has changed:
    `signal.getsignal` returns the program's handler, and asyncio finds its own. A program without a Python handler is
    left alone. The price is 1 us per call.
    """

    def __init__(self) -> None:
        self._main_thread = main_thread().ident
        self._depth = 0
        self._note = self._note_interrupt  # a bound method is a new object each time it is looked up
        self._handler: Any = None
        self._interrupt: tuple[int, FrameType | None] | None = None

    def hold(self) -> bool:
        """Begin; return whether this is the main thread, which then has to call `release`."""
        if get_ident() != self._main_thread:
            return False
        if self._depth == 0:
            handler = _signal.getsignal(SIGINT)
            if callable(handler) and handler is not self._note:  # ours if the garbage collector makes a call in this
                self._interrupt = None
                self._handler = _signal.signal(SIGINT, self._note)  # runs the handler first if a signal is pending
        self._depth += 1
        return True

    def release(self) -> None:
        """End; after the outermost call the handler runs if there was a signal, and may raise."""
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            if _signal.getsignal(SIGINT) is self._note:  # a callback may have set another
                _signal.signal(SIGINT, handler)
            if self._interrupt is not None:
                interrupt, self._interrupt = self._interrupt, None
                handler(*interrupt)

    def renew(self) -> None:
        """Release at once in a process forked by another thread, which becomes the main thread there."""
        if get_ident() != self._main_thread:
            self._main_thread = get_ident()
            if self._depth:
                self._depth, self._interrupt = 1, None
                self.release()

    def _note_interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        self._interrupt = signal_number, frame


class CacheGuard:
    """The cache's lock, as a context manager around the body of every call; calls nest.

    If an exception leaves the body, every change recorded in `rollback` since its start is undone. Otherwise, and after
    the outermost call, `listeners` are called outside the lock. Interrupts wait until that is done.

    A process forked while another thread is in a call gets a new lock and undoes that call.
    """

    def __init__(self, measure_pressure: Callable[[], MemoryPressure]) -> None:
        self.rollback = Rollback()
        self.counts = EventCounts(self.rollback)
        self.listeners = Listeners(measure_pressure)
        self._give_up: list[Callable[[], object]] = []
        self._lock = RLock()
        self._thread = 0  # that holds the lock
        # For each call in progress: whether it holds interrupts, and the lengths of `rollback`, events and `_give_up`
        # at its start. Calls also nest if the garbage collector makes one.
        self._marks: list[tuple[bool, int, int, int]] = []
        _GUARDS.add(self)

    def give_up_by(self, function: Callable[[], object]) -> None:
        """Call `function` if a callback or an interrupt raises at the end of this call: nobody gets its result."""
        self._give_up.append(function)

    def __enter__(self) -> None:
        is_holding = _INTERRUPTS.hold()
        self._lock.acquire()
        self._thread = get_ident()
        self._marks.append((is_holding, len(self.rollback), len(self.listeners.events), len(self._give_up)))

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        is_holding, num_entries, num_events, num_functions = self._marks[-1]
        is_outermost = len(self._marks) == 1
        give_up: list[Callable[[], object]] = []
        try:
            try:
                try:
                    if exc_type is not None:
                        del self._give_up[num_functions:]
                        del self.listeners.events[num_events:]
                        self.rollback.put_back(num_entries)
                    if is_outermost:
                        if self._give_up:
                            give_up, self._give_up = self._give_up, give_up
                        self.rollback.clear()
                        if self.listeners.on_event or self.listeners.on_pressure:
                            self.listeners.queue()
                finally:
                    self._marks.pop()
                    self._lock.release()
                if is_outermost and (self.listeners.on_event or self.listeners.on_pressure):
                    self.listeners.deliver(self._lock)
            finally:
                if is_holding:
                    _INTERRUPTS.release()
        except BaseException:
            for function in give_up:
                function()
            raise

    def renew(self) -> None:
        """Take a new lock in a forked process, unless this thread, the only one there, is in a call."""
        if self._marks and self._thread == get_ident():
            return
        self._lock = RLock()
        self.listeners.events.clear()
        self._give_up.clear()
        self.rollback.put_back()
        self.rollback.clear()
        self._marks.clear()
        self.listeners.renew()


_INTERRUPTS = HeldInterrupts()
_GUARDS: WeakSet[CacheGuard] = WeakSet()


def _renew_all() -> None:
    _INTERRUPTS.renew()
    for guard in list(_GUARDS):
        guard.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
