"""rotary_embedding against float64, in place and over slices of a fused projection."""

from __future__ import annotations

import pytest
import torch

from paged import InvalidInputError, rotary_embedding
from paged.kernels.layers import reference
from tests.tolerance import assert_close, dtypes


def _cos_sin(rotary_dim: int, device: torch.device) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).to(device)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (5, 1, 80, 80), (17, 3, 128, 128), (3, 3, 96, 24), (2, 1, 256, 256)],
)
def test_rotates_slices_of_a_fused_projection_in_place(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    interleaved: bool,
    device: torch.device,
) -> None:
    cos_sin = _cos_sin(rotary_dim, device)
    positions = torch.tensor([0, 63, 7], device=device)
    qkv = torch.randn(3, num_q_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    before = qkv.clone()
    query, key, _ = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    returned = rotary_embedding(positions, query, key, cos_sin, interleaved=interleaved)
    assert returned[0] is query
    assert returned[1] is key
    rotated = num_q_heads + num_kv_heads
    assert_close(qkv[:, :rotated], reference.rotate(before[:, :rotated], positions, cos_sin, interleaved))
    assert torch.equal(qkv[:, rotated:], before[:, rotated:])
    assert torch.equal(qkv[..., rotary_dim:], before[..., rotary_dim:])


@pytest.mark.usefixtures("backend")
def test_query_alone_and_no_tokens(device: torch.device) -> None:
    cos_sin = _cos_sin(32, device)
    positions = torch.tensor([[3, 9], [5, 9]], device=device)[:, 0]
    query = torch.randn(2, 4, 32, device=device)
    expected = reference.rotate(query, positions, cos_sin, False)
    returned, none = rotary_embedding(positions, query, None, cos_sin)
    assert none is None
    assert_close(returned, expected)
    assert rotary_embedding(positions[:0], query[:0], query[:0], cos_sin)[0].shape == (0, 4, 32)


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    query, positions = torch.randn(3, 4, 32, device=device), torch.arange(3, device=device)
    rotary_embedding(positions, query, query[:, :1].clone(), _cos_sin(32, device))
    with pytest.raises(InvalidInputError, match="rotary_dim 64, expected an even number up to 32"):
        rotary_embedding(positions, query, None, _cos_sin(64, device))
    with pytest.raises(InvalidInputError, match="rotary_dim 31"):
        rotary_embedding(positions, query, None, _cos_sin(32, device)[:, :31])
    with pytest.raises(InvalidInputError, match=r"positions: shape \[2\], expected \[3\]"):
        rotary_embedding(positions[:2], query, None, _cos_sin(32, device))
    with pytest.raises(InvalidInputError, match=r"key: shape \[3, 4, 16\]"):
        rotary_embedding(positions, query, query[..., :16], _cos_sin(16, device))
    with pytest.raises(InvalidInputError, match="cos_sin_cache: dtype"):
        rotary_embedding(positions, query, None, _cos_sin(32, device).half())
