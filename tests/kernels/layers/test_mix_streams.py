"""Residual streams: the rule of their weights, in every implementation."""

import dataclasses
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import mix_streams
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.kernels.layers import definition
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.tolerance import DTYPES

CARD = CARDS["mix_streams"]
(EDGE,) = CARD.edges


def drawn(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    sizes = {"tokens": 5, "count": 4, "size": 24, "kind": "mixing"}
    return CARD.draw(Draw(device, dtype), **sizes | options)


def test_the_definition_is_the_rule() -> None:
    """One token of two streams of two numbers, number by number."""
    arguments = drawn(torch.device("cpu"), tokens=1, count=2, size=2, iterations=2)
    values = {name: arguments[name].double() for name in ("streams", "output", "joins", "fn", "base", "scale")}
    ((a0, a1), (b0, b1)), (o0, o1) = values["streams"][0].tolist(), values["output"][0].tolist()
    gain_a, gain_b, aa, ab, ba, bb = values["joins"][0].tolist()  # ab: share of old a in new b
    a = [gain_a * o0 + aa * a0 + ba * b0, gain_a * o1 + aa * a1 + ba * b1]
    b = [gain_b * o0 + ab * a0 + bb * b0, gain_b * o1 + ab * a1 + bb * b1]
    flat = [float(torch.tensor(number, dtype=torch.float32)) for number in (*a, *b)]
    root = math.sqrt(sum(number * number for number in flat) / 4 + 1e-6)
    factors = [values["scale"][place].item() for place in (0, 0, 1, 1, 2, 2, 2, 2)]
    logits: list[float] = []
    for row, base, factor in zip(values["fn"].tolist(), values["base"].tolist(), factors, strict=True):
        logits.append(factor * sum(w * number for w, number in zip(row, flat, strict=True)) / root + base)
    sigmoids = [1 / (1 + math.exp(-logit)) for logit in logits]
    inner = [(sigmoids[0] + 1e-6) * flat[i] + (sigmoids[1] + 1e-6) * flat[2 + i] for i in range(2)]
    inner_root = math.sqrt((inner[0] ** 2 + inner[1] ** 2) / 2 + 1e-6)
    shares: list[list[float]] = []
    for first, second in (logits[4:6], logits[6:8]):
        first_share = 1 / (1 + math.exp(second - first))
        shares.append([first_share + 1e-6, 1 - first_share + 1e-6])
    for is_row in (False, True, False):
        for line in range(2):
            places = [(line, 0), (line, 1)] if is_row else [(0, line), (1, line)]
            total = sum(shares[row][column] for row, column in places) + 1e-6
            for row, column in places:
                shares[row][column] /= total
    x, joined, joins = definition.mix_streams(**arguments)
    expected = [inner[i] / inner_root * arguments["norm_weight"][i].item() for i in range(2)]
    torch.testing.assert_close(x[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(joined[0].flatten(), torch.tensor([*a, *b], dtype=torch.float64))
    want = [2 * sigmoids[2], 2 * sigmoids[3], *shares[0], *shares[1]]
    torch.testing.assert_close(joins[0], torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_implementation_agrees(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """With streams that are one tensor, that were mixed and that were not, and for the head."""
    for arguments in (drawn(device, dtype), *EDGE.problems(Draw(device, dtype))):
        for result in CARD.check(arguments).values():
            assert result.first_wrong() is None


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = drawn(device)
    assert_refuses(
        mix_streams,
        arguments,
        ("streams", arguments["streams"].new_zeros(5, 9, 24), "streams: 9 streams, expected 1 to 8"),
        ("streams", arguments["streams"].new_zeros(5, 24, 4).mT, "streams: last dimension has stride 4, expected 1"),
        ("output", None, "output, joins: one is None, expected both or none"),
        ("output", arguments["output"].half(), "output: dtype"),
        ("joins", arguments["joins"][:, :5], "joins: 5 columns, expected 4 or 20 for 4 streams"),
        ("base", arguments["base"][:23], r"base: 23 weights, expected one of \[4, 8, 24\] for 4 streams"),
        ("num_iterations", 0, "num_iterations: 0, expected at least 1 with 24 weights"),
        ("weights", arguments["scale"].expand(5, 3), r"weights: shape \[5, 3\], expected \[5, 4\]"),
        ("fn", arguments["fn"].half(), "fn: dtype"),
        ("scale", arguments["scale"][:2], r"scale: shape \[2\], expected \[3\]"),
    )


# fault -> (text of the kernels, what the faulty copy has instead)
MUTATIONS = {
    "no fault": ("", ""),
    "shares of new streams in old ones": ("COUNT + old * COUNT + stream", "COUNT + stream * COUNT + old"),
    "squares of one stream": ("squares += tl.sum", "squares = tl.sum"),
    "one factor for all logits": ("tl.where(is_input, 0, 1)", "tl.where(is_input, 0, 0)"),
    "eps in gains that mix": ("NUM_ITERATIONS == 0", "NUM_ITERATIONS >= 0"),
    "rows first": ("shares / (tl.sum(shares, 0) + eps)[None, :]\n        for", "shares\n        for"),
    "one iteration less": ("range(NUM_ITERATIONS - 1)", "range(NUM_ITERATIONS - 2)"),
    "weights without eps": ("sigmoids, 0.0), 0) + eps", "sigmoids, 0.0), 0)"),
    "next weights without eps": ("offs_w, sigmoids + eps", "offs_w, sigmoids"),
    "weights of another token": ("weights_ptr + token * stride_weights_token", "weights_ptr"),
    "mean over padding": ("tl.sum(x * x, 0) / SIZE", "tl.sum(x * x, 0) / BLOCK_SIZE"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    module = importlib.import_module("paged.kernels.layers.mix_streams")  # the function's name hides it
    with planted((module,), (), tmp_path, *MUTATIONS[fault]):
        faulty = dataclasses.replace(CARD, function=vars(module)["mix_streams"])
        problems = [drawn(device, iterations=2), *EDGE.problems(Draw(device, torch.float32))]
        is_found = any(turns_red(exceeds_no_bound_twice, faulty, problem) for problem in problems)
    assert is_found == (fault != "no fault")
