"""The way of a step and of an operation does not grow; whoever shortens it lowers the bound."""

import pytest

from tests.structure.measures import carriers, measure

BOUNDS = {
    "files of a decode step": 38,
    "files from reserve to commit": 9,
    "types that carry a step": 4,
    "files of paged_attention": 18,
    "calls of paged_attention down to its kernel": 4,
    "calls of a bound paged_attention": 3,
    "places of a KV dtype": 8,
    "files of a sampling filter": 7,
}


@pytest.fixture(scope="module")
def measures() -> dict[str, int]:
    return measure()


@pytest.mark.parametrize("name", BOUNDS)
def test_no_measure_grows(measures: dict[str, int], name: str) -> None:
    assert measures[name] <= BOUNDS[name]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_carried_by_the_types_that_architecture_names(overlap: bool) -> None:
    assert carriers(overlap=overlap) == {"AttentionMetadata", "Completion", "EngineStep", "Sampled"}
