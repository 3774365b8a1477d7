"""Queries of bfloat16 over 8-bit float caches, which the kernel turns into float16: no bit of them is lost."""

from dataclasses import replace

import pytest
import torch

from paged.bench.attention.problem import Problem, call_of
from paged.bench.problems.arguments import Arguments
from tests.kernels.attention.problem import ATTENTION, with_rounded_weights
from tests.tolerance import assert_close

pytestmark = pytest.mark.parametrize("backend", ["triton", "torch"], indirect=True)
E4M3 = Problem("", ((1, 40), (5, 24)), dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
E5M2 = replace(E4M3, cache_dtype=torch.float8_e5m2)


def _check(arguments: Arguments, num_rows: int = 6) -> None:
    """As of any cache of these values: the log-sum-exp has the error of float32, which is all that sums it up."""
    got, want = ATTENTION.call(arguments), ATTENTION.want(arguments)
    assert_close(got["lse"][:, :num_rows], want["lse"][:, :num_rows])
    rounded = with_rounded_weights(arguments)[:num_rows]
    assert_close(got["out"][:num_rows], want["out"][:num_rows], rounded=rounded)


@pytest.mark.parametrize("problem", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-30, 1.0, 7.0])
def test_scores_have_the_error_of_float32(problem: Problem, factor: float, backend: str, device: torch.device) -> None:
    arguments = call_of(problem, device)
    arguments["q"] *= factor
    _check(arguments)


@pytest.mark.parametrize("exponent", [-120, -112, -111, -110, -20, 20, 120])
def test_the_magnitude_of_queries_changes_no_bit(exponent: int, backend: str, device: torch.device) -> None:
    """Queries times a power of two, from bfloat16's smallest numbers to its largest, and scales divided by it."""
    arguments = call_of(E4M3, device)
    q = torch.randint(-7, 8, arguments["q"].shape, device=device).bfloat16()
    results = []
    for power in (0, exponent):
        arguments |= {"q": q * 2.0**power, "softmax_scale": 0.1 * 2.0 ** (-power // 2), "out": None}
        arguments["k_scale"] = torch.tensor([2.0 ** -(power // 2)], device=device)
        results.append(ATTENTION.call(arguments))
    for name in ("out", "lse"):
        assert torch.equal(results[0][name], results[1][name])


def test_rows_of_a_tile_do_not_depend_on_each_other(backend: str, device: torch.device) -> None:
    """A row of zeros and one of large numbers, beside infinity and NaN in rows of the same sequence."""
    arguments = call_of(E4M3, device)
    q = arguments["q"]
    q[2] = 0.0
    q[3] *= 1e4
    q[4, 0, 5] = torch.inf
    q[5, 0, 7] = torch.nan
    _check(arguments, num_rows=4)
    assert bool(ATTENTION.call(arguments)["out"][4:, 0].isnan().all())
