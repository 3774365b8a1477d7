"""Routing and experts in float64, slow and obviously right: what tests, benchmarks and self-checks compare with.

Written with Python loops over the formula's own indices, never sharing code with the kernels or their PyTorch twins.
All functions return new float64 (or integer) tensors on the CPU and change nothing.
"""

from __future__ import annotations

import functools
import math

import torch

from paged.kernels.common.errors import InvalidInputError
from paged.kernels.common.reference import f64, gated_activation


def route_tokens(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scoring: str = "softmax",
    correction_bias: torch.Tensor | None = None,
    num_expert_groups: int = 1,
    topk_groups: int = 1,
    routed_scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts a token by score (softmax over the experts, or sigmoid), ties to the smaller index.

    correction_bias [num_experts] is added where experts are compared, never to a weight. With groups the experts come
    from the topk_groups groups with the best score each, or with a bias the best sum of two scores.

    Returns weights (times routed_scaling_factor, summing to it a row where renormalize) and ids, int32, by falling
    score, both [num_tokens, top_k + num_shared_experts]: shared experts follow the others in number, with weight 1. A
    row that holds NaN routes to no expert: ids -1, weights NaN.
    """
    if scoring not in ("softmax", "sigmoid"):
        raise InvalidInputError(f"scoring={scoring!r}: expected 'softmax' or 'sigmoid'")
    logits = f64(router_logits)
    num_tokens, num_experts = logits.shape
    scores = torch.softmax(logits, -1) if scoring == "softmax" else 1 / (1 + torch.exp(-logits))
    bias = [0.0] * num_experts if correction_bias is None else f64(correction_bias).tolist()
    weights = torch.full((num_tokens, top_k + num_shared_experts), math.nan, dtype=torch.float64)
    ids = torch.full(weights.shape, -1, dtype=torch.int32)
    size = num_experts // num_expert_groups
    for token, row in enumerate(scores.tolist()):
        if any(math.isnan(score) for score in row):
            continue
        choice = [score + shift for score, shift in zip(row, bias, strict=True)]
        groups = [range(start, start + size) for start in range(0, num_experts, size)]
        counted = 1 if correction_bias is None else 2
        groups.sort(key=lambda group: (-sum(sorted((choice[e] for e in group), reverse=True)[:counted]), group[0]))
        allowed = [expert for group in groups[:topk_groups] for expert in group]
        order = sorted(allowed, key=lambda expert: (-choice[expert], expert))[:top_k]
        total = sum(row[expert] for expert in order) if renormalize else 1.0
        routed = [row[expert] / total * routed_scaling_factor for expert in order]
        weights[token] = torch.tensor(routed + [1.0] * num_shared_experts, dtype=torch.float64)
        shared = range(num_experts, num_experts + num_shared_experts)
        ids[token] = torch.tensor([*order, *shared], dtype=torch.int32)
    return weights, ids


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int
) -> tuple[list[list[int]], list[int], int]:
    """The definition: for each expert in order, its entries of flattened topk_ids, rising, padded to whole blocks.

    Returns (blocks, expert_ids, num_tokens_post_padded): each block's block_size entries, filled up with
    topk_ids.numel(), each block's expert, and block_size times the number of blocks. Ids outside [0, num_experts)
    appear in no block.
    """
    flat = topk_ids.flatten().tolist()
    blocks: list[list[int]] = []
    expert_ids: list[int] = []
    for expert in range(num_experts):
        entries = [index for index, chosen in enumerate(flat) if chosen == expert]
        for start in range(0, len(entries), block_size):
            block = entries[start : start + block_size]
            blocks.append(block + [len(flat)] * (block_size - len(block)))
            expert_ids.append(expert)
    return blocks, expert_ids, block_size * len(blocks)


def quantize_token_groups(x: torch.Tensor) -> torch.Tensor:
    """x [num_rows, size] with every 128 values of a row rounded to e4m3 times a scale that makes their largest 448.

    e4m3 numbers from 2^e to 2^(e + 1) are 2^(e - 3) apart, those below 2^-6 are 2^-9 apart (Micikevicius et al., 2022).
    """
    x = f64(x)
    out = x.clone()
    for start in range(0, x.shape[1], 128):
        for row in range(x.shape[0]):
            values = x[row, start : start + 128]
            scale = float(values.abs().max()) / 448 or 1.0
            exponents = torch.floor(torch.log2((values / scale).abs().clamp(min=2.0**-6)))
            steps = scale * 2.0 ** (exponents - 3)
            out[row, start : start + 128] = torch.round(values / steps) * steps
    return out


def dequantize(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """One expert's weights [rows, columns] times their scale: one, one a row, or one a group of rows and columns.

    Groups of e4m3 are 128 x 128, those of int8 and of two 4-bit values plus 8 a byte (low bits first) one row each.
    """
    if scale is None:
        return f64(w)
    if w.dtype == torch.uint8:
        low, high = f64(w % 16) - 8, f64(w // 16) - 8
        values = torch.zeros(w.shape[0], 2 * w.shape[1], dtype=torch.float64)
        values[:, 0::2], values[:, 1::2] = low, high
    else:
        values = f64(w)
    scale = f64(scale)
    if scale.dim() < 2:
        return values * scale.reshape(-1, 1)
    height, width = (128, 128) if w.dtype == torch.float8_e4m3fn else (1, values.shape[1] // scale.shape[1])
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            values[i * height : (i + 1) * height, j * width : (j + 1) * width] *= scale[i, j]
    return values


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum over a token's experts of weight * (w2[e] @ activation(w1[e] @ x + w1_bias[e]) + w2_bias[e]).

    Shapes as in the operation; w1's gate and up rows lie in halves or, where interleaved, alternate. expert_map
    [num_global_experts] gives each expert's row in w1 and w2, or -1 for experts that live elsewhere and contribute
    nothing. Scales make quantised weights numbers, see `dequantize`; what e4m3 weights multiply is rounded first, see
    `quantize_token_groups`. A token whose weights are NaN yields NaN.
    """
    x, weights = f64(hidden_states), f64(topk_weights)
    num_experts, hidden_size, _ = w2.shape
    rows = torch.arange(w1.shape[1])
    gate_rows, up_rows = (rows[0::2], rows[1::2]) if interleaved else rows.chunk(2)
    w1_bias = torch.zeros(num_experts, w1.shape[1]) if w1_bias is None else w1_bias
    w2_bias = torch.zeros(num_experts, hidden_size) if w2_bias is None else w2_bias

    @functools.cache
    def matrices(local: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = dequantize(w1[local], None if w1_scale is None else w1_scale[local])
        return first, dequantize(w2[local], None if w2_scale is None else w2_scale[local])

    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], topk_ids[token].tolist(), strict=True):
            if torch.isnan(weight):
                out[token] = math.nan
                continue
            local = expert if expert_map is None or expert < 0 else int(expert_map[expert])
            if local >= 0:
                first, second = matrices(local)
                given = quantize_token_groups(x[token, None])[0] if w1.dtype == torch.float8_e4m3fn else x[token]
                product = first @ given + f64(w1_bias[local])
                activated = gated_activation(product[gate_rows], product[up_rows], activation)
                if w2.dtype == torch.float8_e4m3fn:
                    activated = quantize_token_groups(activated[None])[0]
                out[token] += weight * (second @ activated + f64(w2_bias[local]))
    return out
