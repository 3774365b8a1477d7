"""What takes back the changes of a call that fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any


class UndoLog:
    """Calls that bring back what was there before the changes that are under way.

    A method adds what undoes its change before it makes it. That must be right whether the change was made, in part,
    or not at all: any allocation between may fail. All is undone in reverse, so that each entry finds what it left.

    add: take an entry, a function and its arguments; the bound method of a deque, as a step adds several a sequence.
    """

    __slots__ = ("_after", "_entries", "add")

    def __init__(self, *, is_kept: bool = True) -> None:
        """is_kept: whether changes may be undone; else nothing is remembered."""
        self._entries: deque[Sequence[Any]] = deque(maxlen=None if is_kept else 0)
        self._after: list[Sequence[Any]] = []
        self.add: Callable[[Sequence[Any]], None] = self._entries.append

    def add_after(self, entry: Sequence[Any]) -> None:
        """Call this when all is undone: it says what cannot be taken back."""
        self._after.append(entry)

    @property
    def mark(self) -> tuple[int, int]:
        """Where the log stands: what a call within a call is undone to."""
        return len(self._entries), len(self._after)

    def clear(self) -> None:
        """The call has succeeded."""
        if self._entries:
            self._entries.clear()
        if self._after:
            self._after.clear()

    def undo(self) -> None:
        """The call has failed. What undoing adds itself is of no interest."""
        self.undo_to((0, 0))
        self.clear()

    def undo_to(self, mark: tuple[int, int]) -> None:
        """A call within the call has failed, which began at `mark`; the outer one may yet succeed.

        What cannot be taken back is a change of the outer call from here on, and told again should that one fail.
        """
        num_entries, num_after = mark
        entries, after = list(islice(self._entries, num_entries, None)), self._after[num_after:]
        self._cut(num_entries)
        for function, *args in reversed(entries):
            function(*args)
        self._cut(num_entries)
        for function, *args in after:
            function(*args)

    def _cut(self, num_entries: int) -> None:
        while len(self._entries) > num_entries:
            self._entries.pop()
