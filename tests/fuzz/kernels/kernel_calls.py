"""Small sound calls of every kernel wrapper, each with the float64 reference's answer: what is made odd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import paged
from paged.bench.attention.problem import Problem, make
from paged.kernels.attention import reference as attention_reference
from paged.kernels.cache import reference as cache_reference
from paged.kernels.layers import reference as layers_reference
from paged.kernels.lora import reference as lora_reference
from paged.kernels.moe import reference as moe_reference
from paged.kernels.moe.routing import Routing
from paged.kernels.sampling import reference as sampling_reference

Arguments = dict[str, Any]
Answer = tuple[torch.Tensor, ...]
DEVICE = torch.device("cpu")


class Call(NamedTuple):
    """arguments: makes a call's. run: the operation, as a tuple of what it returns or writes. expected: the answer.
    numbers: keywords that take a number or flag, with what makes a plain one of it.
    """

    arguments: Callable[[], Arguments]
    run: Callable[..., Answer]
    expected: Callable[..., Answer]
    numbers: dict[str, Callable[[Any], Any]] = {}  # noqa: RUF012 - never changed


def _sequences() -> Arguments:
    """Decode, verify and prompt rows; a block of 8, tables with room behind the sequences."""
    tensors = make(Problem("", ((1, 20), (3, 3), (9, 20)), heads=(4, 2), head_dim=16, block_size=8), DEVICE)
    return {**vars(tensors), "max_seqlen_q": 9}


def _attention_expected(**arguments: Any) -> Answer:
    return attention_reference.paged_attention(
        **{name: each for name, each in arguments.items() if name != "max_seqlen_q"}
    )


def _cascade() -> Arguments:
    arguments = _sequences()
    arguments["block_table"][:, 0] = arguments["block_table"][0, 0]
    arguments["seq_lens"] += 8
    arguments["block_table"] = torch.where(
        arguments["block_table"] >= len(arguments["k_cache"]), 1, arguments["block_table"]
    )
    arguments["block_table"] = torch.cat([arguments["block_table"], torch.full((3, 1), 2, dtype=torch.int32)], 1)
    for cache in ("k_cache", "v_cache"):
        arguments[cache] = arguments[cache].nan_to_num(0.5)
    return {**arguments, "shared_prefix_len": 8}


def _cascade_expected(**arguments: Any) -> Answer:
    return _attention_expected(**{name: each for name, each in arguments.items() if name != "shared_prefix_len"})


def _cache_write() -> Arguments:
    key, value = torch.randn(2, 5, 2, 16)
    k_cache, v_cache = torch.zeros(2, 4, 8, 2, 16)
    slots = torch.tensor([3, 31, -1, 0, 9])
    return {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}


def _cache_written(**arguments: Any) -> Answer:
    paged.reshape_and_cache(**arguments)
    return arguments["k_cache"], arguments["v_cache"]


def _rotary() -> Arguments:
    angles = torch.randn(12, 8)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    query, key = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    return {"positions": torch.tensor([0, 11, 3, 3, 7]), "query": query, "key": key, "cos_sin_cache": table}


def _rotary_expected(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_cache: torch.Tensor,
                     interleaved: bool = False) -> Answer:  # fmt: skip
    rotated = (layers_reference.rotate(x, positions, cos_sin_cache, interleaved) for x in (query, key))
    return tuple(rotated)


def _fused_write() -> Arguments:
    write, rotary = _cache_write(), _rotary()
    weights = {"q_weight": torch.rand(16), "k_weight": torch.rand(16)}
    names = {"q": rotary["query"], "k": write.pop("key"), "v": write.pop("value")}
    return names | write | {name: rotary[name] for name in ("positions", "cos_sin_cache")} | weights


def _fused_written(**arguments: Any) -> Answer:
    return paged.qk_norm_rope_and_cache(**arguments), arguments["k_cache"], arguments["v_cache"]


def _fused_expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slot_mapping: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, q_weight: torch.Tensor,
    k_weight: torch.Tensor, eps: float = 1e-6, interleaved: bool = False,
) -> Answer:  # fmt: skip
    normed = (layers_reference.rms_norm(q, q_weight, eps), layers_reference.rms_norm(k, k_weight, eps))
    q, k = (layers_reference.rotate(x, positions, cos_sin_cache, interleaved) for x in normed)
    caches = cache_reference.reshape_and_cache(k, v.double(), k_cache.double(), v_cache.double(), slot_mapping)
    return q, *caches


def _experts() -> Arguments:
    weights, ids = paged.route_tokens(torch.randn(12, 6), 3)
    w1, w2 = torch.randn(6, 32, 16) / 4, torch.randn(6, 16, 16) / 4
    return {"hidden_states": torch.randn(12, 16), "w1": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids}


def _experts_expected(**arguments: Any) -> Answer:
    ids = arguments["topk_ids"]  # those that name no expert contribute nothing
    known = torch.where((ids >= 0) & (ids < len(arguments["w1"])), ids, -1)
    return (moe_reference.fused_moe(**{**arguments, "topk_ids": known}),)


def _alignment(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> Answer:
    sorted_ids, expert_ids, num_places = paged.moe_align_block_size(topk_ids, block_size, num_experts)
    used = int(num_places)
    return sorted_ids[:used], expert_ids[: used // block_size], num_places


def _alignment_expected(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> Answer:
    blocks, expert_ids, num_places = moe_reference.moe_align_block_size(topk_ids, block_size, num_experts)
    flat = [entry for block in blocks for entry in block]
    return torch.tensor(flat), torch.tensor(expert_ids), torch.tensor([num_places])


def _adapters() -> Arguments:
    a, b = torch.randn(2, 1, 4, 16), torch.randn(2, 4, 24)
    ranks, scales = torch.tensor([[4], [3]], dtype=torch.int32), torch.tensor([[0.5], [2.0]])
    rows = torch.full((2, 16), -1, dtype=torch.int32)
    rows[0, :2], rows[1, :1] = torch.tensor([4, 1]), 0
    slots = torch.tensor([1, 0], dtype=torch.int32)
    return {"out": torch.randn(5, 24), "x": torch.randn(5, 16), "a": a, "b": b, "ranks": ranks, "scales": scales,
            "rows": rows, "slots": slots}  # fmt: skip


def _adapted(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor,
             scales: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> Answer:  # fmt: skip
    paged.add_lora(out, x, paged.LoraWeights(a, b, ranks, scales, (24,)), paged.LoraBatch(rows, slots))
    return (out,)


def _adapted_expected(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor,
                      scales: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> Answer:  # fmt: skip
    adapters = []
    for slot, (rank,) in enumerate(ranks.tolist()):
        adapters.append({0: (a[slot, 0, :rank], b[slot, :rank].T, float(scales[slot, 0]))} if rank else {})
    row_slots = [-1] * len(x)
    for block, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        for row in block:
            if row >= 0 and slot >= 0:
                row_slots[row] = slot
    return (lora_reference.add_lora(out, x, adapters, (24,), row_slots),)


def _copied(cache: torch.Tensor, block_pairs: torch.Tensor) -> Answer:
    paged.copy_blocks([cache], block_pairs)
    return (cache,)


def _copied_expected(cache: torch.Tensor, block_pairs: torch.Tensor) -> Answer:
    result = cache.double()
    for source, destination in torch.as_tensor(block_pairs).tolist():
        result[destination] = cache[source].double()
    return (result,)


def _states() -> Arguments:
    lse = torch.randn(2, 2, 5) * 4
    lse[0, 0, 1], lse[:, 1, 2], lse[1, 0, 3] = -torch.inf, torch.inf, torch.inf
    out_a, out_b = torch.randn(2, 5, 2, 16)
    return {"out_a": out_a, "lse_a": lse[0], "out_b": out_b, "lse_b": lse[1]}


def _fused_add_expected(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Answer:
    total = (residual.double() + x.double()).to(residual.dtype)
    return layers_reference.rms_norm(total, weight, eps), total.double()


def _routed_and_aligned(router_logits: torch.Tensor, top_k: int, block_size: int, **options: Any) -> Answer:
    routing = Routing(top_k, renormalize=options.pop("renormalize", True))
    weights, ids, aligned = paged.route_and_align(router_logits, routing, block_size, **options)
    used = int(aligned.num_tokens_post_padded)
    return weights, ids, aligned.sorted_token_ids[:used], aligned.expert_ids[: used // int(block_size)]


def _routed_and_aligned_expected(
    router_logits: torch.Tensor, top_k: int, block_size: int, renormalize: bool = True,
    num_local_experts: int | None = None,
) -> Answer:  # fmt: skip
    weights, ids = moe_reference.route_tokens(router_logits, top_k, renormalize=renormalize)
    num_experts = router_logits.shape[1] if num_local_experts is None else int(num_local_experts)
    return weights, ids, *_alignment_expected(ids, block_size, num_experts)[:2]


_FLAGS: dict[str, Callable[[Any], Any]] = {"interleaved": bool}
CALLS = {
    "paged_attention": Call(
        _sequences,
        lambda **arguments: paged.paged_attention(**arguments, return_lse=True),
        _attention_expected,
        {"max_seqlen_q": int, "softmax_scale": float, "softcap": float, "causal": bool, "deterministic": bool},
    ),
    "cascade_attention": Call(
        _cascade,
        lambda **arguments: paged.cascade_attention(**arguments, return_lse=True),
        _cascade_expected,
        {"max_seqlen_q": int, "shared_prefix_len": int, "softmax_scale": float, "softcap": float},
    ),
    "reshape_and_cache": Call(_cache_write, _cache_written, cache_reference.reshape_and_cache),
    "rotary_embedding": Call(_rotary, paged.rotary_embedding, _rotary_expected, _FLAGS),
    "qk_norm_rope_and_cache": Call(_fused_write, _fused_written, _fused_expected, _FLAGS | {"eps": float}),
    "fused_moe": Call(_experts, lambda **arguments: (paged.fused_moe(**arguments),), _experts_expected, _FLAGS),
    "moe_align_block_size": Call(
        lambda: {"topk_ids": torch.randint(0, 6, (9, 3), dtype=torch.int32), "block_size": 4, "num_experts": 6},
        _alignment,
        _alignment_expected,
        {"block_size": int, "num_experts": int},
    ),
    "route_tokens": Call(
        lambda: {"router_logits": torch.randn(7, 6), "top_k": 2},
        paged.route_tokens,
        moe_reference.route_tokens,
        {"top_k": int, "routed_scaling_factor": float, "renormalize": bool, "num_shared_experts": int},
    ),
    "fused_add_rms_norm": Call(
        lambda: {"x": torch.randn(5, 24), "residual": torch.randn(5, 24), "weight": torch.rand(24)},
        paged.fused_add_rms_norm,
        _fused_add_expected,
        {"eps": float},
    ),
    "route_and_align": Call(
        lambda: {"router_logits": torch.randn(7, 6), "top_k": 2, "block_size": 4},
        _routed_and_aligned,
        _routed_and_aligned_expected,
        {"top_k": int, "block_size": int, "renormalize": bool},
    ),
    "add_lora": Call(_adapters, _adapted, _adapted_expected),
    "copy_blocks": Call(
        lambda: {"cache": torch.randn(6, 8), "block_pairs": torch.tensor([[0, 3], [5, 1]])}, _copied, _copied_expected
    ),
    "merge_attn_states": Call(_states, paged.merge_attn_states, attention_reference.merge_attn_states),
    "rms_norm": Call(
        lambda: {"x": torch.randn(5, 24), "weight": torch.rand(24)},
        lambda **arguments: (paged.rms_norm(**arguments),),
        lambda x, weight, eps=1e-6: (layers_reference.rms_norm(x, weight, eps),),
        {"eps": float},
    ),
    "silu_and_mul": Call(
        lambda: {"x": torch.randn(5, 24)},
        lambda **arguments: (paged.silu_and_mul(**arguments),),
        lambda x, activation="silu": (layers_reference.silu_and_mul(x, activation),),
    ),
    "greedy_argmax": Call(
        lambda: {"logits": torch.randn(3, 40), "token_mask": torch.rand(3, 40) < 0.5},
        lambda **arguments: (paged.greedy_argmax(**arguments),),
        lambda **arguments: (sampling_reference.greedy_argmax(**arguments),),
    ),
}  # fmt: skip
