"""What sampling parameters take, what they make of it, and what they refuse."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paged import InvalidInputError, SamplingParams
from paged.executors.requests.sampling_params import MAX_COMPLETIONS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

# What is given, and what is kept where that is another value or type.
TAKEN: dict[str, list[Any]] = {
    "n": [(np.int8(3), 3), 1, MAX_COMPLETIONS],
    "temperature": [(np.float32(0.5), 0.5), (2, 2.0), (None, 1.0), 0.0, 100.0],
    "top_p": [(torch.tensor(0.5), 0.5), 1e-9, 1.0],
    "top_k": [(torch.tensor(5), 5), -1],
    "min_p": [1.0],
    "repetition_penalty": [0.1],
    "presence_penalty": [-2.0],
    "logit_bias": [({np.int64(5): np.float64(1.5)}, {5: 1.5})],
    "allowed_token_ids": [(range(3), (0, 1, 2)), ([0], (0,))],
    "stop": ["end", (["a", "b"], ("a", "b")), (None, ())],
    "stop_token_ids": [(np.array([4, 5]), (4, 5)), ({4}, (4,)), ([7] * 1024, (7,) * 1024)],
    "ignore_eos": [(np.True_, True)],
    "max_tokens": [None],
    "min_tokens": [16],
    "seed": [-1],
    "logprobs": [0, 1024],
}
REFUSED: dict[str, list[Any]] = {
    "n": [0, True, MAX_COMPLETIONS + 1, "1"],
    "temperature": [-0.1, math.nan, math.inf, 1e39, False, "0.5"],
    "top_p": [0, 1.0001],
    "top_k": [1.5, -2],
    "min_p": [-0.1, 1.5],
    "repetition_penalty": [0.0, 1e-46],
    "presence_penalty": [math.inf, -math.inf],
    "frequency_penalty": [1j],
    "logit_bias": [{5: "x"}, {"5": 1.0}, {5: math.nan}, [5]],
    "allowed_token_ids": [[], "abc", [1.0]],
    "stop": [5, [5], "", ["a", ""], b"end", ["a"] * (MAX_STOP_STRINGS + 1), "a" * (MAX_STOP_CHARACTERS + 1)],
    "stop_token_ids": [[True], [7] * 1025, range(10**9)],
    "ignore_eos": [1],
    "max_tokens": [0],
    "min_tokens": [17],
    "seed": [1.0, 2**64],
    "logprobs": [-1, 1025, True, 1.5],
}


@pytest.mark.parametrize("field", TAKEN)
def test_what_is_kept(field: str) -> None:
    for case in TAKEN[field]:
        given, kept = case if isinstance(case, tuple) else (case, case)
        found = getattr(SamplingParams(**{field: given}), field)
        assert found == kept
        assert type(found) is type(kept)


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_refused(field: str) -> None:
    for given in REFUSED[field]:
        with pytest.raises(InvalidInputError, match=field):
            SamplingParams(**{field: given})


def test_what_float32_loses_takes_the_best_token() -> None:
    assert SamplingParams(temperature=1e-40).is_greedy
    assert replace(SamplingParams(top_p=1e-46), n=2).is_greedy
    assert not SamplingParams(temperature=1e-37, top_p=1e-37).is_greedy
