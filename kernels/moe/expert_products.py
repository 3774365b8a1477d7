"""Mixture of experts on a CPU, with products in place of weights."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from ..core.device import takes_numba
from .definition import activate, sum_of_experts


class Experts(Protocol):
    """One projection of all experts, such as `kernels.cpu.quantization.experts.ExpertProducts`."""

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
    """Return the result of `fused_moe`, [num_tokens, hidden_size], with products in place of weights.

    biases: biases of gate_up and of down, float32 [num_experts, rows].
    """
    gate_up_bias, down_bias = biases
    if not takes_numba(x):
        out = sum_of_experts(
            x,
            partial(_multiply, gate_up, gate_up_bias, x.dtype),
            partial(_multiply, down, down_bias, x.dtype),
            topk_weights,
            topk_ids,
            len(gate_up),
            activation=activation,
            expert_map=expert_map,
            interleaved=interleaved,
            compute=torch.float32,
        )
        return out.to(x.dtype)
    from ..cpu.moe import fused_moe as numba_experts

    entries = numba_experts.sort_entries(topk_ids, len(gate_up), expert_map)
    projected = gate_up(x, entries.ends, entries.rows, gate_up_bias)  # [num_entries, 2 * intermediate_size]
    activated = _activated(projected, activation, interleaved)
    parts = down(activated, entries.ends, None, down_bias)  # [num_entries, hidden_size]
    out = torch.empty_like(x)
    numba_experts.combine_parts(parts, entries.positions, topk_weights, out)
    return out


def _multiply(
    experts: Experts, bias: torch.Tensor | None, dtype: torch.dtype, rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return the products of sorted rows in `dtype`, see `definition.GroupedProduct`."""
    return experts(rows.to(dtype), counts.cumsum(0).int(), None, bias)


def _activated(projected: torch.Tensor, activation: str, interleaved: bool) -> torch.Tensor:
    if activation == "silu" and not interleaved:
        from ..cpu.layers.gated_activation import silu_and_mul

        return silu_and_mul(projected, projected.dtype)
    return activate(projected, activation, interleaved, compute=torch.float32).to(projected.dtype)


def add_gated(out: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Add x [num_tokens, size], times the sigmoid of each token's gate [num_tokens, 1], to out, and return out."""
    if out.is_cuda or torch.compiler.is_dynamo_compiling() or not takes_numba(out, x, gate):
        return out.addcmul_(x, gate.sigmoid())
    from ..cpu.moe import fused_moe as numba_experts

    numba_experts.add_gated(out, x, gate)
    return out
