"""How close is close: budgets derived from the error of rounding itself, not constants chosen until a test passed.

Every numeric comparison of the tests goes through this file, which notes its error as a share of its budget. `headroom`
tells which tests are near to failing.
"""

from collections.abc import Sequence

import torch

from tests.float64 import to_float8
from tests.headroom import note

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Numbers = torch.Tensor | float | Sequence[float]


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, rounded: torch.Tensor | None = None, float32: float = 1e-5
) -> None:
    """Assert that `actual` is `expected` (float64) up to what its dtype allows.

    float32: |actual - expected| <= float32 * max(1, |expected|, the root mean square of its row, the last dimension),
    as a small sum may be of large terms. 16-bit types: one unit in the last place of the result (eps * |expected|) plus
    a hundredth of eps of the largest value for float32 accumulation order; where intermediates are rounded to 16 bits,
    `rounded` is the same computation with those roundings, and four times its error is added. 8-bit floats: a rounding
    of a value that is within the budget of float32.
    """
    wide = expected.detach().cpu().double()
    is_float8 = actual.dtype in _FLOAT8
    rounding: torch.Tensor | float = 0.0
    if actual.dtype == torch.float32 or is_float8:
        sizes = wide.where(wide.isfinite(), 0.0)
        if wide.dim() > 0:
            sizes = sizes.square().mean(-1, keepdim=True).sqrt().maximum(sizes.abs())
        budget = float32 * sizes.abs().clamp(min=1.0)
    else:
        eps = torch.finfo(actual.dtype).eps
        largest = wide[wide.isfinite()].abs().max() if wide.isfinite().any() else torch.tensor(0.0)
        rounding = 0.5 * eps * wide.abs()
        budget = rounding + 0.01 * eps * largest
    if rounded is not None:
        budget = budget + 4 * (rounded.detach().cpu().double() - wide).abs().max()
    if is_float8:
        _assert_float8(actual, wide, budget)
    else:
        assert_within(actual, wide, budget, rounding=rounding)


def assert_within(
    actual: Numbers, expected: Numbers, budget: Numbers, *, rounding: Numbers = 0.0, is_exact: bool = False
) -> None:
    """Assert that every element is off by at most `budget` beyond `rounding`; infinities and NaN must be the same.

    rounding: what the last rounding of a right result may take. It does not count for the share of the budget that is
    noted. is_exact: the budget is exact by definition, such as half of the distance of two codes, so that no room is
    needed and no share is noted.
    """
    got, want, budget, rounding = (_wide(numbers) for numbers in (actual, expected, budget, rounding))
    assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
    error = (got - want).abs()
    is_same = (got == want) | (got.isnan() & want.isnan())
    shares = (error - rounding).clamp(min=0.0) / budget
    shares = shares.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(is_same | (error <= rounding), 0.0)
    share = float(shares.max()) if shares.numel() else 0.0
    if share <= 1 and not is_exact:
        note(share)
    if share > 1:
        wrong = shares > 1
        index = tuple(wrong.nonzero()[0].tolist())
        allowed = (budget + rounding).expand(shares.shape)[index]
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements off; first at {index}: {got[index]} for {want[index]}, "
            f"budget {allowed:.2e}; largest error {error.nan_to_num(torch.inf).max():.2e}"
        )


def assert_rounded_alike(
    actual: torch.Tensor, expected: torch.Tensor, unrounded: torch.Tensor, part: float = 0.5
) -> None:
    """Assert that two computations that round numbers to codes on the way give the same.

    A number near the middle of two codes may fall on the other one, which moves the results by up to a fifth of what
    all rounding does; another rounding moves them by 1.4 of that. So errors are judged together, by their norm.

    unrounded: the results without that rounding. part: of its effect that is allowed.
    """
    effect = (unrounded.double() - expected).norm()
    assert_within((actual.double() - expected).norm(), 0.0, 1e-4 * expected.norm() + part * effect)


def assert_logprobs(actual: Numbers, expected: Numbers) -> None:
    """Assert that two forwards gave a token the same log probability.

    The bundled checkpoint's logits reach 23: a forward in float32 is up to 3e-5 from float64.
    """
    assert_within(actual, expected, 2e-4)


def _wide(numbers: Numbers) -> torch.Tensor:
    return torch.as_tensor(numbers).detach().cpu().double()


def _assert_float8(actual: torch.Tensor, expected: torch.Tensor, budget: torch.Tensor) -> None:
    """Notes a power of two for the share, as codes do not tell how much of the budget they need."""
    got = actual.detach().cpu().double()
    assert got.shape == expected.shape, f"shape {list(got.shape)}, expected {list(expected.shape)}"
    for share in (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0):
        low, high = (to_float8(expected + side * share * budget, actual.dtype).double() for side in (-1, 1))
        wrong = ~((low <= got) & (got <= high)) & ~(got.isnan() & expected.isnan())
        if not wrong.any():
            note(share)
            return
    index = tuple(wrong.nonzero()[0].tolist())
    raise AssertionError(f"{int(wrong.sum())} codes off; first at {index}: {got[index]} for {expected[index]}")
