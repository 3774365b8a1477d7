"""Mixture of experts in PyTorch, with a product of its own for each expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from ...common.torch_ops.rows import gated_activation
from .fused_moe import sort_entries
from .moe_align_block_size import expert_rows

# Of rows [num_rows, in_features] with an expert's weights, plus its bias or None.
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def run_experts(
    x: torch.Tensor,
    gate_up: Sequence[Product],
    down: Sequence[Product],
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    biases: Sequence[torch.Tensor | None] = (None, None),
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return what `fused_moe` does, [num_tokens, hidden_size], with products in place of weights.

    biases: of gate_up and of down, [num_experts, rows].
    """
    experts = topk_ids
    if expert_map is not None:
        experts = expert_rows(topk_ids, expert_map)
    ends, rows, _, positions = sort_entries(experts, len(gate_up))
    gate_up_bias, down_bias = biases
    parts = x.new_zeros(len(rows) + 1, x.shape[1])  # position -1 takes the zeros at the end
    for expert, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end > start:
            projected = gate_up[expert](x[rows[start:end]], _row(gate_up_bias, expert))
            activated = gated_activation(projected.float(), activation, interleaved).to(x.dtype)
            parts[start:end] = down[expert](activated, _row(down_bias, expert))
    chosen = parts[positions].float().view(*topk_ids.shape, -1)
    return torch.bmm(topk_weights.unsqueeze(1), chosen).squeeze(1).to(x.dtype)


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    if bias is None:
        return None
    return bias[expert]
