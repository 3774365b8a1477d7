"""Expert routing in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paged.kernels.moe.routing import Routing


def route_tokens(
    router_logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch implementation of `kernels.moe.route_tokens`; a stable sort, as `topk` leaves the order of ties open."""
    logits = router_logits.float()
    num_tokens, num_experts = logits.shape
    scores = torch.softmax(logits, -1) if routing.scoring == "softmax" else torch.sigmoid(logits)
    choice = logits if bias is None else scores + bias
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    if routing.topk_groups < routing.num_expert_groups:
        grouped = choice.unflatten(-1, (routing.num_expert_groups, -1))
        best = grouped.topk(min(1 if bias is None else 2, grouped.shape[-1])).values.sum(-1)
        groups = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.topk_groups]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        # Experts of the groups that are kept come first, in the order they have.
        is_kept = kept.gather(1, order // grouped.shape[-1])
        order = order.gather(1, is_kept.int().sort(dim=-1, descending=True, stable=True).indices)
    ids = order[:, : routing.top_k]
    weights = scores.gather(1, ids)
    # NaN sorts first, so a row that has any has it here; infinite logits leave the scores of their row NaN.
    unroutable = weights[:, :1].isnan()
    if bias is not None:
        unroutable |= choice.gather(1, ids[:, :1]).isnan()
    if routing.renormalize:
        weights /= weights.sum(-1, keepdim=True)
    if routing.routed_scaling_factor != 1.0:
        weights *= routing.routed_scaling_factor
    if routing.num_shared_experts:
        shared = torch.arange(num_experts, num_experts + routing.num_shared_experts, device=logits.device)
        ids = torch.cat([ids, shared.expand(num_tokens, -1)], 1)
        weights = torch.cat([weights, weights.new_ones(num_tokens, routing.num_shared_experts)], 1)
    return weights.masked_fill_(unroutable, float("nan")), ids.int().masked_fill_(unroutable, -1)
