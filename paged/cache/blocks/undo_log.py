"""What takes back the changes of a call that fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class UndoLog:
    """Calls that bring back what was there before the changes that are under way.

    Whoever changes something adds first what undoes it, which must be right whether the change was made, in part, or
    not at all: any allocation between may fail. All is undone in reverse, so that each entry finds what it left.

    add: take an entry, a function and its arguments; the bound method of a deque, as a step adds several a sequence.
    """

    __slots__ = ("_after", "_entries", "add")

    def __init__(self, *, is_kept: bool = True) -> None:
        """is_kept: whether anybody will undo; else nothing is remembered."""
        self._entries: deque[Sequence[Any]] = deque(maxlen=None if is_kept else 0)
        self._after: list[Sequence[Any]] = []
        self.add: Callable[[Sequence[Any]], None] = self._entries.append

    def add_after(self, entry: Sequence[Any]) -> None:
        """Call this when all is undone: it says what cannot be taken back."""
        self._after.append(entry)

    def clear(self) -> None:
        """The call has succeeded."""
        if self._entries:
            self._entries.clear()
        if self._after:
            self._after.clear()

    def undo(self) -> None:
        """The call has failed. What undoing adds itself is of no interest."""
        entries, after = list(self._entries), list(self._after)
        self.clear()
        for function, *args in [*reversed(entries), *after]:
            function(*args)
        self.clear()
