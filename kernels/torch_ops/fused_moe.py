"""Mixture of experts in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from paged.kernels.torch_ops.silu_and_mul import silu_and_mul


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Twin of `kernels.fused_moe.fused_moe` for rows of w1 and w2 as ids: two matrix products an expert in use."""
    num_experts, top_k = w1.shape[0], local_ids.shape[1]
    ids, entries = local_ids.flatten().sort(stable=True)
    experts, counts = ids.unique_consecutive(return_counts=True)
    weights = topk_weights.flatten()
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for expert, chosen in zip(experts.tolist(), entries.split(counts.tolist()), strict=True):
        if not 0 <= expert < num_experts:
            continue
        tokens = chosen // top_k
        gate_up = functional.linear(hidden_states[tokens], w1[expert])
        activated = silu_and_mul(gate_up, out=gate_up.new_empty((len(tokens), w2.shape[2])))
        total.index_add_(0, tokens, functional.linear(activated, w2[expert]).float() * weights[chosen].unsqueeze(1))
    total.masked_fill_(topk_weights.isnan().any(1, keepdim=True), float("nan"))
    return out.copy_(total)
