"""A row of the engine's benchmark, and time spent inside of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from types import ModuleType
from typing import Any
from unittest import mock

from paged.bench.check import WrongResultError
from paged.bench.goal import Goal


@dataclass(frozen=True)
class Row:
    """A result; `detail` holds what it was made of, `times` its time beside its limit and peers, where it has them."""

    name: str
    value: float
    unit: str
    goals: list[Goal]
    detail: dict[str, float]
    times: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        times: dict[str, Any] = found.pop("times")
        return found | times


def check_same_texts(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], length: int, share: float = 0.9
) -> None:
    """At least this share of the texts begin alike: rounding may turn one where two logits are almost equal.

    Raises:
        WrongResultError: fewer do.
    """
    same = sum(list(one[:length]) == list(other[:length]) for one, other in zip(ours, theirs, strict=True))
    if same < share * len(ours):
        raise WrongResultError(f"{same} of {len(ours)} texts are those of the peer")


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
