"""rms_norm, fused_add_rms_norm, rotary_embedding and silu_and_mul against float64, on all backends."""

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch

from paged import UnsupportedError, fused_add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.kernels.layers import definition
from paged.kernels.layers.activation import ACTIVATIONS
from tests.kernels.faulty import exceeds_no_bound_twice, planted, turns_red
from tests.kernels.refusals import assert_refuses
from tests.pairwise import pairwise
from tests.tolerance import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (5, 100), (2, 3, 48), (0, 16)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """With weights of the rows' type, and with more exact ones; the fused addition changes both in place."""
    x, residual = (torch.randn(shape, device=device).to(dtype) * 3 for _ in range(2))
    for weight in (torch.randn(shape[-1], device=device).to(dtype), 1 + torch.randn(shape[-1], device=device) / 64):
        expected = definition.rms_norm(x, weight, 1e-5)
        assert_close(rms_norm(x, weight, 1e-5), expected)
        both, total = (x.clone(), residual.clone()), residual + x
        normed, summed = fused_add_rms_norm(*both, weight, 1e-6)
        assert (normed is both[0], summed is both[1]) == (True, True)
        assert torch.equal(summed, total)
        assert_close(normed, definition.rms_norm(total, weight, 1e-6))
    rounded = definition.rms_norm(x, weight.to(dtype), 1e-5)
    assert dtype == torch.float32 or x.numel() < 100 or not torch.equal(expected, rounded)


def _cos_sin(rotary_dim: int, device: torch.device) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).to(device)


# num_q_heads, num_kv_heads, head_dim, rotary_dim
@pairwise(
    sizes=[(4, 2, 64, 64), (5, 1, 80, 80), (17, 3, 128, 128), (3, 3, 96, 24), (2, 1, 256, 256)],
    dtype=DTYPES,
    interleaved=[False, True],
)
def test_rotates_slices_of_a_fused_projection_in_place(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, interleaved: bool, device: torch.device
) -> None:
    num_q_heads, num_kv_heads, head_dim, rotary_dim = sizes
    cos_sin, positions = _cos_sin(rotary_dim, device), torch.tensor([0, 63, 7], device=device)
    qkv = torch.randn(3, num_q_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    before, rotated = qkv.clone(), num_q_heads + num_kv_heads
    query, key, _ = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], 1)
    returned = rotary_embedding(positions, query, key, cos_sin, interleaved=interleaved)
    assert (returned[0] is query, returned[1] is key) == (True, True)
    assert_close(qkv[:, :rotated], definition.rotate(before[:, :rotated], positions, cos_sin, interleaved=interleaved))
    assert torch.equal(qkv[:, rotated:], before[:, rotated:])
    assert torch.equal(qkv[..., rotary_dim:], before[..., rotary_dim:])


def test_rotates_queries_alone_and_no_tokens(device: torch.device) -> None:
    cos_sin, positions = _cos_sin(32, device), torch.tensor([[3, 9], [5, 9]], device=device)[:, 0]
    query = torch.randn(2, 4, 32, device=device)
    expected = definition.rotate(query, positions, cos_sin)
    returned, none = rotary_embedding(positions, query, None, cos_sin)
    assert none is None
    assert_close(returned, expected)
    assert rotary_embedding(positions[:0], query[:0], query[:0], cos_sin)[0].shape == (0, 4, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 128), (5, 2200), (2, 3, 96), (20, 18), (0, 16), (3, 0)])
