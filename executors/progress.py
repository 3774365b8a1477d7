"""A progress bar where tqdm is installed, and nothing where it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

T = TypeVar("T")


class ProgressBar(Protocol):
    """What is used of tqdm's bar; `total` may grow."""

    total: int

    def update(self, n: int, /) -> object: ...

    def close(self) -> None: ...


class _NoBar:
    total = 0

    def update(self, n: int, /) -> None: ...

    def close(self) -> None: ...


def progress_bar(total: int, *, desc: str, unit: str, shown: bool = True) -> ProgressBar:
    """A bar over `total` units of work, on stderr."""
    if shown and sys.stderr is not None:  # None where the process was started without one
        try:
            from tqdm import tqdm
        except ImportError:
            return _NoBar()
        stream = getattr(sys.stderr, "unescaped", sys.stderr)  # a bar moves the cursor
        bar: ProgressBar = tqdm(total=total, unit=unit, desc=desc, file=stream)
        return bar
    return _NoBar()


def tracked(items: Sequence[T], *, desc: str, unit: str) -> Iterator[T]:
    """The items one by one, a bar going along."""
    with closing(progress_bar(len(items), desc=desc, unit=unit)) as bar:
        for item in items:
            yield item
            bar.update(1)
