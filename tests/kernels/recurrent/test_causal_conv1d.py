"""causal_conv1d against float64: the rows before a step, slots and rings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged import InvalidInputError, RecurrentState
from tests.kernels.recurrent.problem import Problem, Seq, check, run
from tests.kernels.recurrent.test_scan import MIXED, lengths_to_130
from tests.tolerance import DTYPES


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("width", "options", "dtype"),
    [
        *((4, {}, dtype) for dtype in DTYPES),
        (3, {"activation": None, "bias": None}, torch.float32),
        (2, {}, torch.float32),
    ],
)
def test_matches_reference(width: int, options: dict[str, None], dtype: torch.dtype, device: torch.device) -> None:
    """Scans shorter than the taps keep rows of before."""
    seqs = (*MIXED, Seq(2, start=63, ring=2, snapshot=64))
    problem = Problem.make(device, *seqs, max_append=1, dtype=dtype, width=width, value_heads=3, key_heads=1)
    name, arguments = problem.conv()
    check(name, arguments | options)


@pytest.mark.thorough
def test_every_length_from_1_to_130(backend: str, device: torch.device) -> None:
    seqs = [Seq(tokens, start=tokens % 7, ring=tokens % 4 - 1) for tokens in lengths_to_130(backend)]
    problem = Problem.make(device, *seqs, max_append=0, key_heads=1, value_heads=1)
    check(*problem.conv())


@pytest.mark.usefixtures("backend")
def test_strided_rows_and_a_layer_without_a_scan(device: torch.device) -> None:
    """x as a part of a wider projection, weights by tap as in models, `conv` as one layer of many."""
    problem = Problem.make(device, *MIXED, key_heads=1, value_heads=1)
    name, arguments = problem.conv()
    want = run(name, arguments)
    wide = torch.nn.functional.pad(problem.x, (8, 24), value=float("nan"))[:, 8:-24]
    conv = torch.stack([problem.state.conv] * 3, 1)[:, 1]
    by_tap = arguments["weight"].t().contiguous().t()
    got = run(name, arguments | {"x": wide, "weight": by_tap, "state": RecurrentState(conv)})
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.conv.nan_to_num(7.0), want.conv.nan_to_num(7.0))


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    problem = Problem.make(device, Seq(2, start=3, ring=3))
    name, arguments = problem.conv()
    run(name, arguments)
    conv = problem.state.conv
    for bad, message in (
        ({"weight": arguments["weight"][1:]}, r"weight: shape \[127, 4\], expected \[128, W\]"),
        ({"bias": arguments["bias"][1:]}, "bias: shape"),
        ({"activation": "gelu"}, "activation: 'gelu', expected 'silu' or None"),
        ({"state": replace(problem.state, conv=conv.half())}, "conv: dtype"),
        ({"state": replace(problem.state, conv=conv[:, :2])}, "conv: 2 rows a slot, expected at least 3"),
        ({"state": replace(problem.state, conv=conv[..., 1:])}, "conv: shape"),
        ({"x": arguments["x"].mT}, "x: last dimension|weight: shape"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            run(name, arguments | bad)