def test_silu(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype) * 4
    assert_close(silu_and_mul(x), definition.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_other_activations(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, 96, device=device).to(dtype) * 4
    x[0, ::48] = 12  # beyond every limit
    expected = definition.silu_and_mul(x, activation)
    assert_close(silu_and_mul(x, activation=activation), expected)
    assert activation == "silu" or not torch.allclose(expected, definition.silu_and_mul(x), rtol=0.01)


# Text of the activations, and what a faulty copy has instead.
FAULTS = {
    "no fault": ("", ""),
    "tanh cancels near 0": ("size < 0.5", "size < 0.0"),
    "up beyond its limit": ("(25.0 * _tanh(up * 0.04))", "up"),
    "gate beyond its limit": ("gate > 10.0", "gate > 11.0"),
    "up below its limit": ("up < -10.0", "up < -11.0"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_checks_of_activations_see_the_fault(fault: str, backend: str, tmp_path: Path, device: torch.device) -> None:
    """As drawn for `paged verify`."""
    card = CARDS["silu_and_mul"]
    (edge,) = card.edges
    # Names of functions hide these modules.
    modules = tuple(importlib.import_module(f"paged.kernels.layers.{name}") for name in ("activation", "silu_and_mul"))
    with planted(modules, (), tmp_path, *FAULTS[fault]):
        faulty = dataclasses.replace(card, function=vars(modules[1])["silu_and_mul"])
        problems = list(edge.problems(Draw(device, torch.float32)))
        assert any(turns_red(exceeds_no_bound_twice, faulty, problem) for problem in problems) == (fault != "no fault")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_saturate(device: torch.device) -> None:
    x = torch.tensor([[200.0, -200.0, 60.0, -60.0, 2.0, 3.0, 4.0, 5.0]], device=device)
    assert_close(silu_and_mul(x), torch.tensor([[400.0, 0.0, 240.0, 0.0]]).double())
    x[:, :2] = float("nan")
    x[:, 2:4] *= torch.inf
    for activation in ("situ", "silu_10"):
        assert_close(silu_and_mul(x, activation=activation), definition.silu_and_mul(x, activation))


def test_strided_rows_and_out(device: torch.device) -> None:
    x, weight = torch.randn(6, 128, device=device)[::2, 32:96], torch.randn(64, device=device)
    out, gated = (torch.full((3, size), float("nan"), device=device) for size in (64, 32))
    assert rms_norm(x, weight, 1e-6, out=out) is out
    assert_close(out, definition.rms_norm(x, weight, 1e-6))
    assert silu_and_mul(x, out=gated) is gated
    assert_close(gated, definition.silu_and_mul(x))
    columns = torch.randn(64, 3, device=device).T
    assert_close(silu_and_mul(columns), definition.silu_and_mul(columns))


def test_reject_what_does_not_fit(device: torch.device) -> None:
    x, weight = torch.randn(4, 16, device=device), torch.ones(16, device=device)
    wrong_weight = "weight", weight[:8], r"weight: shape \[8\], expected \[16\]"
    assert_refuses(rms_norm, {"x": x, "weight": weight}, wrong_weight, ("out", x.half(), "out: dtype"))
    sound = {"x": x.clone(), "residual": x.clone(), "weight": weight}
    assert_refuses(fused_add_rms_norm, sound, ("residual", x[:2], "residual: shape"))
    query, positions, cos_sin = (
        torch.randn(3, 4, 32, device=device),
        torch.arange(3, device=device),
        _cos_sin(32, device),
    )
    assert_refuses(
        rotary_embedding,
        {"positions": positions, "query": query, "key": query[:, :1].clone(), "cos_sin_cache": cos_sin},
        ("cos_sin_cache", _cos_sin(64, device), "rotary_dim 64, expected an even number up to 32"),
        ("cos_sin_cache", cos_sin[:, :31], "rotary_dim 31"),
        ("cos_sin_cache", cos_sin.half(), "cos_sin_cache: dtype"),
        ("positions", positions[:2], r"positions: shape \[2\], expected \[3\]"),
        ("key", query[..., :16], r"key: shape \[3, 4, 16\]"),
    )
    with pytest.raises(UnsupportedError, match="activation: 'relu', known are 'silu', 'gelu'"):
        silu_and_mul(x, activation="relu")
    assert_refuses(
        silu_and_mul,
        {"x": x, "out": torch.empty(4, 8, device=device)},
        ("x", x[:, :15], r"x: shape \[4, 15\]"),
        ("out", x, r"out: shape \[4, 16\], expected \[4, 8\]"),
        ("out", torch.empty(4, 16, device=device)[:, ::2], "out: strides"),
    )
