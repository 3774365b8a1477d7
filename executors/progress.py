"""Progress bars: on a terminal if tqdm is installed, else nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TypeVar

T = TypeVar("T")


class ProgressBar:
    """The subset of tqdm's bar in use; this class does nothing."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> object: ...


def progress_bar(total: int, *, desc: str, unit: str, shown: bool = True) -> ProgressBar:
    """Return a bar over `total` units of work on stderr, or one that does nothing unless stderr is a terminal."""
    stream = getattr(sys.stderr, "unescaped", sys.stderr)  # a bar moves the cursor
    with suppress(ImportError, ValueError):  # tqdm is missing, or stderr is closed
        if shown and stream is not None and stream.isatty():  # None if the process has no stderr
            from tqdm import tqdm

            is_scaled = unit == "B"
            return tqdm(total=total, unit=unit, unit_scale=is_scaled, desc=desc, file=stream)  # type: ignore[no-any-return]
    return ProgressBar()


def tracked(
    items: Sequence[T], *, desc: str, unit: str, size: Callable[[T], int] = lambda _: 1, shown: bool = True
) -> Iterator[T]:
    """Yield the items with a bar that counts the size of each: 1, or bytes if the unit is "B"."""
    with closing(progress_bar(sum(map(size, items)), desc=desc, unit=unit, shown=shown and bool(items))) as bar:
        for item in items:
            count = size(item)  # before the caller packs or drops it
            yield item
            bar.update(count)
