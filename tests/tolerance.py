"""How close is close: budgets derived from the error of rounding itself, not constants chosen until a test passed."""

import torch

from paged.kernels.common.reference import to_float8

# bfloat16 runs on a GPU alone: Triton's interpreter holds it as raw 16-bit integers, and only part of its arithmetic
# converts them.
GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CPU_DTYPES = (torch.float32, torch.float16)


def dtypes() -> tuple[torch.dtype, ...]:
    """The input dtypes to test on this machine."""
    return GPU_DTYPES if torch.cuda.is_available() else CPU_DTYPES


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, rounded: torch.Tensor | None = None, float32: float = 1e-5
) -> None:
    """Assert that `actual` is `expected` (float64) up to what its dtype allows.

    float32: |actual - expected| <= float32 * max(1, |expected|). 16-bit types: one unit in the last place of the result
    (eps * |expected|) plus a hundredth of eps of the largest value for float32 accumulation order; where intermediates
    are rounded to 16 bits, `rounded` is the same computation with those roundings, and twice its error is added.
    8-bit floats: a rounding of a value that is within the budget of float32.
    """
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
    if actual.dtype in (torch.float32, *_FLOAT8):
        budget = float32 * want.abs().clamp(min=1.0)
    else:
        eps = torch.finfo(actual.dtype).eps
        largest = want[want.isfinite()].abs().max() if want.isfinite().any() else torch.tensor(0.0)
        budget = eps * want.abs() + 0.01 * eps * largest
    if rounded is not None:
        budget = budget + 2 * (rounded.detach().cpu().double() - want).abs().max()
    if actual.dtype in _FLOAT8:
        low, high = (to_float8(want + side * budget, actual.dtype).double() for side in (-1, 1))
        is_close = (low <= got) & (got <= high)
    else:
        is_close = (got - want).abs() <= budget
    wrong = ~is_close & ~(got == want) & ~(got.isnan() & want.isnan())
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements off; first at {index}: {got[index]} for {want[index]}, "
            f"budget {budget[index]:.2e}; largest error {(got - want).abs().nan_to_num(float('inf')).max():.2e}"
        )
