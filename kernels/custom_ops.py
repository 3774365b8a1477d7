"""Every operation as a `torch.library` custom op, `torch.ops.paged.<operation>`: what torch.compile sees of it.

A plain call goes straight to the operation. One that Dynamo traces goes to the op, so that a graph holds one node where
the operation checks, plans and launches. `is_dynamo_compiling` tells them apart, not `is_compiling`, which holds in all
threads while one compiles: an op that runs meanwhile would call itself.

The arguments are the operation's, with these differences: tensors that are written and returned are only written;
operations that may write to `out` are two ops, one of them `<operation>_out`; attention always gives (out, lse), and
takes a flag for each sequence as `is_causal`; an alignment is three tensors, and the objects `Routing`, `LoraWeights`
and `LoraBatch` are their fields.

No plan crosses the border: the op makes its own, one launch more a layer. A plan holds the schedule of one step, so a
graph, a captured one above all, that held on to it would run later steps on the lengths of the first.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from paged.kernels.moe_alignment import MoeAlignment, new_alignment
from paged.kernels.routing import Routing, new_routes

ops = torch.ops.paged

_CACHE_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
_ROUTING = (
    "SymInt top_k, bool renormalize=True, str scoring='softmax', Tensor? correction_bias=None, "
    "SymInt num_expert_groups=1, SymInt topk_groups=1, float routed_scaling_factor=1.0, SymInt num_shared_experts=0"
)
_EXPERTS = (
    "Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, {}str activation='silu', "
    "Tensor? expert_map=None, Tensor? w1_bias=None, Tensor? w2_bias=None, bool interleaved=False, "
    "Tensor[]? aligned=None, Tensor? w1_scale=None, Tensor? w2_scale=None"
)
_SEQUENCES = "Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, SymInt max_seqlen_q, float? softmax_scale=None"
_ATTENTION = (
    f"Tensor q, Tensor k_cache, Tensor v_cache, {{}}{_SEQUENCES}, bool causal=True, Tensor? is_causal=None, "
    "SymInt[] window_size=[-1, -1], float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, "
    f"{_CACHE_SCALES}, Tensor? mask=None, bool deterministic=False"
)


@functools.cache
def _operation(name: str) -> Callable[..., Any]:
    """The public function of an operation; its file imports this one, so it is looked up at the first call."""
    file = {"fused_add_rms_norm": "rms_norm", "add_lora": "lora"}.get(name, name)
    function: Callable[..., Any] = getattr(importlib.import_module(f"paged.kernels.{file}"), name)
    return function


def _run(op: str, *args: Any, **kwargs: Any) -> Any:
    """The operation behind an op, its arguments by name."""
    schema = getattr(ops, op).default._schema
    arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    name = op.removesuffix("_out")
    match name:
        case "paged_attention" | "cascade_attention":
            arguments["return_lse"] = True
            if (flags := arguments.pop("is_causal", None)) is not None:
                arguments["causal"] = flags
        case "fused_moe":
            if (aligned := arguments.get("aligned")) is not None:
                arguments["aligned"] = MoeAlignment(*aligned)
        case "add_lora":
            from paged.kernels.lora_batch import LoraBatch
            from paged.kernels.lora_weights import LoraWeights

            a, b, ranks, scales, sizes = (arguments.pop(each) for each in ("a", "b", "ranks", "scales", "part_sizes"))
            arguments["weights"] = LoraWeights(a, b, ranks, scales, tuple(sizes))
            arguments["batch"] = LoraBatch(arguments.pop("rows"), arguments.pop("slots"))
        case "route_and_align":
            names = [field.name for field in dataclasses.fields(Routing)]
            arguments["routing"] = Routing(**{each: arguments.pop(each) for each in names if each in arguments})
    result = _operation(name)(**arguments)
    if name == "route_and_align":
        return *result[:2], *result[2]
    if name == op:
        return result if schema.returns else None
    return result[1] if schema.returns else None


def _define(op: str, arguments: str, returns: str = "()", *, mutates: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Defines an op of these arguments and results, whose fake implementation is the function decorated."""

    def with_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
        schema = f"({arguments}) -> {returns}"
        custom_op = torch.library.custom_op(
            f"paged::{op}", functools.partial(_run, op), mutates_args=mutates, schema=schema
        )
        custom_op.register_fake(fake)
        return fake

    return with_fake


