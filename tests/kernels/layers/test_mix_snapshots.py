"""Attention to snapshots of the residual stream: the rule of its weights, in every implementation."""

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import mix_snapshots
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.kernels.layers import definition
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import DTYPES

CARD = CARDS["mix_snapshots"]
(EDGE,) = CARD.edges


def drawn(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    sizes = {"tokens": 5, "snapshots": 2, "size": 24}
    return CARD.draw(Draw(device, dtype), **sizes | options)


def test_the_definition_is_the_rule() -> None:
    """One token of one snapshot and the stream, number by number."""
    arguments = drawn(torch.device("cpu"), tokens=1, snapshots=1, size=2)
    names = ("score_norm_weight", "score_weight", "norm_weight")
    score_norm, score, norm = (arguments[name].double().tolist() for name in names)
    snapshot, stream = (arguments["rows"][row, 0].double().tolist() for row in (0, -1))
    output = arguments["output"][0].double().tolist()
    sums = [stream[i] + output[i] for i in range(2)]
    rows = [snapshot, [float(torch.tensor(number, dtype=torch.float32)) for number in sums]]
    exponentials: list[float] = []
    for row in rows:
        root = math.sqrt((row[0] ** 2 + row[1] ** 2) / 2 + 1e-6)
        exponentials.append(math.exp(sum(score[i] * score_norm[i] * row[i] / root for i in range(2))))
    mixed = [(exponentials[0] * rows[0][i] + exponentials[1] * rows[1][i]) / sum(exponentials) for i in range(2)]
    root = math.sqrt((mixed[0] ** 2 + mixed[1] ** 2) / 2 + 1e-6)
    expected = [norm[i] * mixed[i] / root for i in range(2)]
    for got, numbers in zip(definition.mix_snapshots(**arguments), (expected, sums), strict=True):
        torch.testing.assert_close(got[0], torch.tensor(numbers, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_implementation_agrees(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Also for a stream alone, and rows of different sizes."""
    for arguments in (drawn(device, dtype), *EDGE.problems(Draw(device, dtype))):
        for result in CARD.check(arguments).values():
            assert result.first_wrong() is None


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = drawn(device)
    assert_refuses(
        mix_snapshots,
        arguments,
        ("rows", arguments["rows"].mT.contiguous().mT, "rows: last dimension has stride"),
        ("output", arguments["output"].half(), "output: dtype"),
        ("score_weight", arguments["score_weight"][:8], r"score_weight: shape \[8\], expected \[24\]"),
        ("num_snapshots", 4, "num_snapshots: 4"),
    )


# fault -> (text of the kernel, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "the stream is not written": ("tl.store(stream_ptrs, rounded, mask=mask)", ""),
    "scores of the sum's norm": ("/ SIZE + eps)\n    total", "/ SIZE + norm_eps)\n    total"),
    "scores without a norm": ("score = tl.sum(row * query, 0) / tl.sqrt(tl.sum(row * row, 0) / SIZE + eps)",
                              "score = tl.sum(row * query, 0)"),
    "a snapshot less": ("range(num_snapshots)", "range(num_snapshots - 1)"),
    "the sum does not shrink": ("mixed * shrink", "mixed"),
    "mean over padding": ("tl.sum(mixed * mixed, 0) / SIZE", "tl.sum(mixed * mixed, 0) / BLOCK_SIZE"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    module = importlib.import_module("paged.kernels.layers.mix_snapshots")  # the function's name hides it
    with planted((module,), (), tmp_path, *MUTATIONS[fault]):
        faulty = dataclasses.replace(CARD, function=vars(module)["mix_snapshots"])
        problems = [drawn(device), *EDGE.problems(Draw(device, torch.float32))]
        is_found = any(turns_red(exceeds_no_bound_twice, faulty, problem) for problem in problems)
    assert is_found == (fault != "no fault")
