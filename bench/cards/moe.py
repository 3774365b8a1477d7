"""Cards of mixtures of experts: routing, alignment to blocks, and the experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import paged
from paged.bench.bounds import experts as bounds
from paged.bench.cards.card import Card, Edge, Row, defined, named, same, whole
from paged.bench.cards.draw import Draw
from paged.bench.cards.layers import TOKENS
from paged.bench.compilation.cases import moe as compiled
from paged.bench.limits import Cost
from paged.bench.problems.arguments import Arguments, Tensors, num_bytes
from paged.bench.problems.experts import MoeCase, MoeModel
from paged.bench.problems.formats import FORMATS
from paged.kernels.layers.activation import ACTIVATIONS
from paged.kernels.moe import definition
from paged.kernels.moe.moe_align_block_size import MoeAlignment
from paged.kernels.moe.routing import SCORINGS

# Experts of Qwen3-30B-A3B (Qwen, 2025).
_EXPERTS = {"num_experts": (128, 16, 16), "top_k": (8, 4, 4)}
_WIDTHS = {"hidden_size": (2048, 256, 256), "intermediate_size": (768, 128, 128)}
_ODD = {"tokens": (0, 1, 7), "num_experts": (9, 6), "top_k": (1, 3)}


def _logits(draw: Draw, *, tokens: int, num_experts: int, top_k: int) -> Arguments:
    return {"router_logits": draw.normal(tokens, num_experts), "top_k": top_k}


def _all_options(draw: Draw) -> Iterator[Arguments]:
    """Draw groups of experts, a bias as large as the scores, shared experts, and a row with a NaN."""
    logits = draw.normal(9, 256)
    logits[4, 1] = math.nan
    for scoring in SCORINGS:
        yield {
            "router_logits": logits,
            "top_k": 8,
            "scoring": scoring,
            "correction_bias": torch.rand(256, device=draw.device),
            "num_expert_groups": 8,
            "topk_groups": 4,
            "routed_scaling_factor": 2.5,
            "num_shared_experts": 2,
        }


def _choices(draw: Draw, *, tokens: int, num_experts: int, top_k: int, block_size: int) -> Arguments:
    topk_ids = draw.floats(tokens, num_experts).topk(top_k).indices.int().contiguous()
    return {"topk_ids": topk_ids, "block_size": block_size, "num_experts": num_experts}


def _logits_and_ticket(
    draw: Draw, *, tokens: int, num_experts: int, top_k: int, block_size: int, is_biased: bool = False
) -> Arguments:
    routing = paged.Routing(top_k)
    if is_biased:
        bias = draw.floats(num_experts)
        routing = paged.Routing(top_k, scoring="sigmoid", correction_bias=bias, num_shared_experts=1)
    return {
        "router_logits": draw.normal(tokens, num_experts),
        "routing": routing,
        "block_size": block_size,
        "ticket": torch.zeros(1, dtype=torch.int32, device=draw.device),
    }


def _experts(
    draw: Draw, *, tokens: int, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int
) -> Arguments:
    model = MoeModel("kernels", num_experts, top_k, hidden_size, intermediate_size, num_experts)
    case = MoeCase(model, tokens, "balanced")
    layer = case.layer(draw.device, draw.dtype)
    return _named(*layer.arguments(case.batch(draw.device, draw.dtype)))


def _named(*tensors: torch.Tensor) -> Arguments:
    names = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
    return dict(zip(names, tensors, strict=True))


def _activation(draw: Draw, *, activation: str) -> Iterator[Arguments]:
    """Draw interleaved gates, biases, and another rank's experts; one token takes matrix-vector products."""
    for tokens in (1, 12):
        case = MoeCase(MoeModel("", 8, 2, 48, 40, 8), tokens, "balanced")
        layer = case.layer(draw.device, draw.dtype)
        arguments = _named(*layer.arguments(case.batch(draw.device, draw.dtype)))
        w1 = arguments["w1"]
        if activation == "relu2":
            w1 = w1[:, :40]
        options: dict[str, Any] = {
            "w1": 4 * w1,
            "activation": activation,
            "interleaved": True,
            "w1_bias": torch.randn(w1.shape[:2], device=draw.device),
            "w2_bias": torch.randn(8, 48, device=draw.device),
            "expert_map": torch.tensor([3, 0, -1, 7, 5, -1, 1, 2], dtype=torch.int32, device=draw.device),
        }
        yield arguments | options


