"""The check that every problem of paged attention must pass, with the budgets that rounding sets."""

from dataclasses import replace
from typing import Any

import torch

from paged import paged_attention
from paged.bench.attention.problem import Problem, Solved, solve
from paged.kernels.attention import reference
from tests.tolerance import assert_close


def check(problem: Problem, device: torch.device, *, return_lse: bool = True, solved: Solved | None = None) -> Solved:
    """Solve the problem and compare output and lse with the float64 reference.

    solved: what it is compared with where the same tensors are to be given once more.
    """
    if solved is None:
        solved = solve(problem, device, return_lse=return_lse)
    else:
        out = torch.full_like(solved.out, torch.nan)
        longest = max((q_len for q_len, _ in problem.lengths), default=0)
        own = {"max_seqlen_q": longest, "deterministic": problem.deterministic, "return_lse": return_lse}
        given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in solved.arguments.items()}
        result = paged_attention(**given, **own, out=out)
        solved = replace(solved, out=out, lse=result[1] if return_lse else None)
    rounded = None if problem.dtype == torch.float32 else with_rounded_weights(solved.arguments)
    assert_close(solved.out, solved.expected_out, rounded=rounded)
    if solved.lse is not None:
        assert_close(solved.lse, solved.expected_lse, float32=1e-5 if problem.dtype == torch.float32 else 1e-4)
    return solved


def with_rounded_weights(arguments: dict[str, Any]) -> torch.Tensor:
    """The attention whose softmax weights carry the error of the input type, half a unit in the last place either way.

    Tensor cores take the weights in the type of q. An error of a weight is one of its value, so V carries it here, and
    where it is int8 times a scale, rounded to the type of q, as much again.
    """
    values = arguments["v_cache"].double()
    size = 1.0 if arguments["v_cache"].dtype == torch.int8 else 0.5
    signs = torch.where(torch.rand(values.shape) < 0.5, -size, size).double()
    perturbed = values * (1 + torch.finfo(arguments["q"].dtype).eps * signs)
    return reference.paged_attention(**{**arguments, "v_cache": perturbed})[0]
