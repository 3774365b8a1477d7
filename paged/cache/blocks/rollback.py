"""Undo log of a call: the values before its changes, restored if the call fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any


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
