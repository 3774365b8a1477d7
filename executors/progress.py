"""A progress bar where tqdm is installed, and nothing where it is not."""

from __future__ import annotations

from typing import Protocol


class ProgressBar(Protocol):
    """What is used of tqdm's bar."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> None: ...


class _NoBar:
    def update(self, n: int, /) -> None: ...

    def close(self) -> None: ...


def progress_bar(total: int, *, shown: bool) -> ProgressBar:
    """A bar over `total` prompts."""
    if shown:
        try:
            from tqdm import tqdm
        except ImportError:
            return _NoBar()
        bar: ProgressBar = tqdm(total=total, unit="prompt", desc="generate")
        return bar
    return _NoBar()
