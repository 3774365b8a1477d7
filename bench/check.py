"""Check that a result is right before its speed counts: how far it may differ from the expected result."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Dtype -> how far two implementations may differ, relative to the value plus the root mean square of its row: 84 or
# 2.6 units of eps, half a unit of e4m3: room for the roundings inside both.
_AGREEMENT = {torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 0.07}


class WrongResultError(Exception):
    """An operation's result is wrong, so its speed means nothing."""


class Result(NamedTuple):
    """An operation's tensor and the expected one.

    bound: how far each element may be from the expected one; None if they must be equal. name: name of the tensor, for
    messages.
    """

    got: torch.Tensor
    want: torch.Tensor
    bound: torch.Tensor | None
    name: str = "result"

    def shares(self) -> torch.Tensor:
        """Return every element's error as a share of its bound, see `error_shares`."""
        return error_shares(self.got, self.want, self.bound)

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


def error_shares(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | None) -> torch.Tensor:
    """Return every element's error as a share of its bound.

    The share is 0 if both are equal, infinities and NaN included, and if the expected number is too large for the dtype
    of an infinite result. It is infinite if only one is not finite otherwise, or if they differ without a bound.

    Raises:
        WrongResultError: the shapes differ, or floats stand for whole numbers.
    """
    if got.shape != want.shape:
        raise WrongResultError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    if got.is_floating_point() and not want.is_floating_point():
        raise WrongResultError(f"dtype {got.dtype}, expected whole numbers")
    expected = want.detach().to(got.device)
    want, result = expected.double(), got.detach().double()
    if bound is None or not got.is_floating_point():
        bound = torch.zeros_like(want)
    bound = bound.to(got.device)
    is_same = (result == want) | (result.isnan() & want.isnan())
    if not got.is_floating_point() and not expected.is_floating_point():
        is_same = got == expected  # float64 rounds whole numbers beyond 2^53
    if got.is_floating_point():
        overflow = (want + want.sign() * bound).to(got.dtype).double()
        is_same |= result.isinf() & (result == overflow)
    shares = (result - want).abs() / bound
    return shares.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(is_same, 0.0)


def agreement(got: torch.Tensor, other: torch.Tensor, dtype: torch.dtype | None = None, factor: float = 1) -> Result:
    """Return a result beside another implementation's; rows are the last dimension, because they differ in size.

    dtype: what both round to inside; None for the dtype of `got`. factor: on the room for it.
    """
    sizes = other.detach().double().abs()
    sizes = sizes.where(sizes.isfinite(), 0)
    room = factor * _AGREEMENT[dtype or got.dtype]
    return Result(got, other, room * (sizes + sizes.square().mean(-1, keepdim=True).sqrt()))
