"""Routing options, and code that routing kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.checks import FLOAT_DTYPES, check_contiguous, check_tensor
from ..core.compat import tl, triton
from ..core.errors import InvalidInputError, as_bool, as_float, as_int, shown
from ..core.launch import strides

SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")
# The most experts: their counts are one tile of up to 16 rows, and Triton limits a tile to 2^20 elements.
MAX_EXPERTS = 1 << 16


@dataclass(frozen=True)
class Routing:
    """Options of routing, as `route_tokens` describes them.

    Raises:
        InvalidInputError: a value has another type.
    """

    top_k: int
    renormalize: bool = True
    scoring: str = "softmax"
    correction_bias: torch.Tensor | None = None
    num_expert_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    num_shared_experts: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "num_expert_groups", "topk_groups", "num_shared_experts"):
            object.__setattr__(self, name, as_int(name, getattr(self, name), None))
        object.__setattr__(self, "renormalize", as_bool("renormalize", self.renormalize))
        factor = as_float("routed_scaling_factor", self.routed_scaling_factor)
        object.__setattr__(self, "routed_scaling_factor", factor)

    @property
    def width(self) -> int:
        """Columns of the results: chosen experts, then shared ones."""
        return self.top_k + self.num_shared_experts

    def constexprs(self, num_experts: int) -> dict[str, Any]:
        """Return the constexprs of `choose_experts`. Each group is padded to a power of two of lanes."""
        group_size = num_experts // self.num_expert_groups
        return {
            "NUM_GROUPS": self.num_expert_groups,
            "TOPK_GROUPS": self.topk_groups,
            "GROUP_SIZE": group_size,
            "TOP_K": self.top_k,
            "NUM_SHARED": self.num_shared_experts,
            "RENORMALIZE": self.renormalize,
            "SCORING": self.scoring,
            "BLOCK_G": triton.next_power_of_2(self.num_expert_groups),
            "BLOCK_S": triton.next_power_of_2(group_size),
            "BLOCK_K": triton.next_power_of_2(self.width),
        }

    def tensors(
        self, router_logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> dict[str, torch.Tensor | None]:
        """Return the tensors that a routing kernel takes. weights and ids: results of `new_routes`."""
        return {
            "logits_ptr": router_logits,
            "bias_ptr": self.correction_bias,
            "weights_ptr": weights,
            "ids_ptr": ids,
        }

    def arguments(self, router_logits: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a routing kernel that are not tensors."""
        return {
            "num_tokens": router_logits.shape[0],
            "scaling_factor": self.routed_scaling_factor,
            **strides("token expert", logits=router_logits),
            **self.constexprs(router_logits.shape[1]),
        }


