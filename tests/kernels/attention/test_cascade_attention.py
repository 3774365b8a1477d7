"""cascade_attention is paged_attention over a table whose rows begin alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged import InvalidInputError, cascade_attention
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention import reference
from paged.kernels.attention.cascade_attention import cascade_plans
from tests.tolerance import assert_close, dtypes


def _shared(problem: Problem, prefix: int, device: torch.device) -> dict[str, Any]:
    """The problem's tensors with the first sequence's first `prefix` keys in all of them."""
    tensors = vars(make(problem, device))
    num_blocks = prefix // problem.block_size
    tensors["block_table"][:, :num_blocks] = tensors["block_table"][0, :num_blocks]
    return tensors


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("prefix", [0, 16, 64])
def test_matches_reference(prefix: int, dtype: torch.dtype, device: torch.device) -> None:
    problem = Problem("", ((1, 65), (5, 90), (1, 200), (40, 110)), v_head_dim=24, dtype=dtype, padding_rows=3)
    tensors = _shared(problem, prefix, device)
    scale = torch.tensor([0.7, 1.3], device=device)
    options: dict[str, Any] = {"sinks": torch.randn(4, device=device), "softcap": 8.0, "k_scale": scale}
    out, lse = cascade_attention(
        **tensors, shared_prefix_len=prefix, max_seqlen_q=40, v_scale=scale, return_lse=True, **options
    )
    cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    cpu |= {name: tensor.cpu() for name, tensor in tensors.items()}
    want, want_lse = reference.paged_attention(**cpu, v_scale=scale.cpu())
    # Both parts are rounded to the type before they are merged, as their softmax weights are.
    rounded = None if dtype == torch.float32 else want * (1 + 2 * torch.finfo(dtype).eps)
    assert_close(out, want, rounded=rounded)
    assert_close(lse, want_lse, float32=1e-5 if dtype == torch.float32 else 1e-4)


@pytest.mark.usefixtures("backend")
def test_layers_share_plans(device: torch.device) -> None:
    tensors = _shared(Problem("", ((1, 50), (3, 40))), 32, device)
    sizes = {"shared_prefix_len": 32, "max_seqlen_q": 3}
    plan, prefix_plan = cascade_plans(
        tensors["cu_seqlens_q"], tensors["seq_lens"], num_tokens=4, max_seqlen_k=64, **sizes
    )
    planned = cascade_attention(**tensors, **sizes, plan=plan, prefix_plan=prefix_plan)
    assert torch.equal(planned, cascade_attention(**tensors, **sizes))


@pytest.mark.usefixtures("backend")
def test_no_sequences(device: torch.device) -> None:
    tensors = vars(make(Problem("", (), padding_rows=2), device))
    assert torch.equal(
        cascade_attention(**tensors, shared_prefix_len=16, max_seqlen_q=0), torch.zeros_like(tensors["q"])
    )


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    tensors = _shared(Problem("", ((1, 50), (3, 40))), 32, device)
    cascade_attention(**tensors, shared_prefix_len=32, max_seqlen_q=3)
    for prefix in (-16, 31, 80):
        with pytest.raises(InvalidInputError, match="shared_prefix_len"):
            cascade_attention(**tensors, shared_prefix_len=prefix, max_seqlen_q=3)
    with pytest.raises(InvalidInputError, match="block_table"):
        cascade_attention(**{**tensors, "block_table": tensors["seq_lens"]}, shared_prefix_len=32, max_seqlen_q=3)


@pytest.mark.usefixtures("backend")
def test_cascade_refuses_sequences_without_the_prefix(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("ids on a GPU are trusted")
    tensors = make(Problem("", ((1, 30), (2, 20)), block_size=8), device)
    tensors.block_table[:, 0] = 1
    arguments = {name: each.nan_to_num(0.5) for name, each in vars(tensors).items()}
    cascade_attention(**arguments, max_seqlen_q=2, shared_prefix_len=8)
    with pytest.raises(InvalidInputError, match=r"shared_prefix_len: 24, expected at most 18, .* sequence 1"):
        cascade_attention(**arguments, max_seqlen_q=2, shared_prefix_len=24)
    with pytest.raises(InvalidInputError, match=r"block_table\[1, 1\]: "):
        cascade_attention(**arguments, max_seqlen_q=2, shared_prefix_len=16)
