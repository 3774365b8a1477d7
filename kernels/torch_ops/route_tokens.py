"""Expert routing in PyTorch."""

from __future__ import annotations

import torch


def route_tokens(
    router_logits: torch.Tensor, top_k: int, *, renormalize: bool, scoring: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `kernels.route_tokens.route_tokens`; a stable sort where `topk` would leave the order of ties open."""
    logits = router_logits.float()
    scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    unroutable = scores.isnan().any(-1, keepdim=True)
    return weights.masked_fill_(unroutable, float("nan")), ids.int().masked_fill_(unroutable, -1)
