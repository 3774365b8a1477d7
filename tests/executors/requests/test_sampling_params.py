"""What sampling parameters take, what they make of it, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paged import InvalidInputError, SamplingParams
from paged.executors.requests.sampling_params import MAX_COMPLETIONS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("n", np.int8(3), 3),
        ("n", MAX_COMPLETIONS, MAX_COMPLETIONS),
        ("top_k", torch.tensor(5), 5),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 2, 2.0),
        ("top_p", torch.tensor(0.5), 0.5),
        ("logit_bias", {np.int64(5): np.float64(1.5)}, {5: 1.5}),
        ("allowed_token_ids", range(3), (0, 1, 2)),
        ("stop_token_ids", np.array([4, 5]), (4, 5)),
        ("stop_token_ids", {4}, (4,)),
        ("stop", "end", "end"),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("temperature", None, 1.0),
        ("max_tokens", None, None),
        ("ignore_eos", np.True_, True),
        ("seed", -1, -1),
        ("logprobs", 0, 0),
    ],
)
def test_what_is_kept(field: str, given: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{field: given}), field)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("n", 0),
        ("n", True),
        ("n", 10**6),
        ("n", "1"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e39),
        ("temperature", False),
        ("temperature", "0.5"),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-46),
        ("presence_penalty", float("-inf")),
        ("frequency_penalty", 1j),
        ("logit_bias", {5: "x"}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", "abc"),
        ("allowed_token_ids", [1.0]),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ""),
        ("stop", b"end"),
        ("stop", ["a"] * (MAX_STOP_STRINGS + 1)),
        ("stop", "a" * (MAX_STOP_CHARACTERS + 1)),
        ("stop_token_ids", [True]),
        ("stop_token_ids", range(10**9)),
        ("ignore_eos", 1),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("seed", 1.0),
        ("seed", 2**64),
        ("logprobs", True),
        ("logprobs", 1.5),
    ],
)
def test_what_is_refused(field: str, given: Any) -> None:
    with pytest.raises(InvalidInputError, match=field):
        SamplingParams(**{field: given})


def test_what_float32_loses_takes_the_best_token() -> None:
    assert SamplingParams(temperature=1e-40).is_greedy
    assert replace(SamplingParams(top_p=1e-46), n=2).is_greedy
    assert not SamplingParams(temperature=1e-37, top_p=1e-37).is_greedy


def test_a_callers_list_may_change() -> None:
    allowed = [1, 2]
    params = SamplingParams(allowed_token_ids=allowed, logit_bias=(bias := {3: 1.0}))
    allowed.append(10**9)
    bias[10**9] = 0.0
    assert params.token_ids == [3, 1, 2]


def test_a_snapshot_is_out_of_reach() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, stop=["a"], max_tokens=4)
    kept = params.snapshot()
    assert kept == params
    params.logit_bias[10**6] = 1.0  # type: ignore[index]
    object.__setattr__(params, "max_tokens", -1)
    assert (kept.logit_bias, kept.max_tokens) == ({3: 1.0}, 4)
    with pytest.raises(InvalidInputError, match="max_tokens"):
        params.snapshot()


@pytest.mark.parametrize(("name", "most"), [("logprobs", 1024), ("stop_token_ids", [7] * 1024)])
def test_tables_have_an_end(name: str, most: Any) -> None:
    SamplingParams(**{name: most})
    with pytest.raises(InvalidInputError, match=name):
        SamplingParams(**{name: [*most, 7] if isinstance(most, list) else most + 1})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"n": 0}, {"n": 1}),
        ({"temperature": -0.1}, {"temperature": 0}),
        ({"temperature": math.nan}, {"temperature": 100.0}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"top_p": 1.1}, {"top_p": 1}),
        ({"top_k": -2}, {"top_k": -1}),
        ({"min_p": 1.5}, {"min_p": 1}),
        ({"repetition_penalty": 0}, {"repetition_penalty": 0.1}),
        ({"presence_penalty": math.inf}, {"presence_penalty": -2}),
        ({"allowed_token_ids": []}, {"allowed_token_ids": [0]}),
        ({"stop": ["a", ""]}, {"stop": "a"}),
        ({"max_tokens": 0}, {"max_tokens": None, "min_tokens": 99}),
        ({"min_tokens": 17}, {"min_tokens": 16}),
        ({"logprobs": -1}, {"logprobs": 0}),
    ],
)
def test_parameters_are_checked(wrong: dict[str, Any], right: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        SamplingParams(**wrong)
    SamplingParams(**right)
