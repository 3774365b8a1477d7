"""How near tests are to failing: the largest error of each, as a share of its budget.

    python -m pytest --headroom=FILE       notes the share of every test in FILE
    python -m tests.headroom FILE [FILE]   prints the twenty largest; fails if one is above 0.5

A test above half of its budget passes here and may fail on another processor, whose sums have another order.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

LIMIT = 0.5
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
    nearest = sorted(shares.items(), key=lambda entry: -entry[1])
    too_near = sum(share > LIMIT for share in shares.values())
    print(f"error / budget of {len(shares)} tests, the nearest to failing:")
    for test, share in nearest[: max(20, too_near)]:
        print(f"{share:7.3f}  {test}")
    if too_near:
        print(f"{too_near} tests need more than {LIMIT} of their budget, and may fail on another processor")
    return int(too_near > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
