"""How near tests are to failing: the largest error of each, as a share of its budget.

    python -m pytest --headroom=FILE       notes the share of every test in FILE
    python -m tests.headroom FILE [FILE]   prints the twenty largest, the largest last; fails if one is above 0.75

Budgets keep twice the room that a test needs: a test above half of its budget passes here and may fail on another
processor, whose sums have another order. That order moves shares too, so what fails is half as much again.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

AIM = 0.5
LIMIT = 0.75
_PROPERTY = "error share"
_shares: list[float] = []


def note(share: float) -> None:
    """Note a comparison of the test that runs."""
    _shares.append(share)


@contextmanager
def unnoted() -> Iterator[None]:
    """Note no comparison within: a planted fault may be just within a budget that others exceed."""
    count = len(_shares)
    try:
        yield
    finally:
        del _shares[count:]


class Plugin:
    """Takes the shares from the processes that run tests to the one that reports."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.by_test: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        _shares.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            if item.get_closest_marker("by_cpu"):
                note(0.0)
            if _shares:
                item.user_properties.append((_PROPERTY, max(_shares)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == _PROPERTY:
                    self.by_test[report.nodeid] = float(str(value))

    def pytest_sessionfinish(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.by_test, indent=0))


def main(paths: Sequence[str]) -> int:
    """Print the tests of these files that are nearest to failing; 1 if one is too near."""
    shares: dict[str, float] = {}
    for path in paths:
        for test, share in json.loads(Path(path).read_text()).items():
            shares[test] = max(share, shares.get(test, 0.0))
    by_share = sorted(shares, key=shares.__getitem__)
    above_aim = [test for test in by_share if shares[test] > AIM]
    print(f"error / budget of {len(shares)} tests, the nearest to failing last:")
    for test in by_share[-max(20, len(above_aim)) :]:
        print(f"{shares[test]:7.3f}  {test}")
    if above_aim:
        print(f"{len(above_aim)} tests need more than {AIM} of their budget: give the last ones more room")
    return int(any(shares[test] > LIMIT for test in above_aim))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
