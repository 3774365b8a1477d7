"""Gated residual streams: the rule of their gates, in every implementation."""

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import gate_streams
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.kernels.layers import definition
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import DTYPES

CARD = CARDS["gate_streams"]
(EDGE,) = CARD.edges


def drawn(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    sizes = {"tokens": 5, "count": 3, "size": 24, "rank": 8}
    return CARD.draw(Draw(device, dtype), **sizes | options)


def _sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def test_the_definition_is_the_rule() -> None:
    """One token of two streams of two numbers and one gate, number by number."""
    arguments = drawn(torch.device("cpu"), tokens=1, count=2, size=2, rank=1)
    names = ("streams", "output", "gains", "norm_weight", "down", "up")
    streams, output, gains, weight, down, up = (arguments[name].double().tolist() for name in names)
    joined: list[list[float]] = []
    normed: list[float] = []
    for stream in range(2):
        row = [streams[0][stream][i] + gains[0][stream] * output[0][i] for i in range(2)]
        rounded = [float(torch.tensor(number, dtype=torch.float32)) for number in row]
        root = math.sqrt((rounded[0] ** 2 + rounded[1] ** 2) / 2 + 1e-6)
        joined.append(row)
        normed += [weight[2 * stream + i] * rounded[i] / root for i in range(2)]
    sums = [sum(w * n for w, n in zip(row, normed, strict=True)) / 2 for row in down]
    inner = sums[0] * _sigmoid(sums[0])
    gated = [_sigmoid(up[channel][0] * inner) * normed[channel] for channel in range(4)]
    expected = [[(gated[0] + gated[2]) / 2, (gated[1] + gated[3]) / 2], joined, [2 * _sigmoid(x) for x in sums[1:]]]
    for got, numbers in zip(definition.gate_streams(**arguments), expected, strict=True):
        torch.testing.assert_close(got[0], torch.tensor(numbers, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_implementation_agrees(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """At a first site, behind the last layer, and for more tokens than three launches take."""
    for arguments in (drawn(device, dtype), *EDGE.problems(Draw(device, dtype))):
        for result in CARD.check(arguments).values():
            assert result.first_wrong() is None


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = drawn(device)
    assert_refuses(
        gate_streams,
        arguments,
        ("streams", arguments["streams"].new_zeros(5, 9, 24), "streams: 9 streams, expected 1 to 8"),
        ("output", None, "output, gains: one is None, expected both or none"),
        ("gains", arguments["gains"][:, :2], r"gains: shape \[5, 2\], expected \[5, 3\]"),
        ("down", arguments["down"][:9], "down: 9 rows, expected 8 or 11 for rank 8 and 3 streams"),
        ("up", arguments["up"].half(), "up: dtype"),
    )


# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "gain of the first stream": ("stride_gains_token + stream,", "stride_gains_token,"),
    "weights of the first stream": ("norm_ptr + stream * SIZE + offs_d", "norm_ptr + offs_d"),
    "squares of a split": ("tl.sum(squares, 1) / SIZE", "tl.max(squares, 1) / SIZE"),
    "root of the first stream": ("products * roots[:, None]", "products * tl.max(roots, 0)"),
    "inner numbers without a mean": ("tl.where(is_part[:, None], products * roots[:, None], 0.0), 0) / COUNT",
                                     "tl.where(is_part[:, None], products * roots[:, None], 0.0), 0)"),
    "gains up to 1": ("2.0 * sigmoids", "sigmoids"),
    "gates of the first stream": ("up_ptr + channels[None, :]", "up_ptr + offs_c[None, :]"),
    "streams without a norm": ("joined * root[:, None] *", "joined *"),
    "sum of streams": ("(x / COUNT)", "x"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    module = importlib.import_module("paged.kernels.layers.gate_streams")  # the function's name hides it
    with planted((module,), (), tmp_path, *MUTATIONS[fault]):
        faulty = dataclasses.replace(CARD, function=vars(module)["gate_streams"])
        problems = [drawn(device), *EDGE.problems(Draw(device, torch.float32))]
        is_found = any(turns_red(exceeds_no_bound_twice, faulty, problem) for problem in problems)
    assert is_found == (fault != "no fault")
