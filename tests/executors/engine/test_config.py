"""EngineConfig: every value is checked."""

from __future__ import annotations

import pytest

from paged import EngineConfig, InvalidInputError


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"token_budget": 0}, {"token_budget": 1}),
        ({"chunk_size": 0}, {"chunk_size": None}),
        ({"max_num_seqs": 0}, {"max_num_seqs": 1}),
        ({"admission_tokens": -1}, {"admission_tokens": 0}),
        ({"preemption": "drop"}, {"preemption": "swap"}),
        ({"decode_stretch": 1.0}, {"decode_stretch": 1.1}),
        ({"priority_requests": 0}, {"priority_requests": 1}),
    ],
)
def test_configuration_is_checked(wrong: dict[str, object], right: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        EngineConfig(**wrong)  # type: ignore[arg-type]
    EngineConfig(**right)  # type: ignore[arg-type]
