"""silu_and_mul against float64, with every activation, on both backends."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, UnsupportedError, silu_and_mul
from paged.kernels.common.gated_activation import ACTIVATIONS
from paged.kernels.layers import reference
from tests.tolerance import assert_close, dtypes


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("shape", [(1, 2), (3, 128), (5, 2200), (2, 3, 96), (20, 18), (0, 16), (3, 0)])
def test_matches_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype) * 4
    assert_close(silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_other_activations(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, 96, device=device).to(dtype) * 4
    expected = reference.silu_and_mul(x, activation)
    assert_close(silu_and_mul(x, activation=activation), expected)
    assert activation == "silu" or not torch.allclose(expected, reference.silu_and_mul(x), rtol=0.01)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.usefixtures("backend")
def test_large_gates_saturate(device: torch.device) -> None:
    x = torch.tensor([[200.0, -200.0, 60.0, -60.0, 2.0, 3.0, 4.0, 5.0]], device=device)
    assert torch.allclose(silu_and_mul(x), torch.tensor([[400.0, 0.0, 240.0, 0.0]], device=device))


@pytest.mark.usefixtures("backend")
def test_strided_rows_and_out(device: torch.device) -> None:
    x = torch.randn(6, 128, device=device)[::2, 32:96]
    out = torch.full((3, 32), float("nan"), device=device)
    assert silu_and_mul(x, out=out) is out
    assert_close(out, reference.silu_and_mul(x))
    columns = torch.randn(64, 3, device=device).T
    assert_close(silu_and_mul(columns), reference.silu_and_mul(columns))


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    x = torch.randn(4, 16, device=device)
    silu_and_mul(x, out=torch.empty(4, 8, device=device))
    with pytest.raises(UnsupportedError, match="activation: 'relu', known are 'silu', 'gelu'"):
        silu_and_mul(x, activation="relu")
    with pytest.raises(InvalidInputError, match=r"x: shape \[4, 15\]"):
        silu_and_mul(x[:, :15])
    with pytest.raises(InvalidInputError, match=r"out: shape \[4, 16\], expected \[4, 8\]"):
        silu_and_mul(x, out=x)
    with pytest.raises(InvalidInputError, match="out: strides"):
        silu_and_mul(x, out=torch.empty(4, 16, device=device)[:, ::2])
