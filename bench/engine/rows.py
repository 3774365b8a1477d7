"""A row of the engine's benchmark, and time spent inside of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import ModuleType
from typing import Any
from unittest import mock

from paged.bench.goal import Goal


@dataclass(frozen=True)
class Row:
    """A result; `detail` holds what it was made of."""

    name: str
    value: float
    unit: str
    goals: list[Goal]
    detail: dict[str, float]


@contextmanager
def timed_inside(module: ModuleType, *names: str) -> Iterator[list[float]]:
    """Adds up the seconds inside of a module's functions, called by these names in it."""
    total = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = call(*args, **kwargs)
            total[0] += perf_counter() - start
            return result

        return wrapped

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(module, name, timed(getattr(module, name))))
        yield total
