"""Guard around each cache call: lock, deferred interrupts, rollback after an error, notifications at the end."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal looks up enums, which takes ten times as long
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
    """Undo log of a call, for state that cannot be derived: sequences, publications, the order of free blocks.

    Before a value changes, append a function and the arguments that restore it. `recount` then derives all other
    state, such as reference counts. A rollback with an empty log does nothing, so append an entry before the first
    change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recount: Callable[[], None] = lambda: None

    def keep_fields(self, owner: object, names: Sequence[str]) -> None:
        """Save two or more fields of an object."""
        self.append((_set_fields, owner, names, attrgetter(*names)(owner)))

    def keep_end(self, items: list[Any], start: int) -> None:
        """Save the length of a list and its items from `start` on."""
        self.append((list.__setitem__, items, slice(start, None), items[start:]))

    def keep_absence(self, mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
        """Save that `keys` are absent from a dictionary."""
        self.append((_remove, mapping, keys))

    def keep_lost(self, function: Callable[[Any], None], argument: Any) -> None:
        """Call `function` after a rollback, even of an outer call, to account for a change that cannot be undone."""
        self.append((None, function, argument))

    def put_back(self, start: int = 0) -> None:
        """Undo all entries but the first `start`, newest first."""
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
    """Event counters, named as in `CacheStats`; a call that fails counts nothing."""

    def __init__(self, rollback: Rollback) -> None:
        self.by_name = dict.fromkeys(_EVENTS, 0)
        self._rollback = rollback

    def add(self, name: str, number: int) -> None:
        """Add to one counter."""
        before = self.by_name[name]
        self._rollback.append((self.by_name.__setitem__, name, before))
        self.by_name[name] = before + number


class HeldInterrupts:
    """Defers the SIGINT handler while the main thread is in a call; calls nest.

    Between `hold` and the last `release`, a substitute handler only notes the signal. Outside calls the program's own
    handler is in place, for `signal.getsignal` and asyncio. Without a Python handler nothing is replaced. The cost is
    1 us a call.
    """

    def __init__(self) -> None:
        self._main_thread = main_thread().ident
        self._depth = 0
        self._note = self._note_interrupt  # one object for `is`, because each look-up makes a new bound method
        self._handler: Any = None
        self._interrupt: tuple[int, FrameType | None] | None = None

    def hold(self) -> bool:
        """Begin to defer; return whether this is the main thread, which then has to call `release`."""
        if get_ident() != self._main_thread:
            return False
        if self._depth == 0:
            handler = _signal.getsignal(SIGINT)
            # The handler is already `_note` if the garbage collector calls the cache before this line.
            if callable(handler) and handler is not self._note:
                self._interrupt = None
                # If a signal is pending, Python runs the old handler before it sets the new one.
                self._handler = _signal.signal(SIGINT, self._note)
        self._depth += 1
        return True

    def release(self) -> None:
        """Stop deferring; after the outermost call, run the handler if a signal came. The handler may raise."""
        self._depth -= 1
        if self._depth == 0 and self._handler is not None:
            handler, self._handler = self._handler, None
            if _signal.getsignal(SIGINT) is self._note:  # a callback may have set another handler
                _signal.signal(SIGINT, handler)
            if self._interrupt is not None:
                interrupt, self._interrupt = self._interrupt, None
                handler(*interrupt)

    def renew(self) -> None:
        """Release at once in a process forked by another thread, which is the main thread of the new process."""
        if get_ident() != self._main_thread:
            self._main_thread = get_ident()
            if self._depth:
                self._depth, self._interrupt = 1, None
                self.release()

    def _note_interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        self._interrupt = signal_number, frame


class CacheGuard:
    """Context manager around the body of every cache call: takes the cache's lock; calls nest.

    If an exception leaves the body, every change noted in `rollback` by this call is undone. When the outermost call
    succeeds, `listeners` are called outside the lock. Interrupts wait until the listeners have returned.

    A process forked while another thread is in a call takes a new lock and rolls the unfinished call back.
    """

    def __init__(self, measure_pressure: Callable[[], MemoryPressure]) -> None:
        self.rollback = Rollback()
        self.counts = EventCounts(self.rollback)
        self.listeners = Listeners(measure_pressure)
        self._give_up: list[Callable[[], object]] = []
        self._lock = RLock()
        self._thread = 0  # id of the thread that holds the lock
        # One entry for each call in progress: whether it defers interrupts, and the lengths of `rollback`, events and
        # `_give_up` at its start. Calls also nest, because the garbage collector may make a call within another one.
        self._marks: list[tuple[bool, int, int, int]] = []
        _GUARDS.add(self)

    def give_up_by(self, function: Callable[[], object]) -> None:
        """Call `function` if a callback or interrupt raises after this call, because its result is then lost."""
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
        """Take a new lock in a forked process, unless its only thread, this one, is in a call."""
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
