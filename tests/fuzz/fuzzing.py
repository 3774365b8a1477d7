"""Property tests over cases that JSON can hold: a short run in the test suite, a long one by `FUZZ_S=600 make fuzz`."""

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

SEEDS = Path(__file__).parent / "seeds"
# The case that is being run: what is left here after a signal ended the process is what did it.
RUNNING = Path(".hypothesis/fuzz")
Check = Callable[..., None]


def fuzz(cases: SearchStrategy[Any], *, examples: int, thorough: int = 0) -> Callable[[Check], Check]:
    """Make a test of `check(case, **fixtures)`: first over the cases in `seeds/NAME.json`, then over drawn ones, always
    the same `examples` unless FUZZ_SHARE_S gives seconds for others. A case that fails is minimised and added to the
    seeds. `thorough`: how many `make test-all` draws, where `make test` draws too few for the subject.
    """

    def decorate(check: Check) -> Check:
        name = check.__name__.removeprefix("test_")
        seeds = SEEDS / f"{name}.json"

        def test(count: int, **fixtures: Any) -> None:
            def check_drawn(case: Any) -> None:
                running.write_text(json.dumps(case))
                try:
                    check(case, **fixtures)
                except HypothesisException:
                    raise
                except BaseException:
                    failing[:] = [case]
                    raise

            running = RUNNING / f"{name}-{count}.json"
            RUNNING.mkdir(parents=True, exist_ok=True)
            for case in _cases(seeds):
                check(case, **fixtures)
            seconds = float(os.environ.get("FUZZ_SHARE_S", "0"))
            end, failing = monotonic() + seconds, []  # type: ignore[var-annotated]
            options = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
            run = settings(max_examples=count, derandomize=seconds == 0, **options)(given(cases)(check_drawn))
            try:
                run()
                while monotonic() < end:
                    run()
            finally:
                if failing and failing[0] not in _cases(seeds):  # the last one is the smallest
                    lines = map(json.dumps, [*_cases(seeds), failing[0]])
                    seeds.write_text("[\n" + ",\n".join(lines) + "\n]\n")
            running.unlink()

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        names = ["count", *list(inspect.signature(check).parameters)[1:]]
        parameters = [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY) for one in names]
        test.draws = cases  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        more = [pytest.param(thorough, marks=pytest.mark.thorough)] if thorough else []
        return pytest.mark.parametrize("count", [examples, *more])(test)

    return decorate


def _cases(seeds: Path) -> list[Any]:
    return json.loads(seeds.read_text()) if seeds.exists() else []
