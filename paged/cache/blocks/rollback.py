"""What was before the changes of a call, and how it is put back should the call fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any


class Rollback(list[Sequence[Any]]):
    """What nothing else tells of the time before a call: what sequences were like, what was published, and the order of
    free blocks. The rest, as reference counts, follows from that, and `recount` counts it again.

    Whatever is about to change any of it says before what there is: appends a function and its arguments that put it
    back, whether it then changed or not. Without an entry nothing is put back, so one that matters comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recount: Callable[[], None] = lambda: None

    def keep_fields(self, owner: object, names: Sequence[str]) -> None:
        """What two or more fields of an object are."""
        self.append((_set_fields, owner, names, attrgetter(*names)(owner)))

    def keep_end(self, items: list[Any], start: int) -> None:
        """What stands in a list from `start` on, and that nothing follows."""
        self.append((list.__setitem__, items, slice(start, None), items[start:]))

    def keep_absence(self, mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
        """That a dictionary has none of `keys`."""
        self.append((_remove, mapping, keys))

    def keep_lost(self, function: Callable[[Any], None], argument: Any) -> None:
        """What cannot be put back: this is called when all else is, also if a call around this one fails later."""
        self.append((None, function, argument))

    def put_back(self, start: int = 0) -> None:
        """The call that began with so many entries has failed."""
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
