"""Which experts each token goes to, and with what weight."""

from __future__ import annotations

import torch

from paged.kernels.backend import use_triton
from paged.kernels.checks import FLOAT_DTYPES, check_dtype, check_shape
from paged.kernels.compat import tl, triton
from paged.kernels.custom_ops import ops
from paged.kernels.errors import InvalidInputError
from paged.kernels.torch_ops import route_tokens as torch_op

SCORINGS = ("softmax", "sigmoid")


@triton.jit
def _route_tokens_kernel(
    logits_ptr,  # [num_tokens, NUM_EXPERTS]
    weights_ptr,  # [num_tokens, TOP_K] float32
    ids_ptr,  # [num_tokens, TOP_K] int32
    num_tokens,
    stride_logits_token,
    stride_logits_expert,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T tokens a program; their largest logits are taken one after the other."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    ranks = tl.arange(0, BLOCK_K)[None, :]
    exists = experts < NUM_EXPERTS
    logits_ptrs = logits_ptr + tokens * stride_logits_token + experts * stride_logits_expert
    logits = tl.load(logits_ptrs, mask=(tokens < num_tokens) & exists, other=0.0).to(tl.float32)
    logits = tl.where(exists, logits, float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = exps / tl.sum(exps, axis=1)[:, None]
    unroutable = tl.max((scores != scores).to(tl.int32), axis=1)[:, None] > 0

    # The order is that of the logits: scores of unequal logits may round to the same float32.
    left = exists & (tokens >= 0)  # [BLOCK_T, BLOCK_E]
    ids = tl.full((BLOCK_T, BLOCK_K), -1, tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for rank in range(TOP_K):
        largest = tl.max(tl.where(left, logits, float("-inf")), axis=1)[:, None]
        chosen = tl.min(tl.where(left & (logits == largest), experts, BLOCK_E), axis=1)[:, None]
        score = tl.sum(tl.where(experts == chosen, scores, 0.0), axis=1)[:, None]
        ids = tl.where(ranks == rank, chosen, ids)
        weights = tl.where(ranks == rank, score, weights)
        left = left & (experts != chosen)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    ids = tl.where(unroutable, -1, ids)
    weights = tl.where(unroutable, float("nan"), weights)
    mask = (tokens < num_tokens) & (ranks < TOP_K)
    tl.store(weights_ptr + tokens * TOP_K + ranks, weights, mask=mask)
    tl.store(ids_ptr + tokens * TOP_K + ranks, ids, mask=mask)


def route_tokens(
    router_logits: torch.Tensor, top_k: int, *, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts of every token by score, ties to the smaller index, computed in float32.

    Args:
        router_logits: [num_tokens, num_experts], float32, float16 or bfloat16, any strides.
        top_k: experts a token, 1 to num_experts.
        renormalize: divide a token's weights by their sum.
        scoring: "softmax" over the experts (Shazeer et al., 2017), or "sigmoid" of each logit (DeepSeek-V3, 2024).

    Returns:
        topk_weights float32 and topk_ids int32, both [num_tokens, top_k], in falling order of score. A row whose scores
        hold NaN routes to no expert: ids -1, weights NaN.

    Raises:
        InvalidInputError: shape or dtype does not fit, top_k is out of range, or scoring is another word.
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.route_tokens(router_logits, top_k, renormalize, scoring)
    check_shape("router_logits", router_logits, ("num_tokens", "num_experts"))
    check_dtype("router_logits", router_logits, *FLOAT_DTYPES)
    num_tokens, num_experts = router_logits.shape
    if not 1 <= top_k <= num_experts:
        raise InvalidInputError(f"top_k: {top_k}, expected 1 to {num_experts}, the number of experts")
    if scoring not in SCORINGS:
        raise InvalidInputError(f"scoring: {scoring!r}, expected {' or '.join(map(repr, SCORINGS))}")
    if not use_triton(router_logits):
        return torch_op.route_tokens(router_logits, top_k, renormalize=renormalize, scoring=scoring)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=router_logits.device)
    if num_tokens == 0:
        return weights, ids
    block_e = triton.next_power_of_2(num_experts)
    # 1,024 logits a program: 8 a thread, so that logits, scores and what is left of them stay in registers.
    block_t = max(1024 // block_e, 1)
    _route_tokens_kernel[(triton.cdiv(num_tokens, block_t),)](
        logits_ptr=router_logits,
        weights_ptr=weights,
        ids_ptr=ids,
        num_tokens=num_tokens,
        stride_logits_token=router_logits.stride(0),
        stride_logits_expert=router_logits.stride(1),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        SIGMOID=scoring == "sigmoid",
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=4,
    )
    return weights, ids
