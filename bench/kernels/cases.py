"""The work that bench_kernels times: one row or more for every public kernel, with its cost and its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import paged
from paged.bench.attention.cases import AttentionCase, expected, ours
from paged.bench.limits import Cost, moe_cost
from paged.bench.timing import Call
from paged.kernels.attention import reference as attention_reference
from paged.kernels.attention.cascade_attention import cascade_plans
from paged.kernels.cache import reference as cache_reference
from paged.kernels.layers import reference as layers_reference
from paged.kernels.lora import reference as lora_reference
from paged.kernels.moe import reference as moe_reference
from paged.kernels.moe.alignment import max_num_blocks
from paged.kernels.sampling import reference as sampling_reference

BLOCK_SIZE = 16
SCALES = ("full", "small", "check")  # for a GPU, for a CPU, for the comparison with the reference


@dataclass(frozen=True)
class Work:
    """One operation on tensors of its own.

    call: runs it and returns the tensors that it made or changed.
    expected: the same tensors from the float64 reference; to be called first, as operations work in place.
    """

    call: Call
    expected: Call
    cost: Cost


@dataclass(frozen=True)
class Case:
    """One row: `make` builds the operation's work from a device, a dtype and one value of each size.

    sizes: name -> values for SCALES. Those of "check" suit a slow reference and choose the attention and MoE tiles of
    "full".
    """

    operation: str
    make: Callable[..., Work]
    sizes: dict[str, tuple[Any, Any, Any]]
    variant: str = ""
    capturable: bool = True

    @property
    def name(self) -> str:
        return f"{self.operation}.{self.variant}" if self.variant else self.operation

    def size(self, scale: str) -> dict[str, Any]:
        return {name: values[SCALES.index(scale)] for name, values in self.sizes.items()}

    def work(self, scale: str, device: torch.device, dtype: torch.dtype) -> Work:
        return self.make(device, dtype, **self.size(scale))


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _paged_attention(
    device: torch.device, dtype: torch.dtype, *, lengths: Sequence[tuple[int, int]], heads: tuple[int, int], dim: int
) -> Work:
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in lengths)
    case = AttentionCase("kernels", "lengths", groups, heads, BLOCK_SIZE, dim)
    step, (layer,) = case.tensors(device, dtype, 1)
    return Work(ours(step, [layer])[0], lambda: expected(step, layer), case.cost(dtype))


def _cascade_attention(
    device: torch.device, dtype: torch.dtype, *, prefix: int, own: int, sequences: int, heads: tuple[int, int], dim: int
) -> Work:
    """A decode step of sequences with their own tokens after a shared prefix, whose K and V count once."""
    case = AttentionCase("kernels", "cascade", ((sequences, 1, prefix + own),), heads, BLOCK_SIZE, dim)
    step, (layer,) = case.tensors(device, dtype, 1)
    num_blocks = prefix // BLOCK_SIZE
    step.block_table[:, :num_blocks] = step.block_table[0, :num_blocks]
    lengths = {"shared_prefix_len": prefix, "max_seqlen_q": 1, "max_seqlen_k": step.max_seqlen_k}
    plan, prefix_plan = cascade_plans(step.cu_seqlens_q, step.seq_lens, num_tokens=sequences, **lengths)
    tensors = {**vars(layer), **step.arguments, "plan": plan, "prefix_plan": prefix_plan}
    cost = case.cost(dtype)
    repeated = 2 * (sequences - 1) * prefix * heads[1] * dim * dtype.itemsize
    return Work(
        lambda: paged.cascade_attention(**tensors, shared_prefix_len=prefix),
        lambda: expected(step, layer),
        Cost(cost.flops, cost.num_bytes - repeated),
    )


@dataclass(frozen=True)
class _CacheWrite:
    """Keys and values, caches with twice the room, a random slot for each token, and scales of caches in e4m3."""

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    scales: dict[str, torch.Tensor]

    @staticmethod
    def make(
        device: torch.device, dtype: torch.dtype, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool
    ) -> _CacheWrite:
        num_blocks = -(-2 * tokens // BLOCK_SIZE)
        k, v = (torch.randn(tokens, num_kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
        caches = torch.randn(2, num_blocks, BLOCK_SIZE, num_kv_heads, dim, device=device, dtype=dtype)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:tokens]
        if is_fp8:
            caches = caches.to(torch.float8_e4m3fn)
        names = ("k_scale", "v_scale") if is_fp8 else ()
        scales = {name: torch.rand(num_kv_heads, device=device) + 0.5 for name in names}
        return _CacheWrite(k, v, caches[0], caches[1], slots, scales)

    @property
    def num_bytes(self) -> int:
        """Keys and values read, and written in the caches' dtype."""
        written = (self.k.numel() + self.v.numel()) * self.k_cache.element_size()
        return _bytes(self.k, self.v, self.slots, *self.scales.values()) + written

    def expected(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches in float64, unrounded."""
        wide = [tensor.cpu() for tensor in (self.v, self.k_cache.double(), self.v_cache.double(), self.slots)]
        return cache_reference.reshape_and_cache(keys.cpu(), *wide, **self.scales)


def _reshape_and_cache(
    device: torch.device, dtype: torch.dtype, *, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool = False
) -> Work:
    write = _CacheWrite.make(device, dtype, tokens, num_kv_heads, dim, is_fp8)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        paged.reshape_and_cache(write.k, write.v, write.k_cache, write.v_cache, write.slots, **write.scales)
        return write.k_cache, write.v_cache

    return Work(call, lambda: write.expected(write.k), Cost(0, write.num_bytes))


def _copy_blocks(
    device: torch.device, dtype: torch.dtype, *, num_caches: int, pairs: int, num_kv_heads: int, dim: int
) -> Work:
    caches = [
        torch.randn(2 * pairs, BLOCK_SIZE, num_kv_heads, dim, device=device, dtype=dtype) for _ in range(num_caches)
    ]
    block_pairs = torch.randperm(2 * pairs, device=device).view(pairs, 2)

    def call() -> list[torch.Tensor]:
        paged.copy_blocks(caches, block_pairs)
        return caches

    def expected() -> list[torch.Tensor]:
        copies = [cache.clone() for cache in caches]
        for copy in copies:
            for source, destination in block_pairs.tolist():
                copy[destination] = copy[source]
        return copies

    return Work(call, expected, Cost(0, _bytes(*caches) + _bytes(block_pairs)))


def _merge_attn_states(device: torch.device, dtype: torch.dtype, *, tokens: int, num_heads: int, dim: int) -> Work:
    out_a, out_b = (torch.randn(tokens, num_heads, dim, device=device, dtype=dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(num_heads, tokens, device=device) for _ in range(2))
    return Work(
        lambda: paged.merge_attn_states(out_a, lse_a, out_b, lse_b),
        lambda: attention_reference.merge_attn_states(out_a, lse_a, out_b, lse_b),
        Cost(0, 3 * _bytes(out_a, lse_a)),
    )


def _rms_norm(device: torch.device, dtype: torch.dtype, *, tokens: int, hidden_size: int) -> Work:
    x = torch.randn(tokens, hidden_size, device=device, dtype=dtype)
    weight = torch.randn(hidden_size, device=device, dtype=dtype)
    return Work(
        lambda: paged.rms_norm(x, weight),
        lambda: layers_reference.rms_norm(x, weight, 1e-6),
        Cost(0, _bytes(x, x, weight)),
    )


def _fused_add_rms_norm(device: torch.device, dtype: torch.dtype, *, tokens: int, hidden_size: int) -> Work:
    x, residual = (torch.randn(tokens, hidden_size, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(hidden_size, device=device, dtype=dtype)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        total = (x.double() + residual.double()).to(dtype)
        return layers_reference.rms_norm(total, weight, 1e-6), total

    return Work(
        lambda: paged.fused_add_rms_norm(x, residual, weight),
        expected,
        Cost(0, 2 * _bytes(x, residual) + _bytes(weight)),
    )


def _rotary(device: torch.device, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffled positions, and cosines and sines of random angles."""
    angles = torch.randn(tokens, dim // 2, device=device)
    return torch.randperm(tokens, device=device), torch.cat([angles.cos(), angles.sin()], dim=1)


def _rotary_embedding(
    device: torch.device, dtype: torch.dtype, *, tokens: int, heads: tuple[int, int], dim: int
) -> Work:
    q, k = (torch.randn(tokens, num_heads, dim, device=device, dtype=dtype) for num_heads in heads)
    positions, cos_sin = _rotary(device, tokens, dim)
    return Work(
        lambda: paged.rotary_embedding(positions, q, k, cos_sin),
        lambda: [layers_reference.rotate(x, positions, cos_sin, False) for x in (q, k)],
        Cost(0, 2 * _bytes(q, k) + _bytes(positions, cos_sin)),
    )


def _qk_norm_rope_and_cache(
    device: torch.device, dtype: torch.dtype, *, tokens: int, heads: tuple[int, int], dim: int, is_fp8: bool = False
) -> Work:
    q = torch.randn(tokens, heads[0], dim, device=device, dtype=dtype)
    write = _CacheWrite.make(device, dtype, tokens, heads[1], dim, is_fp8)
    positions, cos_sin = _rotary(device, tokens, dim)
    q_weight, k_weight = (torch.randn(dim, device=device, dtype=dtype) for _ in range(2))

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        written = (write.k, write.v, write.k_cache, write.v_cache, write.slots)
        weights = {"q_weight": q_weight, "k_weight": k_weight}
        rotated = paged.qk_norm_rope_and_cache(q, *written, positions, cos_sin, **weights, **write.scales)
        return rotated, write.k_cache, write.v_cache

    def expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rotated_q, rotated_k = (
            layers_reference.rotate(layers_reference.rms_norm(x, weight, 1e-6), positions, cos_sin, False)
            for x, weight in ((q, q_weight), (write.k, k_weight))
        )
        return rotated_q, *write.expected(rotated_k)

    return Work(
        call, expected, Cost(0, write.num_bytes + 2 * _bytes(q) + _bytes(positions, cos_sin, q_weight, k_weight))
    )


def _silu_and_mul(device: torch.device, dtype: torch.dtype, *, tokens: int, size: int) -> Work:
    x = torch.randn(tokens, 2 * size, device=device, dtype=dtype)
    return Work(lambda: paged.silu_and_mul(x), lambda: layers_reference.silu_and_mul(x), Cost(0, _bytes(x) * 3 // 2))


def _greedy_argmax(device: torch.device, dtype: torch.dtype, *, rows: int, vocab_size: int) -> Work:
    logits = torch.randn(rows, vocab_size, device=device, dtype=dtype)
    return Work(
        lambda: paged.greedy_argmax(logits),
        lambda: sampling_reference.greedy_argmax(logits),
        Cost(0, _bytes(logits) + 8 * rows),
    )


def _sample_tokens(
    device: torch.device, dtype: torch.dtype, *, rows: int, vocab_size: int, top_k: int = 0, top_p: float = 1.0
) -> Work:
    """Logits in float32, as forwards give them; with filters their least is three times 4 bytes a logit, else once."""
    del dtype
    arguments: dict[str, Any] = {
        "logits": 3 * torch.randn(rows, vocab_size, device=device),
        "keys": torch.randint(0, 1 << 32, (rows, 2), device=device),
        "temperature": torch.full((rows,), 0.8, device=device),
    }
    if top_k:
        arguments["top_k"] = torch.full((rows,), top_k, device=device)
    if top_p < 1:
        arguments["top_p"] = torch.full((rows,), top_p, device=device)
    reads = 1 if len(arguments) == 3 else 3
    return Work(
        lambda: paged.sample_tokens(**arguments),
        lambda: sampling_reference.sample_tokens(**arguments),
        Cost(0, reads * _bytes(arguments["logits"]) + 8 * rows),
    )


def _route_tokens(device: torch.device, dtype: torch.dtype, *, tokens: int, num_experts: int, top_k: int) -> Work:
    logits = torch.randn(tokens, num_experts, device=device, dtype=dtype)
    return Work(
        lambda: paged.route_tokens(logits, top_k),
        lambda: moe_reference.route_tokens(logits, top_k),
        Cost(0, _bytes(logits) + 8 * tokens * top_k),
    )


def _routed_ids(device: torch.device, tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, num_experts, device=device).topk(top_k).indices.int().contiguous()


def _moe_align_block_size(
    device: torch.device, dtype: torch.dtype, *, tokens: int, num_experts: int, top_k: int, block_size: int
) -> Work:
    ids = _routed_ids(device, tokens, num_experts, top_k)
    num_blocks = max_num_blocks(ids.numel(), block_size, num_experts)
    call = lambda: paged.moe_align_block_size(ids, block_size, num_experts)  # noqa: E731
    expected = lambda: _alignment(ids, block_size, num_experts, num_blocks)  # noqa: E731
    return Work(call, expected, Cost(0, _bytes(ids) + 4 * (num_blocks * block_size + num_blocks + 1)))


def _alignment(ids: torch.Tensor, block_size: int, num_experts: int, num_blocks: int) -> list[torch.Tensor]:
    """The reference's alignment as the operation returns it."""
    blocks, experts, num_padded = moe_reference.moe_align_block_size(ids, block_size, num_experts)
    unused = num_blocks - len(experts)
    return [
        functional.pad(torch.tensor(blocks).flatten(), (0, unused * block_size), value=ids.numel()),
        functional.pad(torch.tensor(experts), (0, unused), value=-1),
        torch.tensor([num_padded]),
    ]


def _route_and_align(
    device: torch.device, dtype: torch.dtype, *, tokens: int, num_experts: int, top_k: int, block_size: int
) -> Work:
    logits = torch.randn(tokens, num_experts, device=device, dtype=dtype)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    num_blocks = max_num_blocks(tokens * top_k, block_size, num_experts)
    routing = paged.Routing(top_k)

    def call() -> list[torch.Tensor]:
        weights, ids, aligned = paged.route_and_align(logits, routing, block_size, ticket=ticket)
        return [weights, ids, *aligned]

    def expected() -> list[torch.Tensor]:
        weights, ids = moe_reference.route_tokens(logits, top_k)
        return [weights, ids, *_alignment(ids, block_size, num_experts, num_blocks)]

    moved = 8 * tokens * top_k + 4 * (num_blocks * block_size + num_blocks + 1)
    return Work(call, expected, Cost(0, _bytes(logits) + moved))


def _fused_moe(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
) -> Work:
    x = torch.randn(tokens, hidden_size, device=device, dtype=dtype)
    w1 = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device, dtype=dtype)
    w2 = torch.randn(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
    w1.div_(math.sqrt(hidden_size))
    w2.div_(math.sqrt(intermediate_size))
    ids = _routed_ids(device, tokens, num_experts, top_k)
    weights = torch.rand(tokens, top_k, device=device)
    cost = moe_cost(
        torch.bincount(ids.flatten(), minlength=num_experts).tolist(),
        num_tokens=tokens,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        element_size=dtype.itemsize,
    )
    arguments = (x, w1, w2, weights, ids)
    return Work(lambda: paged.fused_moe(*arguments), lambda: moe_reference.fused_moe(*arguments), cost)


def _add_lora(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    num_adapters: int,
    rank: int,
    in_features: int,
    part_sizes: tuple[int, ...],
) -> Work:
    """Every fifth row is the base model's, the others take the adapters in turn, each of which changes every part."""
    row_slots = [-1 if row % 5 == 0 else row % num_adapters for row in range(tokens)]
    x = torch.randn(tokens, in_features, device=device, dtype=dtype)
    out = torch.randn(tokens, sum(part_sizes), device=device, dtype=dtype)
    a = torch.randn(num_adapters, len(part_sizes), rank, in_features, device=device, dtype=dtype)
    b = torch.randn(num_adapters, rank, sum(part_sizes), device=device, dtype=dtype)
    a.div_(math.sqrt(in_features))
    b.div_(math.sqrt(rank))
    ranks = torch.full((num_adapters, len(part_sizes)), rank, dtype=torch.int32, device=device)
    weights = paged.LoraWeights(a, b, ranks, torch.ones(ranks.shape, device=device), part_sizes)
    grouped = paged.LoraBatch.group(torch.tensor(row_slots, dtype=torch.int32))
    batch = paged.LoraBatch(grouped.rows.to(device), grouped.slots.to(device))

    def expected() -> torch.Tensor:
        columns = [part.mT for part in b.split(part_sizes, dim=-1)]
        adapters = [
            {part: (a[slot, part], columns[part][slot], 1.0) for part in range(len(part_sizes))}
            for slot in range(num_adapters)
        ]
        return lora_reference.add_lora(out, x, adapters, part_sizes, row_slots)

    adapted = sum(slot >= 0 for slot in row_slots)
    products = adapted * rank * (len(part_sizes) * in_features + sum(part_sizes))
    moved = adapted * (in_features + 2 * sum(part_sizes)) * dtype.itemsize
    cost = Cost(2 * products, moved + _bytes(a, b, ranks, weights.scales) + 4 * adapted)
    return Work(lambda: paged.add_lora(out, x, weights, batch), expected, cost)


# Heads and widths of Qwen3-8B, experts of Qwen3-30B-A3B (Qwen, 2025).
_TOKENS = (4096, 256, 19)
_HEADS, _DIM = ((32, 8), (8, 2), (8, 2)), (128, 64, 128)
_ROTARY = {"tokens": _TOKENS, "heads": _HEADS, "dim": _DIM}
_KV = {"num_kv_heads": (8, 2, 2), "dim": _DIM}
_NORM = {"tokens": _TOKENS, "hidden_size": (4096, 1024, 4096)}
_EXPERTS = {"num_experts": (128, 16, 16), "top_k": (8, 4, 4)}
_QKV = {"in_features": (4096, 1024, 4096), "part_sizes": ((4096, 1024, 1024), (1024, 256, 256), (4096, 1024, 1024))}
_MOE = {**_EXPERTS, "hidden_size": (2048, 256, 256), "intermediate_size": (768, 128, 128)}
_SAMPLING = {"rows": (256, 16, 2), "vocab_size": (151936, 32000, 9000)}

_Lengths = list[tuple[int, int]]


def _attention_case(variant: str, *lengths: *tuple[_Lengths, _Lengths, _Lengths]) -> Case:
    return Case("paged_attention", _paged_attention, {"lengths": lengths, "heads": _HEADS, "dim": _DIM}, variant)


CASES = (
    _attention_case("prefill", [(2048, 2048)] * 4, [(256, 256)] * 2, [(70, 70), (33, 33)]),
    _attention_case("decode", [(1, 4096)] * 32, [(1, 512)] * 8, [(1, 600), (1, 33), (1, 1)]),
    _attention_case(
        "mixed", [(2048, 4096), *[(1, 4096)] * 31], [(128, 256), *[(1, 512)] * 7], [(40, 100), (1, 600), (1, 17)]
    ),
    Case(
        "cascade_attention",
        _cascade_attention,
        {
            "prefix": (32768, 1024, 64),
            "own": (512, 64, 20),
            "sequences": (64, 8, 3),
            "heads": _HEADS,
            "dim": _DIM,
        },
    ),
    Case("reshape_and_cache", _reshape_and_cache, {"tokens": _TOKENS, **_KV}),
    Case("reshape_and_cache", partial(_reshape_and_cache, is_fp8=True), {"tokens": _TOKENS, **_KV}, "fp8"),
    # The addresses of all layers' caches travel to the device in the call, which a graph cannot capture.
    Case("copy_blocks", _copy_blocks, {"num_caches": (72, 8, 3), "pairs": (256, 16, 4), **_KV}, capturable=False),
    Case("merge_attn_states", _merge_attn_states, {"tokens": _TOKENS, "num_heads": (32, 8, 8), "dim": _DIM}),
    Case("rms_norm", _rms_norm, _NORM),
    Case("fused_add_rms_norm", _fused_add_rms_norm, _NORM),
    Case("rotary_embedding", _rotary_embedding, _ROTARY),
    Case("qk_norm_rope_and_cache", _qk_norm_rope_and_cache, _ROTARY),
    Case("qk_norm_rope_and_cache", partial(_qk_norm_rope_and_cache, is_fp8=True), _ROTARY, "fp8"),
    Case("silu_and_mul", _silu_and_mul, {"tokens": _TOKENS, "size": (12288, 1024, 12288)}),
    Case("greedy_argmax", _greedy_argmax, {"rows": (128, 16, 2), "vocab_size": (151936, 32000, 9000)}),
    Case("sample_tokens", _sample_tokens, _SAMPLING),
    Case("sample_tokens", partial(_sample_tokens, top_p=0.95), _SAMPLING, "top_p"),
    Case("sample_tokens", partial(_sample_tokens, top_k=50, top_p=0.95), _SAMPLING, "top_k_top_p"),
    Case("route_tokens", _route_tokens, {"tokens": _TOKENS, **_EXPERTS}),
    Case("moe_align_block_size", _moe_align_block_size, {"tokens": _TOKENS, **_EXPERTS, "block_size": (128, 16, 16)}),
    Case("route_and_align", _route_and_align, {"tokens": (256, 64, 19), **_EXPERTS, "block_size": (16, 16, 16)}),
    Case("fused_moe", _fused_moe, {"tokens": (16, 16, 6), **_MOE}, "decode"),
    Case("fused_moe", _fused_moe, {"tokens": (4096, 256, 600), **_MOE}, "prefill"),
    Case(
        "add_lora", _add_lora, {"tokens": (64, 32, 19), "num_adapters": (8, 4, 3), "rank": (16,) * 3, **_QKV}, "decode"
    ),
    Case(
        "add_lora",
        _add_lora,
        {"tokens": (4096, 256, 80), "num_adapters": (4, 2, 3), "rank": (64,) * 3, **_QKV},
        "prefill",
    ),
)
