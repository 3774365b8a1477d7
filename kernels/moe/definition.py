"""Routing and experts as formulas; see `kernels.layers.definition` for what a definition is."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from ..layers.activation import PLAIN_ACTIVATIONS
from ..layers.definition import gated_activation
from ..layers.linear import linear
from ..quantization.definition import rounded_groups
from ..quantization.packing import FP8_BLOCK
from ..quantization.tiles import dequantized_tiles
from .routing import Routing
from .weights import ExpertLinear

# The products of sorted rows with their experts' weights: from rows [num_rows, in_features] and the number of rows of
# each expert, int64 [num_experts], to [num_rows, out_features].
GroupedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and int32 ids, both [num_tokens, top_k + num_shared_experts], of the experts with the best scores.

    Experts are chosen by score + bias, from the groups with the best sums of two (DeepSeek-V3, 2024). Weights are
    scores. A row with NaN among its scores or biases gets ids -1 and weights NaN.
    """
    logits = router_logits.to(compute)  # [num_tokens, num_experts]
    num_tokens, num_experts = logits.shape
    scores = expert_scores(logits, scoring)
    # Without a bias, order by logits: scores of unequal logits may round to the same number.
    choice = logits
    if correction_bias is not None:
        choice = scores + correction_bias
    is_unroutable = (scores.isnan() | choice.isnan()).any(-1, keepdim=True)  # [num_tokens, 1]
    order = choice.sort(dim=-1, descending=True, stable=True).indices  # [num_tokens, num_experts], ties by id
    if topk_groups < num_expert_groups:
        sizes = group_scores(choice, num_expert_groups, has_bias=correction_bias is not None)
        groups = sizes.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        is_kept = torch.zeros_like(sizes, dtype=torch.bool).scatter_(1, groups, True)  # [num_tokens, num_expert_groups]
        is_candidate = is_kept.gather(1, order // (num_experts // num_expert_groups))
        order = order[is_candidate].view(num_tokens, topk_groups * num_experts // num_expert_groups)
    ids = order[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * routed_scaling_factor
    if num_shared_experts:
        shared = torch.arange(num_experts, num_experts + num_shared_experts, device=ids.device)
        ids = torch.cat([ids, shared.expand(num_tokens, -1)], 1)
        weights = functional.pad(weights, (0, num_shared_experts), value=1.0)
    return weights.masked_fill(is_unroutable, torch.nan), ids.int().masked_fill(is_unroutable, -1)


def expert_scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Return the scores [num_tokens, num_experts]; scoring: as in `route_tokens`."""
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    return functional.softplus(logits, threshold=40).sqrt()


def group_scores(choice: torch.Tensor, num_groups: int, *, has_bias: bool) -> torch.Tensor:
    """Return the scores [num_tokens, num_groups] of groups of neighbouring experts, from their choice values.

    A group counts its best expert, or with a bias the sum of its two best, which is -inf if one of them is.
    """
    grouped = choice.unflatten(-1, (num_groups, -1))  # [num_tokens, num_groups, group_size]
    if not has_bias or grouped.shape[-1] == 1:
        return grouped.amax(-1)
    best, second = grouped.topk(2).values.unbind(-1)
    return (best + second).masked_fill(second == -torch.inf, -torch.inf)


def local_experts(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Return the expert that each id names, in the shape of topk_ids; -1 for none."""
    experts = topk_ids
    if expert_map is not None:
        num_mapped = len(expert_map)
        is_mapped = (topk_ids >= 0) & (topk_ids < num_mapped)
        experts = functional.pad(expert_map, (0, 1), value=-1)[torch.where(is_mapped, topk_ids, num_mapped)]
    return torch.where((experts >= 0) & (experts < num_experts), experts, -1)


def sorted_entries(
    topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of topk_ids that name an expert, by expert, and their number of each expert [num_experts].

    Entries are indices into the flattened topk_ids, in rising order within an expert.
    """
    experts, entries = local_experts(topk_ids.flatten(), num_experts, expert_map).sort(stable=True)
    counts = torch.bincount(experts + 1, minlength=num_experts + 1)  # first the entries that name no expert
    return entries[int(counts[0]) :], counts[1:]


def max_num_blocks(num_entries: int, block_size: int, num_experts: int) -> int:
    """Return the most blocks that `num_entries` routed entries can need.

    Every expert in use may leave block_size - 1 places of its last block empty. There are at most as many experts in
    use as entries.
    """
    return -(-(num_entries + min(num_experts, num_entries) * (block_size - 1)) // block_size)


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, *, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sorted_token_ids, expert_ids and num_tokens_post_padded of `MoeAlignment`."""
    entries, counts = sorted_entries(topk_ids, num_experts, expert_map)
    num_blocks = (counts + block_size - 1) // block_size  # [num_experts]
    # An entry's place is its expert's first place, plus its number among the expert's entries.
    shift = (num_blocks.cumsum(0) - num_blocks) * block_size - (counts.cumsum(0) - counts)  # [num_experts]
    places = torch.arange(len(entries), device=entries.device) + shift.repeat_interleave(counts)
    most_blocks = max_num_blocks(topk_ids.numel(), block_size, num_experts)
    sorted_token_ids = topk_ids.new_full((most_blocks * block_size,), topk_ids.numel())
    sorted_token_ids[places] = entries.to(topk_ids.dtype)
    block_experts = torch.arange(num_experts, device=entries.device).repeat_interleave(num_blocks)
    expert_ids = functional.pad(block_experts.int(), (0, most_blocks - len(block_experts)), value=-1)
    return sorted_token_ids, expert_ids, (num_blocks.sum(0, keepdim=True) * block_size).int()


def route_and_align(
    router_logits: torch.Tensor,
    routing: Routing,
    block_size: int,
    *,
    expert_map: torch.Tensor | None = None,
    num_local_experts: int | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, ...]:
    """Return the results of `route_tokens`, then those of `moe_align_block_size` for its ids."""
    weights, ids = route_tokens(router_logits, **vars(routing), compute=compute)
    num_experts = num_local_experts
    if num_experts is None:
        num_experts = router_logits.shape[1] + routing.num_shared_experts
    return weights, ids, *moe_align_block_size(ids, block_size, num_experts, expert_map=expert_map)


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
    w1_zeros: torch.Tensor | None = None,
    w2_zeros: torch.Tensor | None = None,
    w1_tensor_scale: torch.Tensor | None = None,
    w2_tensor_scale: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return `sum_of_experts` for weights w1 and w2, [num_tokens, hidden_size]."""
    gate_up = ExpertLinear(w1, w1_bias, w1_scale, w1_zeros, w1_tensor_scale)
    down = ExpertLinear(w2, w2_bias, w2_scale, w2_zeros, w2_tensor_scale)
    return sum_of_experts(
        hidden_states,
        functools.partial(grouped_product, gate_up, compute=compute),
        functools.partial(grouped_product, down, compute=compute),
        topk_weights,
        topk_ids,
        len(w1),
        activation=activation,
        expert_map=expert_map,
        interleaved=interleaved,
        compute=compute,
    )


def sum_of_experts(
    hidden_states: torch.Tensor,
    gate_up: GroupedProduct,
    down: GroupedProduct,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    interleaved: bool = False,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the sum over each token's experts of weight * down(act(gate_up(x))), [num_tokens, hidden_size].

    Ids that name no expert contribute nothing. A NaN weight makes its token's row NaN.
    """
    num_tokens, top_k = topk_ids.shape
    entries, counts = sorted_entries(topk_ids, num_experts, expert_map)
    projected = gate_up(hidden_states[entries // top_k], counts)  # [num_entries, 2 * intermediate_size]
    activated = activate(projected, activation, interleaved, compute=compute)  # [num_entries, intermediate_size]
    del projected  # a long prompt's takes as much memory as the products that follow
    parts = activated.new_zeros(num_tokens * top_k, hidden_states.shape[1])
    parts.index_copy_(0, entries, down(activated, counts).to(compute))
    parts = parts.view(num_tokens, top_k, parts.shape[1])  # [num_tokens, top_k, hidden_size]
    weights = topk_weights.to(compute).unsqueeze(1)  # [num_tokens, 1, top_k]
    return torch.bmm(weights, parts).squeeze(1)


def grouped_product(
    experts: ExpertLinear, rows: torch.Tensor, counts: torch.Tensor, *, compute: torch.dtype
) -> torch.Tensor:
    """Return w[e] @ row + bias[e] of sorted rows, see `GroupedProduct`. e4m3 weights round rows to e4m3, too."""
    if experts.w.dtype == torch.float8_e4m3fn:
        rows = rounded_groups(rows, "e4m3", FP8_BLOCK, compute=compute)
    out = rows.new_empty(len(rows), experts.w.shape[1], dtype=compute)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count > 0:
            end = start + count
            out[start:end] = _product(rows[start:end], experts, expert, compute)
            start = end
    if experts.bias is not None:
        out += experts.bias.to(compute).repeat_interleave(counts, 0, output_size=len(rows))
    return out


def _product(x: torch.Tensor, experts: ExpertLinear, expert: int, compute: torch.dtype) -> torch.Tensor:
    """Return x @ w[expert]^T, [num_rows, out_features]."""
    w = experts.w[expert]
    if experts.scale is None:
        # In float32, weights multiply in their own dtype: to convert 16-bit weights takes as long as four rows of x.
        # See limits.md.
        dtype = w.dtype if compute == torch.float32 else compute
        return linear(x.to(dtype), w.to(dtype))
    zeros, tensor_scale = experts.zeros, experts.tensor_scale
    if zeros is not None:
        zeros = zeros[expert]
    if tensor_scale is not None:
        tensor_scale = tensor_scale[expert]
    x, scales = x.to(compute), (experts.scale[expert], zeros, tensor_scale)
    tiles = dequantized_tiles(w, *scales, x.shape[1], compute=compute)
    return torch.cat([linear(x, tile) for _, tile in tiles], 1)


def activate(
    projected: torch.Tensor, activation: str, interleaved: bool, *, compute: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return the experts' activation of [..., rows]. Gate and up are halves, or alternate.

    "relu2" is max(x, 0)^2 without a gate (So et al., 2021).
    """
    if activation in PLAIN_ACTIVATIONS:
        return projected.to(compute).relu().square_()
    if interleaved:
        gate, up = projected.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate, up = projected.chunk(2, -1)
    return gated_activation(gate, up, activation, compute=compute)
