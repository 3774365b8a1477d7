"""Progress bars on a terminal if tqdm is installed, otherwise none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TypeVar

T = TypeVar("T")


class ProgressBar:
    """Interface of a progress bar (a subset of tqdm's); this class does nothing."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> object: ...


def progress_bar(total: int, *, desc: str, unit: str, shown: bool = True) -> ProgressBar:
    """Return a bar over `total` units of work on stderr; it does nothing unless stderr is a terminal."""
    # A bar moves the cursor by control characters, which the command line's own stream would escape.
    stream = getattr(sys.stderr, "unescaped", sys.stderr)
    with suppress(ImportError, ValueError):  # tqdm is missing, or stderr is closed
        if shown and stream is not None and stream.isatty():  # `stream` is None without a stderr
            from tqdm import tqdm

            is_scaled = unit == "B"
            return tqdm(total=total, unit=unit, unit_scale=is_scaled, desc=desc, file=stream)  # type: ignore[no-any-return]
    return ProgressBar()


def tracked(
    items: Sequence[T], *, desc: str, unit: str, size: Callable[[T], int] = lambda _: 1, shown: bool = True
) -> Iterator[T]:
    """Yield the items while a bar counts their sizes: 1 each, or bytes if the unit is "B"."""
    with closing(progress_bar(sum(map(size, items)), desc=desc, unit=unit, shown=shown and bool(items))) as bar:
        for item in items:
            count = size(item)  # now, because the caller may pack or drop the item
            yield item
            bar.update(count)