def _format(draw: Draw, *, layout: str) -> Iterator[Arguments]:
    case = MoeCase(MoeModel("", 3, 2, 192, 96, 3), 5, "balanced", FORMATS[layout])
    layer = case.layer(draw.device, torch.float32)
    yield _named(*layer.arguments(case.batch(draw.device, draw.dtype))) | layer.options


def _experts_cost(_: Card, arguments: Arguments) -> Cost:
    """Count the three products of every routed entry, without padding: F = 6 (T K) H I.

    Weights of experts with entries are read once; hidden states are read and written once.
    """
    hidden_states, w1, w2, topk_ids = (arguments[name] for name in ("hidden_states", "w1", "w2", "topk_ids"))
    num_active = len(topk_ids.unique())
    flops = 6 * topk_ids.numel() * w2.shape[1] * w2.shape[2]
    return Cost(flops, num_active * num_bytes(w1[0], w2[0]) + 2 * hidden_states.nbytes)


_routing_and_places = defined(definition.route_and_align, "topk_weights", "topk_ids", *MoeAlignment._fields)


def _routed_and_aligned_expected(arguments: Arguments) -> Tensors:
    return _without_order(arguments, _routing_and_places(arguments))


def _routed_and_aligned(arguments: Arguments, returned: Any) -> Tensors:
    weights, ids, aligned = returned
    return _without_order(arguments, {"topk_weights": weights, "topk_ids": ids, **aligned._asdict()})


def _without_order(arguments: Arguments, results: Tensors) -> Tensors:
    """Return choices and places. With a map, the order of experts is free, so places are only counted."""
    if arguments.get("expert_map") is not None:
        del results["sorted_token_ids"], results["expert_ids"]
    return results


CARDS = (
    Card(
        "route_tokens",
        _logits,
        defined(definition.route_tokens, "topk_weights", "topk_ids"),
        named("topk_weights", "topk_ids"),
        errors=bounds.routed,
        rows=(Row({"tokens": TOKENS, **_EXPERTS}),),
        edges=(Edge("groups, bias, shared experts", _all_options),),
        odd=_ODD,
        compiled=compiled.routing_cases,
    ),
    Card(
        "moe_align_block_size",
        _choices,
        defined(definition.moe_align_block_size, *MoeAlignment._fields),
        named(*MoeAlignment._fields),
        rows=(Row({"tokens": TOKENS, **_EXPERTS, "block_size": (128, 16, 16)}),),
        odd={**_ODD, "block_size": (16, 4)},
        compiled=compiled.alignment_cases,
    ),
    Card(
        "route_and_align",
        _logits_and_ticket,
        _routed_and_aligned_expected,
        _routed_and_aligned,
        errors=bounds.routed,
        writes=whole("ticket"),
        rows=(Row({"tokens": (256, 64, 19), **_EXPERTS, "block_size": same(16)}),),
        odd={**_ODD, "block_size": (16, 4), "is_biased": (False, True)},
    ),
    Card(
        "fused_moe",
        _experts,
        defined(definition.fused_moe, "out"),
        named("out"),
        errors=bounds.fused_moe,
        cost=_experts_cost,
        rows=(
            Row({"tokens": (16, 16, 6), **_EXPERTS, **_WIDTHS}, "decode"),
            Row({"tokens": (4096, 256, 600), **_EXPERTS, **_WIDTHS}, "prefill", is_quick=False),
        ),
        edges=(
            *(
                Edge(name, partial(_activation, activation=name), name == "swiglu_oai")
                for name in (*ACTIVATIONS, "relu2")
            ),
            *(Edge(layout, partial(_format, layout=layout)) for layout in FORMATS),
        ),
        odd={**_ODD, "hidden_size": (40, 16), "intermediate_size": (24, 16)},
        compiled=compiled.expert_cases,
    ),
)
