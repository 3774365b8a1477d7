"""Attention on a CPU over caches of others' layouts."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from paged import paged_attention
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention.plan import AttentionPlan


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [((1, 37), (1, 60)), ((5, 40), (20, 20))], ids=str)
def test_interleaved_caches_give_the_bits_of_separate_ones(
    lengths: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Keys and values of a row, of a position or of a block side by side, in every order of the dimensions."""
    tensors = make(Problem("", lengths, dtype=dtype), device)
    options = {**vars(tensors), "max_seqlen_q": max(q_len for q_len, _ in lengths)}
    plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=20, max_seqlen_k=60)
    wanted = paged_attention(**options)
    both = torch.stack([tensors.k_cache, tensors.v_cache])
    for order in permutations(range(4)):  # of keys and values, blocks, positions and heads
        laid_out = both.permute(*order, 4).contiguous().permute(*(order.index(axis) for axis in range(4)), 4)
        k_cache, v_cache = laid_out.unbind(0)
        for _ in range(2):  # the layers of a step share a plan, whatever each one's layout
            out = paged_attention(**{**options, "k_cache": k_cache, "v_cache": v_cache}, plan=plan)
            assert torch.equal(out, wanted)
    assert all(batch.layout is not None for batches, _ in plan.batches.values() for batch in batches)


def test_values_narrower_than_the_keys_beside_them(device: torch.device) -> None:
    """Whose rows are not a value's width apart."""
    problem = Problem("", ((1, 37), (9, 20)), head_dim=64, v_head_dim=24)
    tensors = make(problem, device)
    wanted = paged_attention(**vars(tensors), max_seqlen_q=9)
    both = torch.cat([tensors.k_cache, tensors.v_cache], -1)
    beside = dict(zip(("k_cache", "v_cache"), both.split((64, 24), -1), strict=True))
    plan = AttentionPlan(tensors.cu_seqlens_q, tensors.seq_lens, max_seqlen_q=9, max_seqlen_k=37)
    out = paged_attention(**{**vars(tensors), **beside}, max_seqlen_q=9, plan=plan)
    torch.testing.assert_close(out, wanted)
    assert all(batch.layout is None for batches, _ in plan.batches.values() for batch in batches)
