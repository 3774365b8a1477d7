"""Small sound calls of every kernel wrapper, which `bench.operations` defines: what is made odd."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import paged
from paged.bench.attention.problem import Problem, make
from paged.bench.mla import problem as mla_problem
from paged.bench.operations import DEFINITIONS, Tensors

Arguments = dict[str, Any]
DEVICE = torch.device("cpu")


class Call(NamedTuple):
    """name: of the operation. arguments: makes a call's, flat. numbers: keywords that take a number or flag, with what
    makes a plain one of it. pack: makes the operation's arguments of flat ones.
    """

    name: str
    arguments: Callable[[], Arguments]
    numbers: dict[str, Callable[[Any], Any]] = {}  # noqa: RUF012 - never changed
    pack: Callable[[Arguments], Arguments] = dict

    def run(self, **arguments: Any) -> Tensors:
        """What the operation returns and writes."""
        return DEFINITIONS[self.name].call(self.pack(arguments))

    def expected(self, **arguments: Any) -> Tensors:
        return DEFINITIONS[self.name].want(self.pack(arguments))


def _sequences() -> Arguments:
    """Decode, verify and prompt rows; a block of 8, tables with room behind the sequences."""
    tensors = make(Problem("", ((1, 20), (3, 3), (9, 20)), heads=(4, 2), head_dim=16, block_size=8), DEVICE)
    return {**vars(tensors), "max_seqlen_q": 9}


def _latents() -> Arguments:
    problem = mla_problem.Problem("", ((1, 20), (3, 3), (9, 20)), sizes=(16, 16), block_size=8, chosen=12)
    return {**mla_problem.make(problem, DEVICE), "max_seqlen_q": 9}


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


def _fused_latent_write() -> Arguments:
    rotary = _rotary()
    where = {name: rotary[name] for name in ("positions", "cos_sin_cache")}
    return {"q_rope": rotary["query"], **_latent_write(), **where, "latent_weight": torch.rand(32)}


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


def _rotary() -> Arguments:
    angles = torch.randn(12, 8)
    table = torch.cat([angles.cos(), angles.sin()], 1)
    query, key = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    return {"positions": torch.tensor([0, 11, 3, 3, 7]), "query": query, "key": key, "cos_sin_cache": table}


def _fused_write() -> Arguments:
    write, rotary = _cache_write(), _rotary()
    weights = {"q_weight": torch.rand(16), "k_weight": torch.rand(16)}
    names = {"q": rotary["query"], "k": write.pop("key"), "v": write.pop("value")}
    return names | write | {name: rotary[name] for name in ("positions", "cos_sin_cache")} | weights


def _experts() -> Arguments:
    weights, ids = paged.route_tokens(torch.randn(12, 6), 3)
    w1, w2 = torch.randn(6, 32, 16) / 4, torch.randn(6, 16, 16) / 4
    return {"hidden_states": torch.randn(12, 16), "w1": w1, "w2": w2, "topk_weights": weights, "topk_ids": ids}


def _adapters() -> Arguments:
    a, b = torch.randn(2, 2, 4, 16), torch.randn(2, 4, 24)
    ranks, scales = torch.tensor([[4, 2], [3, 4]], dtype=torch.int32), torch.tensor([[0.5, 1.0], [2.0, -1.0]])
    rows = torch.full((2, 16), -1, dtype=torch.int32)
    rows[0, :2], rows[1, :1] = torch.tensor([4, 1]), 0
    slots = torch.tensor([1, 0], dtype=torch.int32)
    return {"out": torch.randn(5, 24), "x": torch.randn(5, 16), "a": a, "b": b, "ranks": ranks, "scales": scales,
            "rows": rows, "slots": slots}  # fmt: skip


def _adapted(arguments: Arguments) -> Arguments:
    """The arguments with those of weights and batch as such."""
    names = ("a", "b", "ranks", "scales")
    weights = paged.LoraWeights(*(arguments[name] for name in names), part_sizes=(16, 8))
    batch = paged.LoraBatch(arguments["rows"], arguments["slots"])
    return {"out": arguments["out"], "x": arguments["x"], "weights": weights, "batch": batch}


def _with_caches(arguments: Arguments) -> Arguments:
    return {"caches": [arguments["cache"]], "block_pairs": arguments["block_pairs"]}


def _packed() -> Arguments:
    return {
        "x": torch.randn(5, 64),
        "values": torch.randint(-127, 128, (24, 64), dtype=torch.int8),
        "scale": torch.rand(24, 2) / 127,
        "zero_point": torch.randint(-9, 9, (24, 2), dtype=torch.int8),
        "bias": torch.randn(24),
    }


def _with_weight(arguments: Arguments) -> Arguments:
    weight = paged.QuantizedWeight(arguments["values"], arguments["scale"], 64, arguments["zero_point"])
    return {"x": arguments["x"], "weight": weight, "bias": arguments["bias"]}


def _drawn() -> Arguments:
    penalties = {
        "rows": torch.tensor([1, -1, 0]),
        "counts": torch.randint(0, 3, (2, 40), dtype=torch.int32),
        "seen": torch.rand(2, 40) < 0.5,
        "weights": torch.rand(3, 3),
    }
    filters = {"top_k": torch.tensor([4, 40, 9]), "top_p": torch.full((3,), 0.9), "min_p": torch.full((3,), 0.01)}
    keys = torch.randint(0, 2**32, (3, 2))
    return {"logits": torch.randn(3, 40), "keys": keys, "temperature": torch.ones(3)} | filters | penalties


def _with_penalties(arguments: Arguments) -> Arguments:
    names = ("rows", "counts", "seen", "weights")
    others = {name: tensor for name, tensor in arguments.items() if name not in names}
    return others | {"penalties": paged.Penalties(*(arguments[name] for name in names))}


def _states() -> Arguments:
    lse = torch.randn(2, 2, 5) * 4
    lse[0, 0, 1], lse[:, 1, 2], lse[1, 0, 3] = -torch.inf, torch.inf, torch.inf
    out_a, out_b = torch.randn(2, 5, 2, 16)
    return {"out_a": out_a, "lse_a": lse[0], "out_b": out_b, "lse_b": lse[1]}


def _routed() -> Arguments:
    return {"router_logits": torch.randn(7, 6), "top_k": 2, "correction_bias": torch.randn(6), "block_size": 4}


def _with_routing(arguments: Arguments) -> Arguments:
    options = {name: arguments[name] for name in ("renormalize", "correction_bias") if name in arguments}
    routing = paged.Routing(arguments["top_k"], scoring="sigmoid", num_shared_experts=1, **options)
    return {"router_logits": arguments["router_logits"], "routing": routing, "block_size": arguments["block_size"]}


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


def _in_dataclasses(arguments: Arguments) -> Arguments:
    """The arguments with those of state and batch as such."""
    state = paged.RecurrentState(*(arguments[name] for name in _STATE))
    others = {name: each for name, each in arguments.items() if name not in (*_STATE, *_STEP)}
    return others | {"state": state, "batch": paged.RecurrentBatch(*(arguments[name] for name in _STEP))}


def _convolved() -> Arguments:
    arguments = _recurrent()
    x = {"x": arguments.pop("mixed"), "weight": torch.randn(32, 4), "bias": torch.randn(32)}
    return x | {name: value for name, value in arguments.items() if name not in ("A_log", "dt_bias")}


def _with_lse(arguments: Arguments) -> Arguments:
    return {**arguments, "return_lse": True}


_FLAGS: dict[str, Callable[[Any], Any]] = {"interleaved": bool}
_ATTENTION = {"max_seqlen_q": int, "softmax_scale": float}
_STEP_SIZES = {"max_seqlen_q": int, "max_append": int}
CALLS = {
    call.name: call
    for call in (
        Call(
            "paged_attention", _sequences,
            _ATTENTION | {"softcap": float, "causal": bool, "deterministic": bool}, _with_lse,
        ),
        Call("cascade_attention", _cascade, _ATTENTION | {"shared_prefix_len": int, "softcap": float}, _with_lse),
        Call("choose_keys", _scored_keys),
        Call(
            "paged_mla_attention", _latents,
            _ATTENTION | {"v_head_dim": int, "causal": bool, "deterministic": bool}, _with_lse,
        ),
        Call("concat_and_cache_mla", _latent_write),
        Call("mla_norm_rope_and_cache", _fused_latent_write, _FLAGS | {"eps": float}),
        Call("reshape_and_cache", _cache_write),
        Call("rotary_embedding", _rotary, _FLAGS),
        Call("qk_norm_rope_and_cache", _fused_write, _FLAGS | {"eps": float}),
        Call("fused_moe", _experts, _FLAGS),
        Call(
            "moe_align_block_size",
            lambda: {"topk_ids": torch.randint(0, 6, (9, 3), dtype=torch.int32), "block_size": 4, "num_experts": 6},
            {"block_size": int, "num_experts": int},
        ),
        Call(
            "route_tokens", lambda: {"router_logits": torch.randn(7, 6), "top_k": 2},
            {"top_k": int, "routed_scaling_factor": float, "renormalize": bool, "num_shared_experts": int},
        ),
        Call(
            "fused_add_rms_norm",
            lambda: {"x": torch.randn(5, 24), "residual": torch.randn(5, 24), "weight": torch.rand(24)},
            {"eps": float},
        ),
        Call(
            "route_and_align", _routed,
            {"top_k": int, "block_size": int, "renormalize": bool}, _with_routing,
        ),
        Call("add_lora", _adapters, {}, _adapted),
        Call(
            "copy_blocks", lambda: {"cache": torch.randn(6, 8), "block_pairs": torch.tensor([[0, 3], [5, 1]])}, {},
            _with_caches,
        ),
        Call("merge_attn_states", _states),
        Call("rms_norm", lambda: {"x": torch.randn(5, 24), "weight": torch.rand(24)}, {"eps": float}),
        Call("silu_and_mul", lambda: {"x": torch.randn(5, 24)}),
        Call("causal_conv1d", _convolved, _STEP_SIZES, _in_dataclasses),
        Call(
            "gated_delta_rule", lambda: _recurrent("a", "b") | {"num_k_heads": 1},
            _STEP_SIZES | {"num_k_heads": int, "eps": float, "beta_scale": float}, _in_dataclasses,
        ),
        Call(
            "mamba2_scan", lambda: _recurrent("dt") | {"num_groups": 1, "D": torch.randn(2)},
            _STEP_SIZES | {"num_groups": int}, _in_dataclasses,
        ),
        Call(
            "gated_rms_norm",
            lambda: dict(zip("xz", torch.randn(2, 5, 3, 8), strict=True), weight=torch.rand(8), norm_first=True),
            {"eps": float, "norm_first": bool, "group_size": int},
        ),
        Call("quantized_linear", _packed, {}, _with_weight),
        Call("sample_tokens", _drawn, {}, _with_penalties),
        Call("greedy_argmax", lambda: {"logits": torch.randn(3, 40), "token_mask": torch.rand(3, 40) < 0.5}),
    )
}  # fmt: skip
