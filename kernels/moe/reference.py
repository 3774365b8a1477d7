"""Routing and experts in float64; `kernels.common.reference` explains references."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ..common.reference import dequantize, f64, gated_activation, quantize_rows
from .routing import Routing


def route_tokens(router_logits: torch.Tensor, top_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_tokens`, one token at a time; options: its other arguments."""
    routing = Routing(top_k, **options)
    logits = f64(router_logits)
    num_tokens, num_experts = logits.shape
    if routing.scoring == "softmax":
        scores = torch.softmax(logits, -1)
    else:
        scores = 1 / (1 + torch.exp(-logits))
    num_shared = routing.num_shared_experts
    bias, num_counted = [0.0] * num_experts, 1  # the scores of a group that count
    if routing.correction_bias is not None:
        bias, num_counted = f64(routing.correction_bias).tolist(), 2
    weights = torch.full((num_tokens, routing.width), math.nan, dtype=torch.float64)
    ids = torch.full(weights.shape, -1, dtype=torch.int32)
    size = num_experts // routing.num_expert_groups
    for token, row in enumerate(scores.tolist()):
        if any(math.isnan(score) for score in row):
            continue
        choice = [score + shift for score, shift in zip(row, bias, strict=True)]
        groups = [range(start, start + size) for start in range(0, num_experts, size)]
        groups.sort(key=lambda group: (-sum(sorted((choice[e] for e in group), reverse=True)[:num_counted]), group[0]))
        allowed = [expert for group in groups[: routing.topk_groups] for expert in group]
        order = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: routing.top_k]
        total = 1.0
        if routing.renormalize:
            total = sum(row[expert] for expert in order)
        routed = [row[expert] / total * routing.routed_scaling_factor for expert in order]
        weights[token] = torch.tensor(routed + [1.0] * num_shared, dtype=torch.float64)
        shared = range(num_experts, num_experts + num_shared)
        ids[token] = torch.tensor([*order, *shared], dtype=torch.int32)
    return weights, ids


def local_expert(chosen: int, num_experts: int, expert_map: torch.Tensor | None) -> int:
    """Return the expert that an id names, -1 for none."""
    if expert_map is not None:
        if not 0 <= chosen < len(expert_map):
            return -1
        chosen = int(expert_map[chosen])
    if not 0 <= chosen < num_experts:
        return -1
    return chosen


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, expert_map: torch.Tensor | None = None
) -> tuple[list[list[int]], list[int], int]:
    """Return `moe_align_block_size` as (blocks, expert_ids, num_tokens_post_padded).

    That is the entries of each block in use, its expert, and block_size times the number of blocks.
    """
    flat = [local_expert(chosen, num_experts, expert_map) for chosen in topk_ids.flatten().tolist()]
    blocks: list[list[int]] = []
    expert_ids: list[int] = []
    for expert in range(num_experts):
        entries = [index for index, chosen in enumerate(flat) if chosen == expert]
        for start in range(0, len(entries), block_size):
            block = entries[start : start + block_size]
            blocks.append(block + [len(flat)] * (block_size - len(block)))
            expert_ids.append(expert)
    return blocks, expert_ids, block_size * len(blocks)


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    interleaved: bool = False,
    **options: torch.Tensor | None,
) -> torch.Tensor:
    """`fused_moe`, one entry at a time; ids that name no expert contribute nothing.

    options: its biases, scales and zero points.
    """
    x, weights = f64(hidden_states), f64(topk_weights)
    rows = torch.arange(w1.shape[1])
    gate_rows, up_rows = rows.chunk(2)
    if interleaved:
        gate_rows, up_rows = rows[0::2], rows[1::2]
    is_gated = activation != "relu2"
    rounds_input = w1.dtype == torch.float8_e4m3fn

    @functools.cache
    def expert(local: int) -> list[tuple[torch.Tensor, torch.Tensor | float]]:
        """Weights and biases of both projections."""
        projections: list[tuple[torch.Tensor, torch.Tensor | float]] = []
        for name, w, columns in (("w1", w1, x.shape[1]), ("w2", w2, w1.shape[1] // (1 + is_gated))):
            scales: list[torch.Tensor | None] = []
            for option in ("scale", "zeros", "tensor_scale"):
                tensor = options.get(f"{name}_{option}")
                if tensor is not None:
                    tensor = tensor[local]
                scales.append(tensor)
            bias: torch.Tensor | float = 0.0
            biases = options.get(f"{name}_bias")
            if biases is not None:
                bias = f64(biases[local])
            projections.append((dequantize(w[local], *scales, num_columns=columns), bias))
        return projections

    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, chosen in zip(weights[token], topk_ids[token].tolist(), strict=True):
            if torch.isnan(weight):
                out[token] = math.nan
                continue
            local = local_expert(chosen, len(w1), expert_map)
            if local >= 0:
                (first, first_bias), (second, second_bias) = expert(local)
                row = x[token]
                if rounds_input:
                    row = quantize_rows(row[None], w1.dtype, 128)[0]
                product = first @ row + first_bias
                if is_gated:
                    activated = gated_activation(product[gate_rows], product[up_rows], activation)
                else:
                    activated = product.clamp(min=0) ** 2
                if w2.dtype == torch.float8_e4m3fn:
                    activated = quantize_rows(activated[None], w2.dtype, 128)[0]
                out[token] += weight * (second @ activated + second_bias)
    return out
