"""What was before the changes of a call, and how it is put back should the call fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any


class Fields:
    """The fields of a class that calls change, two or more: its attribute `fields`."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.of: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)

    def put_back(self, owner: object, values: Sequence[Any]) -> None:
        for name, value in zip(self.names, values, strict=True):
            setattr(owner, name, value)


class Rollback:
    """What nothing else tells: what sequences were like, what was published, and the order of free blocks. The rest,
    as reference counts, follows from that, and `recount` counts it again.

    Whatever changes any of it says before that something was kept, as else nothing is put back.

    keep: a function and its arguments, which puts back what is about to change, whether it then changes or not.
    recount: called when all is put back.
    """

    __slots__ = ("_after", "_kept", "keep", "recount")

    def __init__(self, *, is_kept: bool = True) -> None:
        """is_kept: False where changes are final."""
        self._kept: deque[Sequence[Any]] = deque(maxlen=None if is_kept else 0)
        self._after: list[Sequence[Any]] = []
        self.keep: Callable[[Sequence[Any]], None] = self._kept.append
        self.recount: Callable[[], None] = lambda: None

    def keep_fields(self, owner: Any) -> None:
        """What `owner.fields` of it are."""
        fields: Fields = owner.fields
        self.keep((fields.put_back, owner, fields.of(owner)))

    def keep_end(self, items: list[Any], start: int) -> None:
        """What stands in a list from `start` on, and that nothing follows."""
        self.keep((list.__setitem__, items, slice(start, None), items[start:]))

    def keep_absence(self, mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
        """That a dictionary has none of `keys`."""
        self.keep((_remove, mapping, keys))

    def keep_call(self, function: Callable[..., None], *args: Any) -> None:
        """Call this when all is put back: it says what cannot be."""
        self._after.append((function, *args))

    @property
    def mark(self) -> tuple[int, int]:
        """Where a call within the call begins."""
        return len(self._kept), len(self._after)

    def forget(self) -> None:
        """The call has succeeded."""
        if self._kept:
            self._kept.clear()
        if self._after:
            self._after.clear()

    def put_back(self, mark: tuple[int, int] = (0, 0)) -> None:
        """The call that began at `mark` has failed. What cannot be put back is a change of the outer call from now on."""
        num_kept, num_after = mark
        if len(self._kept) == num_kept:
            return
        while len(self._kept) > num_kept:
            function, *args = self._kept.pop()
            function(*args)
        self.recount()
        for function, *args in self._after[num_after:]:
            function(*args)


def _remove(mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
    for key in keys:
        mapping.pop(key, None)
