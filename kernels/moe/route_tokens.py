"""Choose the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..common.compat import tl, triton
from ..common.device import loops_of, use_triton
from ..common.launch import Compute, Launch, nothing, wait_for_inputs
from ..common.operation import Run, operation
from .routing import Routing, check_routing, choose_experts, new_routes


@triton.jit(do_not_specialize=["num_tokens"])
def _route_tokens_kernel(
    logits_ptr,  # [num_tokens, NUM_GROUPS * GROUP_SIZE]
    bias_ptr,  # [NUM_GROUPS * GROUP_SIZE] float32, or None
    weights_ptr,  # [num_tokens, TOP_K + NUM_SHARED] float32
    ids_ptr,  # [num_tokens, TOP_K + NUM_SHARED] int32
    num_tokens,
    scaling_factor,
    stride_logits_token,
    stride_logits_expert,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T tokens a program."""
    wait_for_inputs()
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    choose_experts(
        logits_ptr, bias_ptr, weights_ptr, ids_ptr, tokens, num_tokens, scaling_factor, stride_logits_token,
        stride_logits_expert, NUM_GROUPS, TOPK_GROUPS, GROUP_SIZE, TOP_K, NUM_SHARED, RENORMALIZE, SIGMOID, BLOCK_G,
        BLOCK_S, BLOCK_K,
    )  # fmt: skip


def _new(router_logits: torch.Tensor, *routing: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return new_routes(router_logits, Routing(*routing, **named))


@operation(_new, results="Tensor topk_weights, Tensor topk_ids")
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
) -> Run[tuple[torch.Tensor, torch.Tensor]]:
    """Choose the top_k experts of every token by score, ties to the smaller id, computed in float32.

    Args:
        router_logits: [num_tokens, num_experts], float32, float16 or bfloat16, any strides.
        top_k: experts of a token, 1 to the number of experts in topk_groups groups.
        renormalize: whether to divide a token's weights by their sum.
        scoring: "softmax" over the experts (Shazeer et al., 2017), or "sigmoid" of each logit (DeepSeek-V3, 2024).
        correction_bias: float32 [num_experts], contiguous, added to the scores to choose experts and groups. Weights
            are scores without it (DeepSeek-V3, auxiliary-loss-free balancing). None for none.
        num_expert_groups: groups of neighbouring experts; divides num_experts. A group's score is that of its best
            expert, with correction_bias the sum of its two best.
        topk_groups: number of best groups that a token's experts come from.
        routed_scaling_factor: multiplies the weights, after they are renormalised.
        num_shared_experts: number of experts num_experts, num_experts + 1, ... that every token takes with weight 1, in
            the last columns of the results. To gate them, overwrite these weights.

    Returns:
        topk_weights float32 and topk_ids int32, both [num_tokens, top_k + num_shared_experts], the first top_k in
        falling order of score. A row with NaN scores is routed to no expert and has ids -1 and weights NaN.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, a number is out of range, or scoring is
            unknown.
        UnsupportedError: an argument requires a gradient.
    """
    routing = Routing(
        top_k, renormalize, scoring, correction_bias, num_expert_groups, topk_groups, routed_scaling_factor,
        num_shared_experts,
    )  # fmt: skip
    return bind_routing(router_logits, routing)


def bind_routing(router_logits: torch.Tensor, routing: Routing) -> Run[tuple[torch.Tensor, torch.Tensor]]:
    """Bind `route_tokens`; the result takes the logits and the bias, and ignores other arguments."""
    check_routing(router_logits, routing)
    has_rows = len(router_logits) > 0
    compute: Compute | None = nothing
    if use_triton(router_logits):
        compute = _prepare(router_logits, routing) if has_rows else nothing
    else:
        loops = loops_of("moe.numba_ops.route_tokens", router_logits, weights=[routing.correction_bias])
        takes = loops is not None and loops.takes(routing) and has_rows
        compute = loops.prepare(router_logits, routing) if takes else None
    routing = replace(routing, correction_bias=None)

    def run(
        router_logits: torch.Tensor, *_: object, correction_bias: torch.Tensor | None = None, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if compute is None:
            return _by_torch(router_logits, routing, correction_bias)
        weights, ids = new_routes(router_logits, routing)
        compute({**routing.tensors(router_logits, weights, ids), "bias_ptr": correction_bias})
        return weights, ids

    return run


def _prepare(router_logits: torch.Tensor, routing: Routing) -> Launch:
    arguments = routing.arguments(router_logits)
    # 1,024 logits a program: 8 a thread, so that logits, scores and what is left of them stay in registers.
    arguments["BLOCK_T"] = max(1024 // (arguments["BLOCK_G"] * arguments["BLOCK_S"]), 1)
    grid = (triton.cdiv(len(router_logits), arguments["BLOCK_T"]),)
    return Launch(_route_tokens_kernel, grid, arguments, num_warps=4)


def _by_torch(
    router_logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch implementation; a stable sort, as `topk` leaves the order of ties open."""
    logits = router_logits.float()
    num_tokens, num_experts = logits.shape
    if routing.scoring == "softmax":
        scores = torch.softmax(logits, -1)
    else:
        scores = torch.sigmoid(logits)
    choice, num_counted = logits, 1  # the scores of a group that count
    if bias is not None:
        choice, num_counted = scores + bias, 2
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    if routing.topk_groups < routing.num_expert_groups:
        grouped = choice.unflatten(-1, (routing.num_expert_groups, -1))
        best = grouped.topk(min(num_counted, grouped.shape[-1])).values.sum(-1)
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
