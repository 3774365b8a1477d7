"""Routing and experts as custom ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paged.kernels.common.custom_ops import define, like_the_first, ops, writes_only
from paged.kernels.moe.alignment import MoeAlignment, new_alignment
from paged.kernels.moe.routing import Routing, new_routes

__all__ = ["ops"]

_ROUTING = (
    "SymInt top_k, bool renormalize=True, str scoring='softmax', Tensor? correction_bias=None, "
    "SymInt num_expert_groups=1, SymInt topk_groups=1, float routed_scaling_factor=1.0, SymInt num_shared_experts=0"
)
_EXPERTS = (
    "Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, {}str activation='silu', "
    "Tensor? expert_map=None, Tensor? w1_bias=None, Tensor? w2_bias=None, bool interleaved=False, "
    "Tensor[]? aligned=None, Tensor? w1_scale=None, Tensor? w2_scale=None, "
    "Tensor? w1_zeros=None, Tensor? w2_zeros=None, Tensor? w1_tensor_scale=None, Tensor? w2_tensor_scale=None"
)
_FUSED_MOE = "paged.kernels.moe.fused_moe"


def _as_alignment(arguments: dict[str, Any]) -> None:
    if (aligned := arguments.get("aligned")) is not None:
        arguments["aligned"] = MoeAlignment(*aligned)


def _as_routing(arguments: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(Routing)]
    arguments["routing"] = Routing(**{each: arguments.pop(each) for each in names if each in arguments})


define("fused_moe", _FUSED_MOE, _EXPERTS.format(""), "Tensor", prepare=_as_alignment)(like_the_first)
define("fused_moe_out", _FUSED_MOE, _EXPERTS.format("Tensor(a!) out, "), mutates=("out",), prepare=_as_alignment)(
    writes_only
)


@define("route_tokens", "paged.kernels.moe.route_tokens", f"Tensor router_logits, {_ROUTING}",
        "(Tensor topk_weights, Tensor topk_ids)")  # fmt: skip
def _route_tokens(router_logits: torch.Tensor, *routing: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return new_routes(router_logits, Routing(*routing, **named))


@define("moe_align_block_size", "paged.kernels.moe.moe_align_block_size",
        "Tensor topk_ids, SymInt block_size, SymInt num_experts, Tensor? expert_map=None",
        "(Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)")  # fmt: skip
def _moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, ...]:
    return new_alignment(topk_ids.numel(), block_size, num_experts, topk_ids.device)


@define(
    "route_and_align",
    "paged.kernels.moe.route_and_align",
    "Tensor router_logits, SymInt block_size, Tensor? expert_map, SymInt? num_local_experts, Tensor(a!)? ticket, "
    f"{_ROUTING}",
    "(Tensor topk_weights, Tensor topk_ids, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)",
    mutates=("ticket",),
    prepare=_as_routing,
    results=lambda routed: (*routed[:2], *routed[2]),
)
def _route_and_align(
    router_logits: torch.Tensor,
    block_size: int,
    _expert_map: torch.Tensor | None,
    num_local_experts: int | None,
    _ticket: torch.Tensor | None,
    *routing: Any,
    **named: Any,
) -> tuple[torch.Tensor, ...]:
    weights, ids = _route_tokens(router_logits, *routing, **named)
    num_columns = router_logits.shape[1] + Routing(*routing, **named).num_shared_experts
    num_experts = num_columns if num_local_experts is None else num_local_experts
    return weights, ids, *new_alignment(ids.numel(), block_size, num_experts, ids.device)
