"""Whether a result may have a speed: how far it may lie from what it should be."""

from __future__ import annotations

import torch

# Largest error against float64, relative to the value plus the root mean square of its row: 84 and 2.6 times the type's
# eps. It is wide enough for every rounding inside; the tests of the operations hold the tight budgets. Rounding to e4m3
# is off by 1 / 16 at the most.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 7e-2}


class WrongResultError(Exception):
    """An operation's result is not what it should be, so its speed means nothing."""


def compare(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise WrongResultError unless every element of `got` lies within TOLERANCE of `want`; whole numbers are equal.

    A row is the last dimension: in one attention output the first rows, over few keys, are far larger than the last.
    """
    if got.shape != want.shape:
        raise WrongResultError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    want = want.detach().to(got.device, torch.float64)
    budget = torch.zeros_like(want)
    if got.is_floating_point():
        budget = TOLERANCE[got.dtype] * (want.abs() + want.square().mean(-1, keepdim=True).sqrt())
    error = (got.detach().double() - want).abs()
    wrong = int((~(error <= budget)).sum())
    if wrong:
        raise WrongResultError(f"{wrong} of {want.numel()} elements off, the largest error is {error.max():.3g}")
