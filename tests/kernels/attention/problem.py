"""The check that every problem of paged attention must pass, with the budgets that rounding sets."""

import torch

from paged.bench.attention.problem import Problem, call_of
from paged.bench.cards.cards import CARDS
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.core.dtypes import kv_kind
from tests.tolerance import assert_close

ATTENTION = CARDS["paged_attention"]
Solved = tuple[Arguments, Tensors]
"""Arguments of a call, and the results that the float64 reference expects."""


def check(problem: Problem, device: torch.device, *, return_lse: bool = True, solved: Solved | None = None) -> Solved:
    """Compare output and lse with the float64 reference.

    solved: the problem's call and results, if the same tensors are to be given once more.
    """
    if solved is None:
        arguments = call_of(problem, device)
        solved = arguments, ATTENTION.want(arguments)
    arguments, want = solved
    out = torch.full_like(arguments["out"], torch.nan)
    results = ATTENTION.call({**arguments, "out": out, "return_lse": return_lse})
    assert results["out"] is out
    rounded = None if problem.dtype == torch.float32 else with_rounded_weights(arguments)
    assert_close(out, want["out"], rounded=rounded)
    if return_lse:
        # 16-bit inputs take an approximate tanh.
        is_approximate = problem.softcap > 0 and problem.dtype != torch.float32
        assert_close(results["lse"], want["lse"], float32=1e-4 if is_approximate else 1e-5)
    return solved


def with_rounded_weights(arguments: Arguments) -> torch.Tensor:
    """The attention whose softmax weights carry the error of the input type, half a unit in the last place either way.

    Tensor cores take the weights in the type of q. An error of a weight is one of its value, so V carries it here, and
    where it is int8 times a scale, rounded to the type of q, as much again.
    """
    kind, v_scale = kv_kind(arguments["v_cache"].dtype), arguments.get("v_scale")
    values = kind.decode(arguments["v_cache"], v_scale, torch.float64)
    size = 0.5
    if kind.has_scales:
        size, v_scale = 1.0, None
    perturbed = with_weight_errors(values, arguments["q"].dtype, size)
    if arguments.get("v_table_scale") is not None:
        v_scale = arguments["v_table_scale"]
    return ATTENTION.want({**arguments, "v_cache": perturbed, "v_scale": v_scale, "v_table_scale": None})["out"]


def with_weight_errors(values: torch.Tensor, dtype: torch.dtype, size: float = 0.5) -> torch.Tensor:
    """Float64 values, each off by `size` units in the last place of a dtype either way."""
    signs = torch.where(torch.rand_like(values) < 0.5, -size, size).double()
    return values * (1 + torch.finfo(dtype).eps * signs)
