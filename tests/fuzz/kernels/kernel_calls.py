"""Small sound calls of every kernel wrapper, each with the float64 reference's answer: what is made odd."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import paged
from paged.bench.attention.problem import Problem, make
from paged.bench.mla import problem as mla_problem
from paged.kernels.attention import reference as attention_reference
from paged.kernels.cache import reference as cache_reference
from paged.kernels.layers import reference as layers_reference
from paged.kernels.lora import reference as lora_reference
from paged.kernels.mla import reference as mla_reference
from paged.kernels.moe import reference as moe_reference
from paged.kernels.moe.routing import Routing
from paged.kernels.recurrent import reference as recurrent_reference
from paged.kernels.sampling import reference as sampling_reference

Arguments = dict[str, Any]
Answer = tuple[torch.Tensor, ...]
DEVICE = torch.device("cpu")


class Call(NamedTuple):
    """arguments: makes a call's. run: the operation, which returns what it computes or writes. expected: the answer.
    numbers: keywords that take a number or flag, with what makes a plain one of it.
    """

    arguments: Callable[[], Arguments]
    run: Callable[..., torch.Tensor | Answer]
    expected: Callable[..., torch.Tensor | Answer]
    numbers: dict[str, Callable[[Any], Any]] = {}  # noqa: RUF012 - never changed


def _sequences() -> Arguments:
    """Decode, verify and prompt rows; a block of 8, tables with room behind the sequences."""
    tensors = make(Problem("", ((1, 20), (3, 3), (9, 20)), heads=(4, 2), head_dim=16, block_size=8), DEVICE)
    return {**vars(tensors), "max_seqlen_q": 9}


def _attention_expected(*, max_seqlen_q: Any, shared_prefix_len: Any = 0, **arguments: Any) -> Answer:
    return attention_reference.paged_attention(**arguments)


def _latents() -> Arguments:
    problem = mla_problem.Problem("", ((1, 20), (3, 3), (9, 20)), sizes=(16, 16), block_size=8, chosen=12)
    return {**mla_problem.make(problem, DEVICE), "max_seqlen_q": 9}


def _latents_expected(*, max_seqlen_q: Any, deterministic: Any = False, **arguments: Any) -> Answer:
    return mla_reference.paged_mla_attention(**arguments)


def _scored_keys() -> Arguments:
    problem = Problem("", ((1, 20), (3, 3), (9, 20)), heads=(4, 1), head_dim=16, block_size=8)
    return {**mla_problem.index_problem(problem, DEVICE), "top_k": 5}


def _latent_write() -> Arguments:
    slots = torch.tensor([3, 31, -1, 0, 9])
    return {
        "latent": torch.randn(5, 32),
        "k_rope": torch.randn(5, 16),
        "kv_cache": torch.zeros(4, 8, 48),
        "slot_mapping": slots,
    }


def _latent_written(**arguments: Any) -> torch.Tensor:
    paged.concat_and_cache_mla(**arguments)
    written: torch.Tensor = arguments["kv_cache"]
    return written


def _fused_latent_write() -> Arguments:
    rotary = _rotary()
    where = {name: rotary[name] for name in ("positions", "cos_sin_cache")}
    return {"q_rope": rotary["query"], **_latent_write(), **where, "latent_weight": torch.rand(32)}


def _fused_latent_written(**arguments: Any) -> Answer:
    return paged.mla_norm_rope_and_cache(**arguments), arguments["kv_cache"]


def _fused_latent_expected(eps: float = 1e-6, interleaved: bool = False, **given: Any) -> Answer:
    where = (given["positions"], given["cos_sin_cache"], interleaved)
    latent = layers_reference.rms_norm(given["latent"], given["latent_weight"], eps)
    k_rope = layers_reference.rotate(given["k_rope"].unsqueeze(1), *where)[:, 0]
    cache = cache_reference.concat_and_cache_mla(latent, k_rope, given["kv_cache"].double(), given["slot_mapping"])
    return layers_reference.rotate(given["q_rope"], *where), cache


def _cascade() -> Arguments:
    arguments = _sequences()
    table = arguments["block_table"]
    table[:, 0] = table[0, 0]
    table[table >= len(arguments["k_cache"])] = 1
    arguments["block_table"] = torch.nn.functional.pad(table, (0, 1), value=2)
    arguments["seq_lens"] += 8
    for cache in ("k_cache", "v_cache"):
        arguments[cache] = arguments[cache].nan_to_num(0.5)
    return {**arguments, "shared_prefix_len": 8}


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


def _rotary_expected(query: torch.Tensor, key: torch.Tensor, interleaved: bool = False, **where: Any) -> Answer:
    positions, table = where["positions"], where["cos_sin_cache"]
    return tuple(layers_reference.rotate(x, positions, table, interleaved) for x in (query, key))


def _fused_write() -> Arguments:
    write, rotary = _cache_write(), _rotary()
    weights = {"q_weight": torch.rand(16), "k_weight": torch.rand(16)}
    names = {"q": rotary["query"], "k": write.pop("key"), "v": write.pop("value")}
    return names | write | {name: rotary[name] for name in ("positions", "cos_sin_cache")} | weights


def _fused_written(**arguments: Any) -> Answer:
    return paged.qk_norm_rope_and_cache(**arguments), arguments["k_cache"], arguments["v_cache"]


def _fused_expected(eps: float = 1e-6, interleaved: bool = False, **given: Any) -> Answer:
    normed = {one: layers_reference.rms_norm(given[one[0]], given[f"{one[0]}_weight"], eps) for one in ("query", "key")}
    where = {name: given[name] for name in ("positions", "cos_sin_cache")}
    q, k = _rotary_expected(**normed, interleaved=interleaved, **where)
    v, *caches = (given[name].double() for name in ("v", "k_cache", "v_cache"))
    return q, *cache_reference.reshape_and_cache(k, v, *caches, given["slot_mapping"])


def _experts() -> Arguments:
    weights, ids = paged.route_tokens(torch.randn(12, 6), 3)
    w1, w2 = torch.randn(6, 32, 16) / 4, torch.randn(6, 16, 16) / 4
    return {"hidden_states": torch.randn(12, 16), "w1": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids}


def _experts_expected(**arguments: Any) -> torch.Tensor:
    ids = arguments["topk_ids"]  # those that name no expert contribute nothing
    known = torch.where((ids >= 0) & (ids < len(arguments["w1"])), ids, -1)
    return moe_reference.fused_moe(**{**arguments, "topk_ids": known})


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


def _adapted(out: torch.Tensor, x: torch.Tensor, rows: Any, slots: Any, **weights: Any) -> torch.Tensor:
    paged.add_lora(out, x, paged.LoraWeights(**weights, part_sizes=(24,)), paged.LoraBatch(rows, slots))
    return out


def _adapted_expected(out: torch.Tensor, x: torch.Tensor, rows: Any, slots: Any, **weights: Any) -> torch.Tensor:
    a, b, ranks, scales = (weights[name] for name in ("a", "b", "ranks", "scales"))
    adapters = []
    for slot, (rank,) in enumerate(ranks.tolist()):
        adapters.append({0: (a[slot, 0, :rank], b[slot, :rank].T, float(scales[slot, 0]))} if rank else {})
    row_slots = [-1] * len(x)
    for block, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        for row in block:
            if row >= 0 and slot >= 0:
                row_slots[row] = slot
    return lora_reference.add_lora(out, x, adapters, (24,), row_slots)


def _copied(cache: torch.Tensor, block_pairs: torch.Tensor) -> torch.Tensor:
    paged.copy_blocks([cache], block_pairs)
    return cache


def _copied_expected(cache: torch.Tensor, block_pairs: torch.Tensor) -> torch.Tensor:
    result = cache.double()
    for source, destination in torch.as_tensor(block_pairs).tolist():
        result[destination] = cache[source].double()
    return result


def _states() -> Arguments:
    lse = torch.randn(2, 2, 5) * 4
    lse[0, 0, 1], lse[:, 1, 2], lse[1, 0, 3] = -torch.inf, torch.inf, torch.inf
    out_a, out_b = torch.randn(2, 5, 2, 16)
    return {"out_a": out_a, "lse_a": lse[0], "out_b": out_b, "lse_b": lse[1]}


def _fused_add_expected(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Answer:
    total = (residual.double() + x.double()).to(residual.dtype)
    return layers_reference.rms_norm(total, weight, eps), total.double()


def _routed_and_aligned(router_logits: torch.Tensor, top_k: int, block_size: int, renormalize: Any = True) -> Answer:
    routing = Routing(top_k, renormalize=renormalize)
    weights, ids, aligned = paged.route_and_align(router_logits, routing, block_size)
    used = int(aligned.num_tokens_post_padded)
    return weights, ids, aligned.sorted_token_ids[:used], aligned.expert_ids[: used // int(block_size)]


def _routed_and_aligned_expected(
    router_logits: torch.Tensor, top_k: int, block_size: int, renormalize: bool = True
) -> Answer:
    weights, ids = moe_reference.route_tokens(router_logits, top_k, renormalize=renormalize)
    return weights, ids, *_alignment_expected(ids, block_size, router_logits.shape[1])[:2]


def _recurrent(*names: str) -> Arguments:
    """A scan, a verify row in place, one that goes to another slot, and a sequence without tokens."""
    step = [[0, 9, 11, 12, 12], [60, 5, 7, 3], [2, 4, 6, 1], [3, 4, 7, 1], [1, 2, 0, 9], [5, -1, -1, -1], [64, 0, 0, 0]]
    batch = dict(zip(_TABLES, (torch.tensor(column, dtype=torch.int32) for column in step), strict=True))
    ring_k = torch.nn.functional.normalize(torch.randn(8, 16, 1, 8), dim=-1)
    ring_u, ring_g = torch.randn(8, 16, 2, 8), -torch.rand(8, 16, 2)
    state = {"conv": torch.randn(8, 19, 32), "state": torch.randn(8, 2, 8, 8)}
    gates = {name: torch.randn(12, 2) for name in names} | {"A_log": torch.randn(2), "dt_bias": torch.randn(2)}
    state |= {"ring_k": ring_k, "ring_u": ring_u, "ring_g": ring_g}
    return {"mixed": torch.randn(12, 32), **gates, **state, **batch, "max_seqlen_q": 9, "max_append": 4}


_STATE = ("conv", "state", "ring_k", "ring_u", "ring_g")
_TABLES = ("cu_seqlens_q", "starts", "read_slots", "write_slots", "cursors", "snapshot_slots", "snapshot_lens")
_STEP = (*_TABLES, "max_seqlen_q", "max_append")


def _step_of(operation: Callable[..., Any], **arguments: Any) -> Answer:
    """The operation with its state and batch out of their parts; what it returns and what it leaves in the state."""
    parts = {name: arguments[name] for name in _STATE}
    found = operation(**in_dataclasses(arguments))
    if not isinstance(found, recurrent_reference.Written):
        return found, *parts.values()
    return found.out, *(parts[name] if found[at] is None else found[at] for at, name in enumerate(_STATE, 1))


def in_dataclasses(arguments: Arguments) -> Arguments:
    """The arguments with those of state and batch as such."""
    state = paged.RecurrentState(*(arguments[name] for name in _STATE))
    others = {name: each for name, each in arguments.items() if name not in (*_STATE, *_STEP)}
    return others | {"state": state, "batch": paged.RecurrentBatch(*(arguments[name] for name in _STEP))}


def _convolved() -> Arguments:
    arguments = _recurrent()
    x = {"x": arguments.pop("mixed"), "weight": torch.randn(32, 4), "bias": torch.randn(32)}
    return x | {name: value for name, value in arguments.items() if name not in ("A_log", "dt_bias")}


_FLAGS: dict[str, Callable[[Any], Any]] = {"interleaved": bool}
CALLS = {
    "paged_attention": Call(
        _sequences, lambda **arguments: paged.paged_attention(**arguments, return_lse=True), _attention_expected,
        {"max_seqlen_q": int, "softmax_scale": float, "softcap": float, "causal": bool, "deterministic": bool},
    ),
    "cascade_attention": Call(
        _cascade, lambda **arguments: paged.cascade_attention(**arguments, return_lse=True), _attention_expected,
        {"max_seqlen_q": int, "shared_prefix_len": int, "softmax_scale": float, "softcap": float},
    ),
    "choose_keys": Call(_scored_keys, lambda **arguments: paged.choose_keys(**arguments), mla_reference.choose_keys),
    "paged_mla_attention": Call(
        _latents, lambda **arguments: paged.paged_mla_attention(**arguments, return_lse=True), _latents_expected,
        {"max_seqlen_q": int, "v_head_dim": int, "softmax_scale": float, "causal": bool, "deterministic": bool},
    ),
    "concat_and_cache_mla": Call(_latent_write, _latent_written, cache_reference.concat_and_cache_mla),
    "mla_norm_rope_and_cache": Call(
        _fused_latent_write, _fused_latent_written, _fused_latent_expected, _FLAGS | {"eps": float}
    ),
    "reshape_and_cache": Call(_cache_write, _cache_written, cache_reference.reshape_and_cache),
    "rotary_embedding": Call(_rotary, paged.rotary_embedding, _rotary_expected, _FLAGS),
    "qk_norm_rope_and_cache": Call(_fused_write, _fused_written, _fused_expected, _FLAGS | {"eps": float}),
    "fused_moe": Call(_experts, paged.fused_moe, _experts_expected, _FLAGS),
    "moe_align_block_size": Call(
        lambda: {"topk_ids": torch.randint(0, 6, (9, 3), dtype=torch.int32), "block_size": 4, "num_experts": 6},
        _alignment, _alignment_expected, {"block_size": int, "num_experts": int},
    ),
    "route_tokens": Call(
        lambda: {"router_logits": torch.randn(7, 6), "top_k": 2}, paged.route_tokens, moe_reference.route_tokens,
        {"top_k": int, "routed_scaling_factor": float, "renormalize": bool, "num_shared_experts": int},
    ),
    "fused_add_rms_norm": Call(
        lambda: {"x": torch.randn(5, 24), "residual": torch.randn(5, 24), "weight": torch.rand(24)},
        paged.fused_add_rms_norm, _fused_add_expected, {"eps": float},
    ),
    "route_and_align": Call(
        lambda: {"router_logits": torch.randn(7, 6), "top_k": 2, "block_size": 4}, _routed_and_aligned,
        _routed_and_aligned_expected, {"top_k": int, "block_size": int, "renormalize": bool},
    ),
    "add_lora": Call(_adapters, _adapted, _adapted_expected),
    "copy_blocks": Call(
        lambda: {"cache": torch.randn(6, 8), "block_pairs": torch.tensor([[0, 3], [5, 1]])}, _copied, _copied_expected
    ),
    "merge_attn_states": Call(_states, paged.merge_attn_states, attention_reference.merge_attn_states),
    "rms_norm": Call(
        lambda: {"x": torch.randn(5, 24), "weight": torch.rand(24)}, paged.rms_norm,
        lambda x, weight, eps=1e-6: layers_reference.rms_norm(x, weight, eps), {"eps": float},
    ),
    "silu_and_mul": Call(
        lambda: {"x": torch.randn(5, 24)}, paged.silu_and_mul,
        lambda x, activation="silu": layers_reference.silu_and_mul(x, activation),
    ),
    "causal_conv1d": Call(
        _convolved, partial(_step_of, paged.causal_conv1d), partial(_step_of, recurrent_reference.causal_conv1d),
        {"max_seqlen_q": int, "max_append": int},
    ),
    "gated_delta_rule": Call(
        lambda: _recurrent("a", "b") | {"num_k_heads": 1}, partial(_step_of, paged.gated_delta_rule),
        partial(_step_of, recurrent_reference.gated_delta_rule),
        {"max_seqlen_q": int, "max_append": int, "num_k_heads": int, "eps": float, "beta_scale": float},
    ),
    "mamba2_scan": Call(
        lambda: _recurrent("dt") | {"num_groups": 1, "D": torch.randn(2)}, partial(_step_of, paged.mamba2_scan),
        partial(_step_of, recurrent_reference.mamba2_scan), {"max_seqlen_q": int, "max_append": int, "num_groups": int},
    ),
    "gated_rms_norm": Call(
        lambda: dict(zip("xz", torch.randn(2, 5, 3, 8), strict=True)) | {"weight": torch.rand(8), "norm_first": True},
        paged.gated_rms_norm, recurrent_reference.gated_rms_norm,
        {"eps": float, "norm_first": bool, "group_size": int},
    ),
    "greedy_argmax": Call(
        lambda: {"logits": torch.randn(3, 40), "token_mask": torch.rand(3, 40) < 0.5}, paged.greedy_argmax,
        sampling_reference.greedy_argmax,
    ),
}  # fmt: skip
