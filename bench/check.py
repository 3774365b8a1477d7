"""Whether a result may have a speed: how far it may lie from what it should be."""

from __future__ import annotations

import torch

# Largest error against float64, relative to the value plus the root mean square of its row: 84 and 2.6 times the type's
# eps. It is wide enough for every rounding inside; the tests of the operations hold the tight budgets. Rounding to e4m3
# is off by 1 / 16 at the most.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 7e-2}


class WrongResultError(Exception):
    """An operation's result is not what it should be, so its speed means nothing."""


def error_shares(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Every element's error as a share of its budget, TOLERANCE of `dtype`, that of `got` when not given.

    0 where both are the same, also infinite or NaN; infinite where one of them is, and for whole numbers that differ.
    A row is the last dimension: in one attention output the first rows, over few keys, are far larger than the last.

    Raises:
        WrongResultError: the shapes differ.
    """
    if got.shape != want.shape:
        raise WrongResultError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    want, given = want.detach().to(got.device, torch.float64), got.detach().double()
    budget = torch.zeros_like(want)
    if got.is_floating_point():
        sizes = want.where(want.isfinite(), 0).abs()
        budget = TOLERANCE[dtype or got.dtype] * (sizes + sizes.square().mean(-1, keepdim=True).sqrt())
    is_same = (given == want) | (given.isnan() & want.isnan())
    return ((given - want).abs() / budget).nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(is_same, 0.0)


def compare(got: torch.Tensor, want: torch.Tensor, judged_as: torch.dtype | None = None, budgets: float = 1) -> None:
    """Raise WrongResultError unless all of `got` lies within so many budgets of `want`, see `error_shares`."""
    wrong = int((error_shares(got, want, judged_as) > budgets).sum())
    if wrong:
        error = (got.detach().double() - want.detach().to(got.device, torch.float64)).abs()
        raise WrongResultError(f"{wrong} of {want.numel()} elements off, the largest error is {error.max():.3g}")
