"""Builds the work of each public kernel on random tensors, with its cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import paged
from paged.bench.attention.cases import AttentionCase
from paged.bench.attention.problem import Problem
from paged.bench.check import Result
from paged.bench.limits import Cost
from paged.bench.mla.problem import index_problem
from paged.bench.moe.cases import MoeCase, MoeModel
from paged.bench.operations import DEFINITIONS, Arguments, Judgement, map_tensors, without_how
from paged.cache.kv_cache import row_bytes
from paged.kernels.attention.cascade_attention import cascade_plans
from paged.kernels.cache.torch_ops.reshape_and_cache import cast_to_cache
from paged.kernels.quantization.quantize import quantize

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Work:
    """One operation and its arguments by name.

    judgement: replaces that of the operation's definition.
    """

    operation: str
    arguments: Arguments
    cost: Cost
    judgement: Judgement | None = None

    def call(self) -> Any:
        """Run the operation and return what it returns."""
        return getattr(paged, self.operation)(**self.arguments)

    def results(self) -> list[Result]:
        """Run the reference, then the operation."""
        return list(DEFINITIONS[self.operation].check(self.arguments, self.judgement).values())

    def check(self) -> None:
        """Raise WrongResultError unless the operation's results equal the float64 reference's."""
        for result in self.results():
            result.check()


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Draw:
    """Random tensors on a device, by default in a dtype."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def normals(self, count: int, *shape: int) -> list[torch.Tensor]:
        return [self.normal(*shape) for _ in range(count)]

    def floats(self, *shape: int) -> torch.Tensor:
        """In float32."""
        return torch.randn(shape, device=self.device)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, device=self.device)

    def slots(self, tokens: int) -> tuple[int, torch.Tensor]:
        """The blocks of a cache with twice the room, and a random slot for each token."""
        num_blocks = -(-2 * tokens // BLOCK_SIZE)
        return num_blocks, self.permutation(num_blocks * BLOCK_SIZE)[:tokens]

    def rotary(self, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Shuffled positions, and cosines and sines of random angles."""
        angles = self.floats(tokens, dim // 2)
        return self.permutation(tokens), torch.cat([angles.cos(), angles.sin()], dim=1)


def plain_work(operation: str, *positional: Any, **named: Any) -> Work:
    """Work that multiplies nothing, and reads its arguments and writes its results once each."""
    definition = DEFINITIONS[operation]
    arguments = definition.by_name(*positional, **named)
    results = definition.call(map_tensors(torch.clone, arguments))
    read = [value for value in without_how(arguments).values() if isinstance(value, torch.Tensor)]
    return Work(operation, arguments, Cost(0, _bytes(*read, *results.values())))


def work_of(operation: str, cost: Cost | int, *positional: Any, **named: Any) -> Work:
    """cost: bytes alone where nothing is multiplied."""
    if isinstance(cost, int):
        cost = Cost(0, cost)
    return Work(operation, DEFINITIONS[operation].by_name(*positional, **named), cost)


def paged_attention(
    draw: Draw, *, lengths: Sequence[tuple[int, int]], heads: tuple[int, int], dim: int, is_int8: bool = False
) -> Work:
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in lengths)
    case = AttentionCase("kernels", "lengths", groups, heads, BLOCK_SIZE, dim)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    cost = case.cost(draw.dtype)
    arguments = {**vars(layer), **step.arguments, "plan": step.plan()}
    if is_int8:
        rows = 2 * heads[1] * sum(seq_len for _, seq_len in lengths)
        cost = Cost(cost.flops, cost.num_bytes - rows * (dim * draw.dtype.itemsize - row_bytes(dim, torch.int8)))
        for name in ("k", "v"):
            cache = arguments[f"{name}_cache"]
            arguments[f"{name}_cache"], arguments[f"{name}_scale"] = cast_to_cache(cache, None, torch.int8)
    return Work("paged_attention", arguments, cost)


def paged_mla_attention(
    draw: Draw, *, lengths: Sequence[tuple[int, int]], heads: int, sizes: tuple[int, int], chosen: int = 0
) -> Work:
    """A step over latents; chosen: the keys that a query sees, 2 (2 latent + rope) operations a head each."""
    latent, rope = sizes
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in lengths)
    case = AttentionCase("kernels", "latents", groups, (heads, 1), 64, latent + rope, latent, latent=True)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    cost = case.cost(draw.dtype)
    arguments = {"q": layer.q, "kv_cache": layer.k_cache[:, :, 0], **step.arguments, "plan": step.plan()}
    arguments |= {"softmax_scale": (latent + rope) ** -0.5, "v_head_dim": latent}
    if chosen:
        first = torch.arange(len(layer.q), device=draw.device).remainder(7)[:, None]
        indices = (torch.arange(chosen, device=draw.device) * 3 + first).to(torch.int32)
        seq_lens = [seq_len for _, seq_len in lengths]
        indices = torch.where(indices < min(seq_lens), indices, -1)
        seen = int((indices >= 0).sum())
        unread = max(sum(seq_lens) - seen, 0) * (latent + rope) * draw.dtype.itemsize
        cost = Cost(2 * heads * (2 * latent + rope) * seen, cost.num_bytes - unread)
        arguments["indices"] = indices
    return Work("paged_mla_attention", arguments, cost)


def choose_keys(draw: Draw, *, lengths: Sequence[tuple[int, int]], heads: int, dim: int, top_k: int) -> Work:
    """A query, a key and a head take 2 dim operations; a key's row is read once, a score written and read."""
    problem = Problem("", tuple(lengths), (heads, 1), dim, block_size=64, dtype=draw.dtype)
    arguments = index_problem(problem, draw.device, is_packed=True)
    pairs = num_keys = 0
    for q_len, seq_len in lengths:
        pairs += q_len * (2 * seq_len - q_len + 1) // 2
        num_keys += seq_len
    num_bytes = num_keys * (dim + 4) + 8 * pairs + _bytes(arguments["q"], arguments["weights"])
    return work_of("choose_keys", Cost(2 * heads * dim * pairs, num_bytes), **arguments, top_k=top_k)


def concat_and_cache_mla(draw: Draw, *, tokens: int, sizes: tuple[int, int], is_packed: bool = False) -> Work:
    """is_packed: into rows of 656 bytes, codes in e4m3, float32 scales, and the rotated part in bfloat16."""
    latent, k_rope = draw.normal(tokens, sizes[0]), draw.normal(tokens, sizes[1])
    num_blocks, slots = draw.slots(tokens)
    cache = draw.normal(num_blocks, BLOCK_SIZE, sum(sizes))
    if is_packed:
        cache = torch.zeros(num_blocks, BLOCK_SIZE, 656, dtype=torch.uint8, device=draw.device)
    num_bytes = _bytes(latent, k_rope, slots) + tokens * cache[0, 0].nbytes
    return work_of("concat_and_cache_mla", num_bytes, latent, k_rope, cache, slots)


def mla_norm_rope_and_cache(draw: Draw, *, tokens: int, heads: int, sizes: tuple[int, int]) -> Work:
    size, rope = sizes
    q = draw.normal(tokens, heads, rope)
    latent, k_rope = draw.normal(tokens, size), draw.normal(tokens, rope)
    num_blocks, slots = draw.slots(tokens)
    cache = draw.normal(num_blocks, BLOCK_SIZE, size + rope)
    positions, cos_sin = draw.rotary(tokens, rope)
    tensors = q, latent, k_rope, cache, slots, positions, cos_sin, draw.normal(size)
    num_bytes = 2 * _bytes(q, latent, k_rope) + _bytes(slots, positions, cos_sin)
    return work_of("mla_norm_rope_and_cache", num_bytes, *tensors, interleaved=True)


def cascade_attention(
    draw: Draw, *, prefix: int, suffix: int, sequences: int, heads: tuple[int, int], dim: int
) -> Work:
    """A decode step of sequences with tokens of their own after a shared prefix, whose K and V count once."""
    case = AttentionCase("kernels", "cascade", ((sequences, 1, prefix + suffix),), heads, BLOCK_SIZE, dim)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    num_blocks = prefix // BLOCK_SIZE
    step.block_table[:, :num_blocks] = step.block_table[0, :num_blocks]
    lengths = {"shared_prefix_len": prefix, "max_seqlen_q": 1, "max_seqlen_k": step.max_seqlen_k}
    plan, prefix_plan = cascade_plans(step.cu_seqlens_q, step.seq_lens, num_tokens=sequences, **lengths)
    arguments = {**vars(layer), **step.arguments, "plan": plan, "prefix_plan": prefix_plan}
    arguments["shared_prefix_len"] = prefix
    cost = case.cost(draw.dtype)
    repeated = 2 * (sequences - 1) * prefix * heads[1] * dim * draw.dtype.itemsize
    return Work("cascade_attention", arguments, Cost(cost.flops, cost.num_bytes - repeated))


class _CacheWrite:
    """Keys and values, caches, a slot for each token, and scales of caches in e4m3."""

    def __init__(self, draw: Draw, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool) -> None:
        num_blocks, self.slots = draw.slots(tokens)
        self.k, self.v = draw.normals(2, tokens, num_kv_heads, dim)
        self.k_cache, self.v_cache = draw.normal(2, num_blocks, BLOCK_SIZE, num_kv_heads, dim)
        self.scales: dict[str, torch.Tensor] = {}
        if is_fp8:
            self.k_cache, self.v_cache = self.k_cache.to(torch.float8_e4m3fn), self.v_cache.to(torch.float8_e4m3fn)
            for name in ("k_scale", "v_scale"):
                self.scales[name] = torch.rand(num_kv_heads, device=draw.device) + 0.5

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.k, self.v, self.k_cache, self.v_cache, self.slots

    @property
    def num_bytes(self) -> int:
        """Keys and values read, and written in the caches' dtype."""
        written = (self.k.numel() + self.v.numel()) * self.k_cache.element_size()
        return _bytes(self.k, self.v, self.slots, *self.scales.values()) + int(written)


def reshape_and_cache(draw: Draw, *, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool = False) -> Work:
    write = _CacheWrite(draw, tokens, num_kv_heads, dim, is_fp8)
    return work_of("reshape_and_cache", write.num_bytes, *write.arguments, **write.scales)


def copy_blocks(draw: Draw, *, num_caches: int, pairs: int, num_kv_heads: int, dim: int) -> Work:
    caches = draw.normals(num_caches, 2 * pairs, BLOCK_SIZE, num_kv_heads, dim)
    block_pairs = draw.permutation(2 * pairs).view(pairs, 2)
    return work_of("copy_blocks", _bytes(*caches) + _bytes(block_pairs), caches, block_pairs)


def merge_attn_states(draw: Draw, *, tokens: int, num_heads: int, dim: int) -> Work:
    out_a, out_b = draw.normals(2, tokens, num_heads, dim)
    lse_a, lse_b = draw.floats(2, num_heads, tokens)
    return plain_work("merge_attn_states", out_a, lse_a, out_b, lse_b)


def rms_norm(draw: Draw, *, tokens: int, hidden_size: int) -> Work:
    x, weight = draw.normal(tokens, hidden_size), draw.normal(hidden_size)
    return plain_work("rms_norm", x, weight)


def fused_add_rms_norm(draw: Draw, *, tokens: int, hidden_size: int) -> Work:
    x, residual = draw.normals(2, tokens, hidden_size)
    weight = draw.normal(hidden_size)
    return plain_work("fused_add_rms_norm", x, residual, weight)


def rotary_embedding(draw: Draw, *, tokens: int, heads: tuple[int, int], dim: int) -> Work:
    q, k = draw.normal(tokens, heads[0], dim), draw.normal(tokens, heads[1], dim)
    positions, cos_sin = draw.rotary(tokens, dim)
    return plain_work("rotary_embedding", positions, q, k, cos_sin)


def qk_norm_rope_and_cache(draw: Draw, *, tokens: int, heads: tuple[int, int], dim: int, is_fp8: bool = False) -> Work:
    q, write = draw.normal(tokens, heads[0], dim), _CacheWrite(draw, tokens, heads[1], dim, is_fp8)
    positions, cos_sin = draw.rotary(tokens, dim)
    q_weight, k_weight = draw.normals(2, dim)
    num_bytes = write.num_bytes + 2 * _bytes(q) + _bytes(positions, cos_sin, q_weight, k_weight)
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    rotation = positions, cos_sin
    return work_of("qk_norm_rope_and_cache", num_bytes, q, *write.arguments, *rotation, **weights, **write.scales)


def silu_and_mul(draw: Draw, *, tokens: int, size: int) -> Work:
    return plain_work("silu_and_mul", draw.normal(tokens, 2 * size))


def greedy_argmax(draw: Draw, *, rows: int, vocab_size: int) -> Work:
    return plain_work("greedy_argmax", draw.normal(rows, vocab_size))


def sample_tokens(draw: Draw, *, rows: int, vocab_size: int, **filters: float) -> Work:
    """Logits in float32, as forwards give them: read once, or three times where there are filters."""
    logits = 3 * draw.floats(rows, vocab_size)
    keys = torch.randint(0, 1 << 32, (rows, 2), device=draw.device)
    temperature = torch.full((rows,), 0.8, device=draw.device)
    options = {name: torch.full((rows,), value, device=draw.device) for name, value in filters.items()}
    num_bytes = _bytes(logits) + 8 * rows
    if filters:
        num_bytes += 2 * _bytes(logits)
    return work_of("sample_tokens", num_bytes, logits, keys, temperature, **options)


def route_tokens(draw: Draw, *, tokens: int, num_experts: int, top_k: int) -> Work:
    return plain_work("route_tokens", draw.normal(tokens, num_experts), top_k)


def moe_align_block_size(draw: Draw, *, tokens: int, num_experts: int, top_k: int, block_size: int) -> Work:
    ids = draw.floats(tokens, num_experts).topk(top_k).indices.int().contiguous()
    return plain_work("moe_align_block_size", ids, block_size, num_experts)


def route_and_align(draw: Draw, *, tokens: int, num_experts: int, top_k: int, block_size: int) -> Work:
    logits = draw.normal(tokens, num_experts)
    ticket = torch.zeros(1, dtype=torch.int32, device=draw.device)
    return plain_work("route_and_align", logits, paged.Routing(top_k), block_size, ticket=ticket)


def fused_moe(
    draw: Draw, *, tokens: int, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int
) -> Work:
    model = MoeModel("kernels", num_experts, top_k, hidden_size, intermediate_size, num_experts)
    case = MoeCase(model, tokens, "balanced")
    layer, batch = case.layer(draw.device, draw.dtype), case.batch(draw.device, draw.dtype)
    return work_of("fused_moe", case.cost(layer, batch), *layer.arguments(batch))


def quantized_linear(
    draw: Draw, *, tokens: int, in_features: int, out_features: int, form: str, group_size: int
) -> Work:
    """Activations are e4m3 numbers with 1.75 as the largest of every 128, so that quantising them is exact."""
    x = draw.normal(tokens, in_features).clamp(-1.75, 1.75).to(torch.float8_e4m3fn).to(draw.dtype)
    x[:, ::128] = 1.75
    weight = quantize(draw.floats(out_features, in_features) / math.sqrt(in_features), form, group_size=group_size)
    moved = _bytes(x, weight.values, weight.scale) + tokens * out_features * draw.dtype.itemsize
    cost = Cost(2 * tokens * in_features * out_features, moved)
    return Work("quantized_linear", {"x": x, "weight": weight}, cost, Judgement())


def add_lora(
    draw: Draw, *, tokens: int, num_adapters: int, rank: int, in_features: int, part_sizes: tuple[int, ...]
) -> Work:
    """Every fifth row is the base model's, the others take the adapters in turn, each of which changes every part."""
    row_slots = [row % num_adapters for row in range(tokens)]
    row_slots[::5] = [-1] * len(row_slots[::5])
    return lora_work(draw, row_slots, in_features, part_sizes, [[rank] * len(part_sizes)] * num_adapters)


def lora_work(
    draw: Draw,
    row_slots: list[int],
    in_features: int,
    part_sizes: tuple[int, ...],
    ranks: Sequence[Sequence[int]],
) -> Work:
    """Adapters of ranks[slot][part], 0 for a part that one leaves alone; rows of slot -1 take none. Weights beyond an
    adapter's ranks are NaN."""
    num_adapters, num_parts, out_features, max_rank = len(ranks), len(part_sizes), sum(part_sizes), max(map(max, ranks))
    x, out = draw.normal(len(row_slots), in_features), draw.normal(len(row_slots), out_features)
    a = torch.full_like(x[:1], math.nan).repeat(num_adapters, num_parts, max_rank, 1)
    b = torch.full_like(out[:1], math.nan).repeat(num_adapters, max_rank, 1)
    scales = torch.rand(num_adapters, num_parts, device=draw.device) + 0.5
    products = [0] * num_adapters  # of a row
    for slot, part in itertools.product(range(num_adapters), range(num_parts)):
        rank = ranks[slot][part]
        products[slot] += rank * (in_features + part_sizes[part])
        if rank:
            down, up = a[slot, part, :rank], b[slot, :rank].split(part_sizes, dim=-1)[part]
            down.normal_(0, in_features**-0.5)
            up.normal_(0, rank**-0.5)
    rank_table = torch.tensor(ranks, dtype=torch.int32, device=draw.device)
    weights = paged.LoraWeights(a, b, rank_table, scales, part_sizes)
    grouped = paged.LoraBatch.group(torch.tensor(row_slots, dtype=torch.int32))
    batch = paged.LoraBatch(grouped.rows.to(draw.device), grouped.slots.to(draw.device))
    slots = [slot for slot in row_slots if slot >= 0]
    num_products = sum(products[slot] for slot in slots)
    moved = len(slots) * ((in_features + 2 * out_features) * draw.dtype.itemsize + 4)
    cost = Cost(2 * num_products, moved + _bytes(a, b, rank_table, scales))
    return work_of("add_lora", cost, out, x, weights, batch)