def _writes_only(*_args: Any, **_kwargs: Any) -> None:
    """The fake of an op without results."""


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)


@_define("paged_attention", _ATTENTION.format(""), "(Tensor out, Tensor lse)")
@_define("cascade_attention", f"Tensor q, Tensor k_cache, Tensor v_cache, SymInt shared_prefix_len, {_SEQUENCES}, "
         f"float softcap=0.0, Tensor? sinks=None, {_CACHE_SCALES}, Tensor? mask=None, bool deterministic=False",
         "(Tensor out, Tensor lse)")  # fmt: skip
def _attention(q: torch.Tensor, *_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q), _lse(q)


@_define("paged_attention_out", _ATTENTION.format("Tensor(a!) out, "), "Tensor lse", mutates=("out",))
def _attention_out(q: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return _lse(q)


@_define("merge_attn_states", "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b", "(Tensor out, Tensor lse)")
def _merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(out_a), _like(lse_a)


@_define("rms_norm", "Tensor x, Tensor weight, float eps=1e-06", "Tensor")
@_define("fused_moe", _EXPERTS.format(""), "Tensor")
def _like_the_first(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return _like(x)


@_define("silu_and_mul", "Tensor x, str activation='silu'", "Tensor")
def _silu_and_mul(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


@_define("route_tokens", f"Tensor router_logits, {_ROUTING}", "(Tensor topk_weights, Tensor topk_ids)")
def _route_tokens(router_logits: torch.Tensor, *routing: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return new_routes(router_logits, Routing(*routing, **named))


@_define("moe_align_block_size", "Tensor topk_ids, SymInt block_size, SymInt num_experts, Tensor? expert_map=None",
         "(Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)")  # fmt: skip
def _moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, ...]:
    return new_alignment(topk_ids.numel(), block_size, num_experts, topk_ids.device)


@_define(
    "route_and_align",
    "Tensor router_logits, SymInt block_size, Tensor? expert_map, SymInt? num_local_experts, Tensor(a!)? ticket, "
    f"{_ROUTING}",
    "(Tensor topk_weights, Tensor topk_ids, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded)",
    mutates=("ticket",),
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


@_define("greedy_argmax", "Tensor logits, Tensor? token_mask=None, Tensor? repetition_penalty=None", "Tensor")
def _greedy_argmax(logits: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


_define("rms_norm_out", "Tensor x, Tensor weight, Tensor(a!) out, float eps=1e-06", mutates=("out",))(_writes_only)
_define("silu_and_mul_out", "Tensor x, Tensor(a!) out, str activation='silu'", mutates=("out",))(_writes_only)
_define("fused_moe_out", _EXPERTS.format("Tensor(a!) out, "), mutates=("out",))(_writes_only)
_define(
    "fused_add_rms_norm",
    "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-06",
    mutates=("x", "residual"),
)(_writes_only)
_define(
    "rotary_embedding",
    "Tensor positions, Tensor(a!) query, Tensor(b!)? key, Tensor cos_sin_cache, bool interleaved=False",
    mutates=("query", "key"),
)(_writes_only)
_define(
    "reshape_and_cache",
    f"Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, {_CACHE_SCALES}",
    mutates=("k_cache", "v_cache"),
)(_writes_only)
_define(
    "qk_norm_rope_and_cache",
    "Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-06, bool interleaved=False, "
    f"{_CACHE_SCALES}",
    mutates=("q", "k_cache", "v_cache"),
)(_writes_only)
_define("copy_blocks", "Tensor(a!)[] caches, Tensor block_pairs", mutates=("caches",))(_writes_only)
_define(
    "add_lora",
    "Tensor(a!) out, Tensor x, Tensor a, Tensor b, Tensor ranks, Tensor scales, SymInt[] part_sizes, Tensor rows, "
    "Tensor slots",
    mutates=("out",),
)(_writes_only)
