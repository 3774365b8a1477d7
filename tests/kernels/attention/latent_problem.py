"""The check that every problem of latent attention must pass, with the budgets that rounding sets."""

import torch

from paged.bench.cards.cards import CARDS
from paged.bench.mla.problem import Problem, call_of
from paged.bench.problems.arguments import Arguments, on_cpu, without_how
from tests.kernels.attention import loops
from tests.tolerance import assert_close

LATENT_ATTENTION = CARDS["paged_mla_attention"]


def check(problem: Problem, device: torch.device) -> None:
    """Solve the problem and compare output and lse with the float64 reference."""
    arguments = call_of(problem, device)
    want, results = LATENT_ATTENTION.want(arguments), LATENT_ATTENTION.call(arguments)
    assert results["out"] is arguments["out"]
    is_exact = problem.dtype == torch.float32
    assert_close(results["out"], want["out"], rounded=None if is_exact else _with_rounding(arguments, problem))
    # Latents with float32 scales are rounded to the dtype of q after they are scaled.
    wide = 2e-3 if problem.form == "packed" else 1e-4
    assert_close(results["lse"], want["lse"], float32=1e-5 if is_exact else wide)


def _with_rounding(arguments: Arguments, problem: Problem) -> torch.Tensor:
    """The attention whose weights carry half a unit in the last place of the input type either way, as tensor cores
    take them; values carry it here, and as much again where their scaled codes are rounded."""
    cache, scale = arguments["kv_cache"], arguments.get("k_scale")
    values = loops.numbers(cache, scale)[..., : arguments["v_head_dim"]]
    size = 1.0 if problem.form == "packed" else 0.5
    signs = torch.where(torch.rand(values.shape) < 0.5, -size, size).double()
    perturbed = values * (1 + torch.finfo(problem.dtype).eps * signs)
    return loops.paged_mla_attention(**without_how(on_cpu(arguments)), values=perturbed)[0]
