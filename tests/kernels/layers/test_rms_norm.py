"""rms_norm and fused_add_rms_norm against float64, on both backends."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, fused_add_rms_norm, rms_norm
from paged.kernels.layers import reference
from tests.tolerance import assert_close, dtypes


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (5, 100), (2, 3, 48), (0, 16)])
def test_matches_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype) * 3
    weight = torch.randn(shape[-1], device=device).to(dtype)
    assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.usefixtures("backend")
def test_strided_rows_and_out(device: torch.device) -> None:
    x = torch.randn(6, 128, device=device)[::2, 32:96]
    weight = torch.randn(64, device=device)
    out = torch.full((3, 64), float("nan"), device=device)
    assert rms_norm(x, weight, 1e-6, out=out) is out
    assert_close(out, reference.rms_norm(x, weight, 1e-6))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
def test_weights_may_be_more_exact_than_rows(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (torch.randn(4, 80, device=device).to(dtype) for _ in range(2))
    weight = 1 + torch.randn(80, device=device) / 64
    expected = reference.rms_norm(x, weight, 1e-6)
    assert_close(rms_norm(x, weight, 1e-6), expected)
    assert dtype == torch.float32 or not torch.equal(expected, reference.rms_norm(x, weight.to(dtype), 1e-6))
    total = residual + x
    assert_close(fused_add_rms_norm(x, residual, weight, 1e-6)[0], reference.rms_norm(total, weight, 1e-6))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
def test_fused_add_changes_both_in_place(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = (torch.randn(4, 80, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(80, device=device).to(dtype)
    total = residual + x
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-6)
    assert normed is x
    assert summed is residual
    assert torch.equal(residual, total)
    assert_close(x, reference.rms_norm(total, weight, 1e-6))


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    x = torch.randn(4, 16, device=device)
    with pytest.raises(InvalidInputError, match=r"weight: shape \[8\], expected \[16\]"):
        rms_norm(x, torch.ones(8, device=device))
    with pytest.raises(InvalidInputError, match="out: dtype"):
        rms_norm(x, torch.ones(16, device=device), out=torch.empty(4, 16, device=device, dtype=torch.float16))
    with pytest.raises(InvalidInputError, match="residual: shape"):
        fused_add_rms_norm(x, x[:2], torch.ones(16, device=device))
