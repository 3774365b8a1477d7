"""Choose the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.launch import Compute, Launch, nothing, wait_for_inputs
from ..core.operation import Run, operation
from . import definition
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
    SCORING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose experts for BLOCK_T tokens a program."""
    wait_for_inputs()
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    choose_experts(
        logits_ptr, bias_ptr, weights_ptr, ids_ptr, tokens, num_tokens, scaling_factor, stride_logits_token,
        stride_logits_expert, NUM_GROUPS, TOPK_GROUPS, GROUP_SIZE, TOP_K, NUM_SHARED, RENORMALIZE, SCORING, BLOCK_G,
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
        scoring: "softmax" over the experts (Shazeer et al., 2017); or of each logit x "sigmoid" (DeepSeek-V3, 2024), or
            "sqrt_softplus", sqrt(log(1 + exp(x))) (DeepSeek-V4, 2026).
        correction_bias: float32 [num_experts], contiguous, added to the scores to choose experts and groups. Weights
            are scores without it (DeepSeek-V3, auxiliary-loss-free balancing). None for none.
        num_expert_groups: groups of neighbouring experts; divides num_experts. A group's score is the score of its best
            expert, or with correction_bias the sum of its two best (DeepSeek-V3, 2024). So a group of several experts
            in which less than two are above -inf has -inf.
        topk_groups: number of best groups that a token's experts come from.
        routed_scaling_factor: multiplies the weights, after they are renormalised.
        num_shared_experts: number of experts num_experts, num_experts + 1, ... that every token takes with weight 1, in
            the last columns of the results. To gate them, overwrite their weights.

    Returns:
        topk_weights float32 and topk_ids int32, both [num_tokens, top_k + num_shared_experts], the first top_k in
        falling order of score. Experts outside of the chosen groups are never chosen. An expert with logit or bias -inf
        is chosen after all others of these groups, one with bias inf before them. A row with a NaN among scores and
        biases, with a softmax also a row with logit inf or all logits -inf, is routed to no expert: its ids are -1 and
        its weights NaN. If renormalised weights are all 0, they are NaN, too.

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
    """Bind `route_tokens`. The result takes the logits and the bias, and ignores other arguments."""
    check_routing(router_logits, routing)
    has_rows = len(router_logits) > 0
    compute: Compute | None = None
    if use_triton(router_logits):
        compute = _launch_for(router_logits, routing) if has_rows else nothing
    elif has_rows and takes_numba(router_logits, weights=[routing.correction_bias]):
        from ..cpu.moe.route_tokens import launch_for

        compute = launch_for(router_logits, routing)
    routing = replace(routing, correction_bias=None)

    def run(
        router_logits: torch.Tensor, *_: object, correction_bias: torch.Tensor | None = None, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if compute is None:
            options = vars(routing) | {"correction_bias": correction_bias}
            return definition.route_tokens(router_logits, **options, compute=torch.float32)
        weights, ids = new_routes(router_logits, routing)
        compute({**routing.tensors(router_logits, weights, ids), "bias_ptr": correction_bias})
        return weights, ids

    return run


def _launch_for(router_logits: torch.Tensor, routing: Routing) -> Launch:
    arguments = routing.arguments(router_logits)
    # A program takes up to 1,024 logits, 8 a thread, so that logits and scores stay in registers.
    arguments["BLOCK_T"] = max(1024 // (arguments["BLOCK_G"] * arguments["BLOCK_S"]), 1)
    grid = (triton.cdiv(len(router_logits), arguments["BLOCK_T"]),)
    return Launch(_route_tokens_kernel, grid, arguments, num_warps=4)
