"""A progress bar where tqdm is installed, and nothing where it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TypeVar

T = TypeVar("T")


class ProgressBar:
    """The used part of tqdm's bar; does nothing itself."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> object: ...


def progress_bar(total: int, *, desc: str, unit: str, shown: bool = True) -> ProgressBar:
    """A bar over `total` units of work, on stderr."""
    if shown and sys.stderr is not None:  # None where the process was started without one
        with suppress(ImportError):
            from tqdm import tqdm

            stream = getattr(sys.stderr, "unescaped", sys.stderr)  # a bar moves the cursor
            return tqdm(total=total, unit=unit, desc=desc, file=stream)  # type: ignore[no-any-return]
    return ProgressBar()


def tracked(items: Sequence[T], *, desc: str, unit: str) -> Iterator[T]:
    """Yield the items and move a bar along."""
    with closing(progress_bar(len(items), desc=desc, unit=unit)) as bar:
        for item in items:
            yield item
            bar.update(1)
