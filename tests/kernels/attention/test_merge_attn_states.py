"""merge_attn_states against float64, with empty sides and lengths far apart."""

from __future__ import annotations

import math

import pytest
import torch

from paged import InvalidInputError, merge_attn_states
from paged.kernels.attention import reference
from tests.tolerance import assert_close, dtypes

INF = float("inf")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("shape", [(1, 1, 32), (7, 3, 80), (33, 4, 128), (3, 2, 512), (0, 2, 64)])
def test_matches_reference(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    num_tokens, num_heads, _ = shape
    states = []
    for _ in range(2):
        states.append(torch.randn(shape, device=device).to(dtype))
        states.append(torch.randn(num_heads, num_tokens, device=device) * 5)
    out, lse = merge_attn_states(*states)
    expected = reference.merge_attn_states(*states)
    assert out.dtype == dtype
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


@pytest.mark.usefixtures("backend")
def test_empty_sides_add_nothing_even_when_they_hold_nan(device: torch.device) -> None:
    # Columns: neither, a, b and both empty; then sides far above and below what exp takes in float32.
    lse_a = torch.tensor([[0.5, -INF, 1.0, -INF, 5000.0, -5000.0]], device=device)
    lse_b = torch.tensor([[0.1, 2.0, -INF, -INF, 5001.0, -5000.5]], device=device)
    out_a, out_b = torch.randn(2, 6, 1, 48, device=device).unbind()
    out_a[[1, 3]] = out_b[[2, 3]] = float("nan")
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    expected = reference.merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert not out.isnan().any()
    assert torch.equal(out[3], torch.zeros_like(out[3]))
    assert lse[0, 3] == -INF
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


@pytest.mark.usefixtures("backend")
def test_strided_inputs(device: torch.device) -> None:
    out_a = torch.randn(5, 6, 40, device=device)[:, ::2, 4:36]
    out_b = torch.randn(3, 5, 32, device=device).transpose(0, 1)
    lse_a, lse_b = torch.randn(5, 3, device=device).T, torch.randn(6, 5, device=device)[::2]
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    expected = reference.merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    out, lse = torch.randn(4, 2, 32, device=device), torch.randn(2, 4, device=device)
    merge_attn_states(out, lse, out, lse)
    with pytest.raises(InvalidInputError, match=r"lse_a: shape \[4, 2\], expected \[2, 4\]"):
        merge_attn_states(out, lse.T, out, lse)
    with pytest.raises(InvalidInputError, match="out_b: dtype"):
        merge_attn_states(out, lse, out.half(), lse)
    with pytest.raises(InvalidInputError, match="lse_b: dtype"):
        merge_attn_states(out, lse, out, lse.half())


@pytest.mark.usefixtures("backend")
def test_an_lse_of_inf_is_an_empty_side(device: torch.device) -> None:
    """What other stacks say of an empty row."""
    out_a, out_b = torch.randn(2, 3, 1, 8, device=device)
    lse_a = torch.tensor([[math.inf, math.inf, 1.0]], device=device)
    lse_b = torch.tensor([[2.0, -math.inf, 1.0]], device=device)
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_b[0])
    assert bool((out[1] == 0).all())
    torch.testing.assert_close(out[2], (out_a[2] + out_b[2]) / 2)
    assert lse[0, :2].tolist() == [2.0, -math.inf]
