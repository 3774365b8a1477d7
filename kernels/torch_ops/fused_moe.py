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
    """Twin of `kernels.fused_moe.fused_moe`: entries sorted by expert, one product an expert in use in each projection.

    Entries are gathered, activated and summed all at once: beside the products, the number of operations is fixed.
    """
    num_experts, top_k = len(gate_up.w), topk_ids.shape[1]
    rows = topk_ids if expert_map is None else expert_rows(topk_ids, expert_map)
    # Entries whose expert is elsewhere come last.
    ids, entries = torch.where(rows < 0, num_experts, rows).flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=ids.device), right=True, out_int32=True)
    projected = _linear(hidden_states[entries // top_k], gate_up, ids, ends)
    activated = gated_activation(projected.float(), activation, interleaved).to(hidden_states.dtype)
    parts = _linear(activated, down, ids, ends).float()
    parts[int(ends[-1]) :] = 0
    in_order = torch.empty_like(parts).index_copy_(0, entries, parts).view(*topk_ids.shape, -1)
    return out.copy_(torch.bmm(topk_weights.unsqueeze(1), in_order).squeeze(1))


def _linear(x: torch.Tensor, linear: ExpertLinear, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's product with the rows up to its end; rows beyond the last end hold anything."""
    out = _grouped_mm(x, linear.w, ends)
    return out if linear.bias is None else out + linear.bias[ids.clamp(max=len(linear.w) - 1)].to(out.dtype)


def _grouped_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """torch's own where there are rows, and strides are multiples of 16 bytes, as it demands."""
    strides = x.stride(0) | w.stride(0) | w.stride(1)
    if len(x) and strides * x.element_size() % 16 == 0:
        return functional.grouped_mm(x, w.mT, offs=ends)
    out = x.new_empty(len(x), w.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], w[expert].T, out=out[start:end])
        start = end
    return out


def gated_activation(x: torch.Tensor, activation: str, interleaved: bool) -> torch.Tensor:
    """Twin of `kernels.moe_activation.gated_activation` on gate and up in the last axis, in halves or alternating."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "swiglu_oai":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
