"""Mixture of experts in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from paged.kernels.moe_weights import FP8_GROUP, ExpertLinear
from paged.kernels.torch_ops.moe_align_block_size import expert_rows


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
    projected = _linear(hidden_states.index_select(0, entries // top_k), gate_up, ids, ends)
    activated = gated_activation(projected.float(), activation, interleaved).to(hidden_states.dtype)
    parts = _linear(activated, down, ids, ends).float()
    num_here = int(ends[-1])
    if num_here < len(parts):
        parts[num_here:] = 0
    in_order = torch.empty_like(parts).index_copy_(0, entries, parts).view(*topk_ids.shape, -1)
    return out.copy_(torch.bmm(topk_weights.unsqueeze(1), in_order).squeeze(1))


def _linear(x: torch.Tensor, linear: ExpertLinear, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's product with the rows up to its end; rows beyond the last end hold anything."""
    if linear.format:
        out = _grouped_mm(
            quantized_token_groups(x) if linear.format == "e4m3" else x.float(), dequantized(linear), ends
        )
    else:
        out = _grouped_mm(x, linear.w, ends)
    return out if linear.bias is None else out + linear.bias[ids.clamp(max=len(linear.w) - 1)].to(out.dtype)


def quantized_token_groups(x: torch.Tensor) -> torch.Tensor:
    """Twin of `kernels.quantize_token_groups`, multiplied out in float32."""
    groups = functional.pad(x.float(), (0, -x.shape[1] % FP8_GROUP)).unflatten(-1, (-1, FP8_GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 448.0
    scale = torch.where(scale > 0, scale, 1.0)
    rounded: torch.Tensor = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[:, : x.shape[1]].contiguous()


def dequantized(linear: ExpertLinear) -> torch.Tensor:
    """All weights in float32."""
    assert linear.scale is not None
    w = linear.w
    if linear.format == "int4":
        w = torch.stack([w & 15, w >> 4], -1).flatten(-2).to(torch.int8) - 8
    group_n, group_k = linear.group
    num_experts, num_rows, num_columns = w.shape
    scale = linear.scale.view(num_experts, -1, linear.scale.shape[2] if linear.scale.dim() == 3 else 1)
    scale = scale.repeat_interleave(group_n, 1)[:, :num_rows].repeat_interleave(group_k, 2)[..., :num_columns]
    return w.float() * scale


def _grouped_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """torch's own where there are rows, and strides are multiples of 16 bytes, as it demands."""
    strides = x.stride(0) | w.stride(0) | w.stride(1)
    if len(x) and strides * x.element_size() % 16 == 0:
        out: torch.Tensor = functional.grouped_mm(x, w.mT, offs=ends)
        return out
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
