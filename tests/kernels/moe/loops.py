"""Routing token by token and alignment entry by entry: rules that the definition's sorts hide."""

import math

import torch

from paged import Routing


def route_tokens(router_logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights in float64 and int32 ids, [num_tokens, routing.width]."""
    logits = router_logits.detach().cpu().double()
    num_tokens, num_experts = logits.shape
    weights = torch.full((num_tokens, routing.width), math.nan, dtype=torch.float64)
    ids = torch.full(weights.shape, -1, dtype=torch.int32)
    bias = routing.correction_bias
    for token, row in enumerate(logits.tolist()):
        scores = _SCORES[routing.scoring](row)
        choice = row
        if bias is not None:
            choice = [score + shift for score, shift in zip(scores, bias.tolist(), strict=True)]
        if any(math.isnan(number) for number in (*scores, *choice)):
            continue
        allowed = _experts_of_best_groups(choice, routing)
        order = sorted(allowed, key=lambda expert: (-choice[expert], expert))[: routing.top_k]
        total = 1.0
        if routing.renormalize:
            total = sum(scores[expert] for expert in order) or math.nan
        routed = [scores[expert] / total * routing.routed_scaling_factor for expert in order]
        shared = range(num_experts, num_experts + routing.num_shared_experts)
        weights[token] = torch.tensor([*routed, *(1.0 for _ in shared)], dtype=torch.float64)
        ids[token] = torch.tensor([*order, *shared], dtype=torch.int32)
    return weights, ids


def _sigmoids(row: list[float]) -> list[float]:
    return [0.0 if logit < -700 else 1 / (1 + math.exp(-logit)) for logit in row]


def _sqrt_softpluses(row: list[float]) -> list[float]:
    return [math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))) for logit in row]


def _softmax(row: list[float]) -> list[float]:
    """NaN for all experts if a logit is NaN or infinite, or if all are -inf."""
    largest = max(row)
    if any(math.isnan(logit) for logit in row) or math.isinf(largest):
        return [math.nan] * len(row)
    exponentials = [math.exp(logit - largest) for logit in row]
    return [number / sum(exponentials) for number in exponentials]


_SCORES = {"softmax": _softmax, "sigmoid": _sigmoids, "sqrt_softplus": _sqrt_softpluses}


def _experts_of_best_groups(choice: list[float], routing: Routing) -> list[int]:
    """A group is as good as its best expert; with a bias, as the sum of its two best, each of which must be allowed."""
    size = len(choice) // routing.num_expert_groups
    scores = []
    for start in range(0, len(choice), size):
        best = sorted(choice[start : start + size], reverse=True)
        score = best[0]
        if routing.correction_bias is not None and size > 1:
            score = -math.inf if best[1] == -math.inf else best[0] + best[1]
        scores.append((-score, start))
    experts = []
    for _, start in sorted(scores)[: routing.topk_groups]:
        experts += range(start, start + size)
    return experts


def local_expert(chosen: int, num_experts: int, expert_map: torch.Tensor | None) -> int:
    """The expert that an id names, -1 for none."""
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
    """The entries of each block in use, the expert of each block, and block_size times the number of blocks."""
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
