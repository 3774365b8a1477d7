"""The tanh of softcaps over float32, which is to keep scores, and so weights and log-sum-exps, within 1e-5."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.attention.online_softmax import _exact_tanh
from paged.kernels.common.compat import tl, triton

SOFTCAP = 50.0


@triton.jit
def _tanh_kernel(x_ptr, out_ptr, num_values, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < num_values, other=0.0)
    tl.store(out_ptr + offsets, _exact_tanh(x), mask=offsets < num_values)


def _tanh(x: NDArray[np.float32], device: torch.device) -> NDArray[np.float32]:
    given = torch.from_numpy(x).to(device)
    out = torch.full_like(given, torch.nan)
    _tanh_kernel[(triton.cdiv(len(x), 4096),)](given, out, len(x), BLOCK=4096)
    return out.cpu().numpy()


def _values() -> NDArray[np.float32]:
    """Both signs, every magnitude, and densely where the approximations cancel and where the result rounds to 1."""
    magnitudes = np.concatenate([np.geomspace(1e-30, 30.0, 20_000), np.linspace(0.0, 12.0, 20_000)])
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


def test_units_in_the_last_place(device: torch.device) -> None:
    x = _values()
    got, want = _tanh(x, device), np.tanh(x.astype(np.float64))
    assert (np.abs(got - want) <= 3 * np.spacing(np.abs(want).astype(np.float32))).all()


def test_special_values(device: torch.device) -> None:
    x = np.array([0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-40], np.float32)
    np.testing.assert_array_equal(_tanh(x, device)[:6], np.array([0.0, 1.0, -1.0, np.nan, 1.0, -1.0], np.float32))


def test_weights_where_exp2_is_approximate(device: torch.device) -> None:
    """A weight is off by as much as its score. Of NVIDIA's instructions ex2.approx is right to 2^-22.5 of its result
    and div.full to two units (PTX ISA): 1 - 2 / (exp(2 x) + 1) would leave the budget by them, with all else exact."""
    x = _values()
    exact = np.tanh(x.astype(np.float64))
    assert (SOFTCAP * np.abs(_tanh(x, device) - exact) < 1e-5).all()
    grown = np.exp(2 * x.astype(np.float64)) * (1 + 2**-22.5)
    quotient = 2 / (grown + 1)
    by_approximations = 1 - quotient * (1 - 2 * 2.0**-23)
    assert (SOFTCAP * np.abs(by_approximations - exact)).max() > 2e-5
