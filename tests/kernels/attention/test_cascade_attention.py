"""cascade_attention is paged_attention over a table whose rows begin alike; merge_attn_states, by which it is, against
float64, with empty sides and lengths far apart."""

from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch

from paged import cascade_attention, merge_attn_states
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention import definition
from tests.kernels.refusals import assert_refuses
from tests.tolerance import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("backend")


def _shared(problem: Problem, prefix: int, device: torch.device) -> dict[str, Any]:
    """The problem's tensors with the first sequence's first `prefix` keys in all of them."""
    tensors = vars(make(problem, device))
    num_blocks = prefix // problem.block_size
    tensors["block_table"][:, :num_blocks] = tensors["block_table"][0, :num_blocks]
    return tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [0, 16, 64])
def test_matches_reference(prefix: int, dtype: torch.dtype, device: torch.device) -> None:
    problem = Problem("", ((1, 65), (5, 90), (20, 90)), v_head_dim=24, dtype=dtype, padding_rows=3)
    scale = torch.tensor([0.7, 1.3], device=device)
    given = {**_shared(problem, prefix, device), "sinks": torch.randn(4, device=device), "softcap": 8.0}
    given |= {"k_scale": scale, "v_scale": scale}
    out, lse = cascade_attention(**given, shared_prefix_len=prefix, max_seqlen_q=20, return_lse=True)
    cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    want, want_lse = definition.paged_attention(**cpu)
    # Both parts are rounded to the type before they are merged, as their softmax weights are.
    rounded = None if dtype == torch.float32 else want * (1 + 2 * torch.finfo(dtype).eps)
    assert_close(out, want, rounded=rounded)
    assert_close(lse, want_lse, float32=1e-5 if dtype == torch.float32 else 1e-4)


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    tensors = _shared(Problem("", ((1, 50), (3, 40))), 32, device)
    wrong = [("shared_prefix_len", prefix, "shared_prefix_len") for prefix in (-16, 31, 80)]
    sound = {**tensors, "shared_prefix_len": 32, "max_seqlen_q": 3}
    assert_refuses(cascade_attention, sound, *wrong, ("block_table", tensors["seq_lens"], "block_table"))


def test_refuses_sequences_without_the_prefix(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("ids on a GPU are trusted")
    tensors = make(Problem("", ((1, 30), (2, 20)), block_size=8), device)
    tensors.block_table[:, 0] = 1
    assert_refuses(
        partial(cascade_attention, **{name: each.nan_to_num(0.5) for name, each in vars(tensors).items()}),
        {"max_seqlen_q": 2, "shared_prefix_len": 8},
        ("shared_prefix_len", 24, r"shared_prefix_len: 24, expected at most 18, .* sequence 1"),
        ("shared_prefix_len", 16, r"block_table\[1, 1\]: "),
    )


def _merge(*states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = merge_attn_states(*states)
    assert out.dtype == states[0].dtype
    for got, expected in zip((out, lse), definition.merge_attn_states(*(state.cpu() for state in states)), strict=True):
        assert_close(got, expected)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 32), (7, 3, 80), (33, 4, 128), (3, 2, 512), (0, 2, 64)])
def test_merge_matches_reference(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    out_a, out_b = torch.randn(2, *shape, device=device).to(dtype)
    lse_a, lse_b = torch.randn(2, shape[1], shape[0], device=device) * 5
    _merge(out_a, lse_a, out_b, lse_b)


def test_empty_sides_add_nothing_even_when_they_hold_nan(device: torch.device) -> None:
    # Columns: neither, a, b and both empty; sides far above and below what exp takes in float32; inf, which other
    # stacks say of an empty row, in a and in both.
    lse_a = torch.tensor([[0.5, -inf, 1.0, -inf, 5000.0, -5000.0, inf, inf]], device=device)
    lse_b = torch.tensor([[0.1, 2.0, -inf, -inf, 5001.0, -5000.5, 2.0, -inf]], device=device)
    out_a, out_b = torch.randn(2, 8, 1, 48, device=device).unbind()
    out_a[[1, 3]] = out_b[[2, 3]] = nan
    out, lse = _merge(out_a, lse_a, out_b, lse_b)
    assert not out.isnan().any()
    assert torch.equal(out[3], torch.zeros_like(out[3]))
    assert lse[0, 3] == -inf


def test_merge_rejects_what_does_not_fit(device: torch.device) -> None:
    out, lse = torch.randn(4, 2, 32, device=device), torch.randn(2, 4, device=device)
    assert_refuses(
        merge_attn_states,
        {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse},
        ("lse_a", lse.T, r"lse_a: shape \[4, 2\], expected \[2, 4\]"),
        ("out_b", out.half(), "out_b: dtype"),
        ("lse_b", lse.half(), "lse_b: dtype"),
    )
