"""Property tests over cases that JSON can hold: a short run in the test suite, a long one by `FUZZ_S=600 make fuzz`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

SEEDS = Path(__file__).parent / "seeds"
# The case that is being run: what is left here after a signal ended the process is what did it.
RUNNING = Path(".hypothesis/fuzz")


def fuzz(strategy: SearchStrategy[Any], *, examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of `check(case, **fixtures)`: first over the cases in `seeds/NAME.json`, then over drawn ones, always
    the same `examples` unless FUZZ_SHARE_S gives seconds for others. A case that fails is minimised and added to the
    seeds.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        name = check.__name__.removeprefix("test_")
        seeds, running = SEEDS / f"{name}.json", RUNNING / f"{name}.json"

        def run(cases: SearchStrategy[Any], is_long: bool, fixtures: dict[str, Any]) -> None:
            failing: list[Any] = []

            @settings(
                max_examples=examples,
                derandomize=not is_long,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(cases)
            def check_drawn(case: Any) -> None:
                running.write_text(json.dumps(case))
                try:
                    check(case, **fixtures)
                except HypothesisException:
                    raise
                except BaseException:
                    failing[:] = [case]
                    raise

            try:
                check_drawn()
            finally:
                if failing:  # the last one is the smallest
                    _keep(seeds, failing[0])

        def test(**fixtures: Any) -> None:
            RUNNING.mkdir(parents=True, exist_ok=True)
            for case in json.loads(seeds.read_text()) if seeds.exists() else []:
                check(case, **fixtures)
            seconds = float(os.environ.get("FUZZ_SHARE_S", "0"))
            end = monotonic() + seconds
            run(strategy, seconds > 0, fixtures)
            while monotonic() < end:
                run(strategy, True, fixtures)
            running.unlink()

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        signature = inspect.signature(check)
        fixtures = [one for one in signature.parameters.values() if one.name != "case"]
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate


def _keep(seeds: Path, case: Any) -> None:
    cases = json.loads(seeds.read_text()) if seeds.exists() else []
    if case not in cases:
        seeds.write_text("[\n" + ",\n".join(json.dumps(one) for one in [*cases, case]) + "\n]\n")
