"""Mixture of experts in PyTorch, with products in place of weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...common.device import loops_of
from ...common.torch_ops.rows import gated_activation
from .fused_moe import parts_of_entries, sort_entries, weighted_sums
from .moe_align_block_size import expert_rows


class Experts(Protocol):
    """One projection of all experts, such as `kernels.quantization.cpu_experts.ExpertProducts`."""

    def __len__(self) -> int: ...

    def __call__(
        self, x: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor: ...


def run_experts(
    x: torch.Tensor,
    gate_up: Experts,
    down: Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return what `fused_moe` does, [num_tokens, hidden_size], with products in place of weights.

    biases: of gate_up and of down, float32 [num_experts, rows].
    """
    loops = loops_of("moe.numba_ops.fused_moe", x)
    if loops is not None:
        entries = loops.sort_entries(topk_ids, len(gate_up), expert_map)
    else:
        experts = topk_ids
        if expert_map is not None:
            experts = expert_rows(topk_ids, expert_map)
        entries = sort_entries(experts, len(gate_up))
    gate_up_bias, down_bias = biases
    projected = gate_up(x, entries.ends, entries.rows, gate_up_bias)  # [num_entries, 2 * intermediate_size]
    activated = _activated(projected, activation, interleaved)
    parts = down(activated, entries.ends, None, down_bias)  # [num_entries, hidden_size]
    if loops is not None:
        out = torch.empty_like(x)
        loops.combine_parts(parts, entries.positions, topk_weights, out)
        return out
    return weighted_sums(parts_of_entries(parts, entries.positions), topk_weights).to(x.dtype)


def _activated(projected: torch.Tensor, activation: str, interleaved: bool) -> torch.Tensor:
    loops: Any = None
    if activation == "silu" and not interleaved:
        loops = loops_of("common.numba_ops.gated_activation", projected)
    if loops is None:
        return gated_activation(projected.float(), activation, interleaved).to(projected.dtype)
    activated: torch.Tensor = loops.silu_and_mul(projected, projected.dtype)
    return activated
