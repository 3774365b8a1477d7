"""The way of a step and of an operation does not grow; whoever shortens it lowers the bound."""

import pytest

from tests.structure.measures import measure

BOUNDS = {
    "files of a decode step": 38,
    "types that carry a step": 11,
    "files of paged_attention": 19,
    "calls of paged_attention down to its kernel": 6,
    "calls of a bound paged_attention": 6,
    "places of a KV dtype": 16,
    "files of a sampling filter": 13,
}


@pytest.fixture(scope="module")
def measures() -> dict[str, int]:
    return measure()


@pytest.mark.parametrize("name", BOUNDS)
def test_no_measure_grows(measures: dict[str, int], name: str) -> None:
    assert measures[name] <= BOUNDS[name]
