"""A row of the engine's benchmark, and time spent inside of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from paged import Engine, SamplingParams
from paged.bench.check import WrongResultError
from paged.bench.goal import Goal
from paged.executors.model_executor import ModelExecutor


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


class Run(NamedTuple):
    """seconds: of all. first_seconds: until each prompt's first token."""

    seconds: float
    first_seconds: list[float]
    tokens: list[list[int]]


def run_engine(executor: ModelExecutor, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
    """The best tokens after each prompt, with nothing in the prefix cache."""
    manager = executor.kv_manager
    assert manager is not None
    manager.clear_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=new_tokens)
    start = perf_counter()
    outputs = Engine(executor, eos_token_ids=()).generate(prompts, params, progress=False)
    seconds = perf_counter() - start
    first = [output.metrics.first_token_s or 0.0 for output in outputs]
    return Run(seconds, first, [list(output.outputs[0].token_ids) for output in outputs])


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
