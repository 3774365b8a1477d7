"""Mixture of experts in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paged.kernels.torch_ops.moe_align_block_size import expert_rows

if TYPE_CHECKING:
    from paged.kernels.moe_weights import ExpertLinear


def fused_moe(
    hidden_states: torch.Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    *,
    activation: str,
    interleaved: bool,
) -> torch.Tensor:
    """Twin of `kernels.fused_moe.fused_moe`: entries sorted by expert, two matrix products an expert in use."""
    num_experts, top_k = gate_up.w.shape[0], topk_ids.shape[1]
    rows = topk_ids if expert_map is None else expert_rows(topk_ids, expert_map)
    ids, entries = rows.flatten().sort(stable=True)
    experts, counts = ids.unique_consecutive(return_counts=True)
    weights = topk_weights.flatten()
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for expert, chosen in zip(experts.tolist(), entries.split(counts.tolist()), strict=True):
        if not 0 <= expert < num_experts:
            continue
        tokens = chosen // top_k
        projected = _linear(hidden_states[tokens], gate_up, expert)
        activated = gated_activation(projected.float(), activation, interleaved).to(hidden_states.dtype)
        total.index_add_(0, tokens, _linear(activated, down, expert).float() * weights[chosen].unsqueeze(1))
    total.masked_fill_(topk_weights.isnan().any(1, keepdim=True), float("nan"))
    return out.copy_(total)


def _linear(x: torch.Tensor, linear: ExpertLinear, expert: int) -> torch.Tensor:
    product = functional.linear(x, linear.w[expert])
    return product if linear.bias is None else product + linear.bias[expert]


def gated_activation(x: torch.Tensor, activation: str, interleaved: bool) -> torch.Tensor:
    """Twin of `kernels.moe_activation.gated_activation` on gate and up in the last axis, in halves or alternating."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "swiglu_oai":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