@triton.jit
def choose_experts(
    logits_ptr,  # [num_tokens, NUM_GROUPS * GROUP_SIZE]
    bias_ptr,  # [NUM_GROUPS * GROUP_SIZE] float32, or None
    weights_ptr,  # [num_tokens, TOP_K + NUM_SHARED] float32
    ids_ptr,  # [num_tokens, TOP_K + NUM_SHARED] int32
    tokens,  # [BLOCK_T, 1] int64
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
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Store weights and ids of a tile of tokens.

    Lanes are experts in rising order, each group padded to a power of two.

    Returns three tiles: the lanes' experts [1, lanes], -1 for padding; which experts each token took [BLOCK_T, lanes];
    and whether it took any [BLOCK_T, 1].
    """
    BLOCK_T: tl.constexpr = tokens.shape[0]
    lanes = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]
    experts = lanes // BLOCK_S * GROUP_SIZE + lanes % BLOCK_S
    exists = (lanes // BLOCK_S < NUM_GROUPS) & (lanes % BLOCK_S < GROUP_SIZE)
    logits_ptrs = logits_ptr + tokens * stride_logits_token + experts * stride_logits_expert
    logits = tl.load(logits_ptrs, mask=(tokens < num_tokens) & exists, other=0.0).to(tl.float32)
    logits = tl.where(exists, logits, float("-inf"))
    if SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORING == "sqrt_softplus":
        scores = _sqrt_softplus(logits)
    else:
        exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = exps / tl.sum(exps, axis=1)[:, None]
    # Without a bias, order by logits: scores of unequal logits may round to the same float32.
    choice = logits
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + experts, mask=exists, other=0.0)
    unroutable = tl.max((exists & ((scores != scores) | (choice != choice))).to(tl.int32), axis=1)[:, None] > 0

    is_candidate = exists & (tokens < num_tokens)  # [BLOCK_T, BLOCK_G * BLOCK_S]
    if TOPK_GROUPS < NUM_GROUPS:
        is_candidate = is_candidate & _in_best_groups(
            tl.where(exists, choice, float("-inf")), NUM_GROUPS, TOPK_GROUPS, bias_ptr is not None, BLOCK_G, BLOCK_S
        )
    left = is_candidate
    ranks = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.full((BLOCK_T, BLOCK_K), -1, tl.int32)
    weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for rank in range(TOP_K):
        chosen = _best(left, choice, experts, NUM_GROUPS * GROUP_SIZE)
        score = tl.sum(tl.where(experts == chosen, scores, 0.0), axis=1)[:, None]
        ids = tl.where(ranks == rank, chosen, ids)
        weights = tl.where(ranks == rank, score, weights)
        left = left & (experts != chosen)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    weights *= scaling_factor
    if NUM_SHARED > 0:
        ids = tl.where(ranks >= TOP_K, NUM_GROUPS * GROUP_SIZE + ranks - TOP_K, ids)
        weights = tl.where(ranks >= TOP_K, 1.0, weights)
    ids = tl.where(unroutable, -1, ids)
    weights = tl.where(unroutable, float("nan"), weights)
    offsets = tokens * (TOP_K + NUM_SHARED) + ranks
    mask = (tokens < num_tokens) & (ranks < TOP_K + NUM_SHARED)
    tl.store(weights_ptr + offsets, weights, mask=mask)
    tl.store(ids_ptr + offsets, ids, mask=mask)
    is_routed = (tokens < num_tokens) & (unroutable == 0)
    return tl.where(exists, experts, -1), is_candidate & (left == 0) & is_routed, is_routed


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))).

    log(1 + y) = 2 atanh(y / (2 + y)), and eight terms of its series are exact to float32 for y up to 1. With a
    logarithm instead, `route_and_align` of 256 experts spills on sm_90.
    """
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    square = z * z
    total = 1.0 / 15.0
    total = total * square + 1.0 / 13.0
    total = total * square + 1.0 / 11.0
    total = total * square + 1.0 / 9.0
    total = total * square + 1.0 / 7.0
    total = total * square + 1.0 / 5.0
    total = total * square + 1.0 / 3.0
    total = total * square + 1.0
    return tl.sqrt(tl.where(x < 0.0, 0.0, x) + 2.0 * z * total)


@triton.jit
def _best(left, scores, ids, NO_ID: tl.constexpr):
    """The id of the largest score of each row among those `left`, ties to the smallest id; NO_ID if none is left."""
    largest = tl.max(tl.where(left, scores, float("-inf")), axis=1)[:, None]
    return tl.min(tl.where(left & (scores == largest), ids, NO_ID), axis=1)[:, None]


@triton.jit
def _in_best_groups(
    choice,  # [BLOCK_T, BLOCK_G * BLOCK_S], -inf where there is no expert
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Which lanes are in their token's TOPK_GROUPS best groups. A group counts its best expert, or its two best.

    With SUM_OF_TWO, a group of several experts with less than two above -inf counts -inf.
    """
    BLOCK_T: tl.constexpr = choice.shape[0]
    groups = tl.arange(0, BLOCK_G)[None, :]
    grouped = tl.reshape(choice, (BLOCK_T, BLOCK_G, BLOCK_S))
    best = tl.max(grouped, axis=2)
    if SUM_OF_TWO and BLOCK_S > 1:
        members = tl.arange(0, BLOCK_S)[None, None, :]
        first = tl.min(tl.where(grouped == best[:, :, None], members, BLOCK_S), axis=2)[:, :, None]
        second = tl.max(tl.where(members == first, float("-inf"), grouped), axis=2)
        # Infinities of both signs would add up to NaN.
        best = tl.where(second == float("-inf"), second, best + second)
    left = (groups < NUM_GROUPS) & (best == best)
    for _ in range(TOPK_GROUPS):
        left = left & (groups != _best(left, best, groups, BLOCK_G))
    kept = ((groups < NUM_GROUPS) & (best == best) & (left == 0)).to(tl.int32)
    return tl.reshape(tl.broadcast_to(kept[:, :, None], (BLOCK_T, BLOCK_G, BLOCK_S)), (BLOCK_T, BLOCK_G * BLOCK_S)) > 0


def new_routes(router_logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty weights and ids."""
    shape, device = (router_logits.shape[0], routing.width), router_logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def check_routing(router_logits: torch.Tensor, routing: Routing) -> None:
    """Raise InvalidInputError unless `routing` fits the logits."""
    check_tensor("router_logits", router_logits, ("num_tokens", "num_experts"), FLOAT_DTYPES)
    num_experts, groups = router_logits.shape[1], routing.num_expert_groups
    if groups < 1 or num_experts % groups:
        raise InvalidInputError(
            f"num_expert_groups: {groups}, expected a divisor of {num_experts}, the number of experts"
        )
    if not 1 <= routing.topk_groups <= groups:
        raise InvalidInputError(f"topk_groups: {routing.topk_groups}, expected 1 to {groups}, the number of groups")
    max_top_k = num_experts // groups * routing.topk_groups
    if not 1 <= routing.top_k <= max_top_k:
        limit = f"{max_top_k}, the number of experts"
        if groups > 1:
            limit = f"{max_top_k}, the experts of {routing.topk_groups} groups"
        raise InvalidInputError(f"top_k: {routing.top_k}, expected 1 to {limit}")
    if not isinstance(routing.scoring, str) or routing.scoring not in SCORINGS:
        raise InvalidInputError(f"scoring: {shown(routing.scoring)}, expected {' or '.join(map(repr, SCORINGS))}")
    if not 0 <= routing.num_shared_experts <= MAX_EXPERTS:
        raise InvalidInputError(f"num_shared_experts: {routing.num_shared_experts}, expected 0 to {MAX_EXPERTS}")
    if routing.correction_bias is not None:
        bias = routing.correction_bias
        check_tensor("correction_bias", bias, (num_experts,), (torch.float32,), router_logits.device)
        check_contiguous("correction_bias", bias)
