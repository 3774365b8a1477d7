"""The check that every problem of latent attention must pass, with the budgets that rounding sets."""

import torch

from paged.bench.attention.problem import Solved
from paged.bench.mla.problem import Problem, solve
from paged.kernels.mla import reference
from tests.tolerance import assert_close


def check(problem: Problem, device: torch.device) -> None:
    """Solve the problem and compare output and lse with the float64 reference."""
    solved = solve(problem, device)
    assert solved.lse is not None
    is_exact = problem.dtype == torch.float32
    assert_close(solved.out, solved.expected_out, rounded=None if is_exact else _with_rounding(solved, problem))
    # Latents of the published form are rounded to the dtype of q after they are scaled.
    wide = 2e-3 if problem.form == "packed" else 1e-4
    assert_close(solved.lse, solved.expected_lse, float32=1e-5 if is_exact else wide)


def _with_rounding(solved: Solved, problem: Problem) -> torch.Tensor:
    """The attention whose weights carry half a unit in the last place of the input type either way, as tensor cores
    take them; values carry it here, and as much again where their scaled codes are rounded."""
    given = solved.arguments
    values = reference.numbers(given["kv_cache"], given.get("k_scale"))[..., : given["v_head_dim"]]
    size = 1.0 if problem.form == "packed" else 0.5
    signs = torch.where(torch.rand(values.shape) < 0.5, -size, size).double()
    perturbed = values * (1 + torch.finfo(problem.dtype).eps * signs)
    return reference.paged_mla_attention(**given, values=perturbed)[0]
