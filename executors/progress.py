"""Progress bars: on a terminal where tqdm is installed, else nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TypeVar

T = TypeVar("T")


class ProgressBar:
    """The used part of tqdm's bar; does nothing itself."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> object: ...


def progress_bar(total: int, *, desc: str, unit: str, shown: bool = True) -> ProgressBar:
    """A bar over `total` units of work, on stderr if that is a terminal: in a log it would be lines of noise."""
    stream = getattr(sys.stderr, "unescaped", sys.stderr)  # a bar moves the cursor
    with suppress(ImportError, ValueError):  # closed
        if shown and stream is not None and stream.isatty():  # None where the process was started without one
            from tqdm import tqdm

            is_scaled = unit == "B"
            return tqdm(total=total, unit=unit, unit_scale=is_scaled, desc=desc, file=stream)  # type: ignore[no-any-return]
    return ProgressBar()


def tracked(
    items: Sequence[T], *, desc: str, unit: str, size: Callable[[T], int] = lambda _: 1, shown: bool = True
) -> Iterator[T]:
    """Yield the items one by one, with a bar that counts the size of each: one, or bytes, of which the unit is "B"."""
    with closing(progress_bar(sum(map(size, items)), desc=desc, unit=unit, shown=shown and bool(items))) as bar:
        for item in items:
            count = size(item)  # before it is packed, or what else the caller does with it
            yield item
            bar.update(count)
