"""Check that a result is right before its speed counts: how far it may differ from the expected one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Largest error against float64, relative to the value plus the root mean square of its row: 84 and 2.6 times the
# dtype's eps. It allows for all internal rounding; the operations' own tests have tight budgets. Rounding to e4m3 has
# an error of at most 1 / 16, to e5m2 of 1 / 8.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2.5e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 7e-2,
    torch.float8_e5m2: 1.4e-1,
}


class WrongResultError(Exception):
    """An operation's result is wrong, so its speed means nothing."""


class Result(NamedTuple):
    """An operation's tensor and the reference's.

    judged_as: dtype whose error budget counts; None for that of `got`. budgets: factor on this budget. name: of the
    tensor, in messages.
    """

    got: torch.Tensor
    want: torch.Tensor
    judged_as: torch.dtype | None = None
    budgets: float = 1
    name: str = "result"

    def shares(self) -> torch.Tensor:
        """Return every element's error as a fraction of what is allowed, see `error_shares`."""
        return error_shares(self.got, self.want, self.judged_as) / self.budgets

    def first_wrong(self) -> tuple[int, ...] | None:
        """Return the index of the first element that is wrong; None if there is none."""
        wrong = (self.shares() > 1).nonzero()
        if not len(wrong):
            return None
        return tuple(wrong[0].tolist())

    def check(self) -> None:
        """Raise WrongResultError unless every element is within its budget."""
        wrong = int((self.shares() > 1).sum())
        if wrong:
            error = (self.got.detach().double() - self.want.detach().to(self.got.device, torch.float64)).abs()
            raise WrongResultError(
                f"{wrong} of {self.want.numel()} elements are wrong, the largest error is {error.max():.3g}"
            )

    def describe(self, index: tuple[int, ...]) -> str:
        """Return an element beside the expected one: "out[3, 1, 0]: 0.31, expected 0.27, 90 times its budget"."""
        got, want = self.got[index].item(), self.want[index].item()
        place = ", ".join(map(str, index))
        share = float(self.shares()[index])
        text = f"{self.name}[{place}]: {got:.6g}, expected {want:.6g}"
        if share == math.inf:
            return text
        return f"{text}, {share:.3g} times its budget"


def error_shares(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return every element's error as a fraction of its budget: TOLERANCE of `dtype`, by default the dtype of `got`.

    The fraction is 0 if both are equal, infinities and NaN included, and infinite if only one is not finite or if
    integers differ. A row is the last dimension: in one attention output the first rows, over few keys, are far larger
    than the last.

    Raises:
        WrongResultError: the shapes differ, or the dtype has no budget.
    """
    if got.shape != want.shape:
        raise WrongResultError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    want, result = want.detach().to(got.device, torch.float64), got.detach().double()
    budget = torch.zeros_like(want)
    if got.is_floating_point():
        judged_as = dtype or got.dtype
        if judged_as not in TOLERANCE:
            raise WrongResultError(f"dtype {judged_as}, expected one of {', '.join(map(str, TOLERANCE))}")
        sizes = want.where(want.isfinite(), 0).abs()
        budget = TOLERANCE[judged_as] * (sizes + sizes.square().mean(-1, keepdim=True).sqrt())
    is_same = (result == want) | (result.isnan() & want.isnan())
    return ((result - want).abs() / budget).nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(is_same, 0.0)
