"""Builds the work of each public kernel on random tensors, with its cost and its reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import paged
from paged.bench.attention.cases import AttentionCase, Layer, expected, ours
from paged.bench.attention.problem import Problem
from paged.bench.check import Result
from paged.bench.limits import Cost
from paged.bench.mla.problem import index_problem
from paged.bench.moe.cases import MoeCase, MoeModel
from paged.bench.timing import Call
from paged.cache.kv_cache import row_bytes
from paged.kernels.attention import reference as attention_reference
from paged.kernels.attention.cascade_attention import cascade_plans
from paged.kernels.cache import reference as cache_reference
from paged.kernels.cache.torch_ops.reshape_and_cache import cast_to_cache
from paged.kernels.layers import reference as layers_reference
from paged.kernels.lora import reference as lora_reference
from paged.kernels.mla import reference as mla_reference
from paged.kernels.moe import reference as moe_reference
from paged.kernels.moe.moe_align_block_size import max_num_blocks
from paged.kernels.quantization import reference as quantization_reference
from paged.kernels.quantization.quantize import quantize
from paged.kernels.sampling import reference as sampling_reference

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Work:
    """One operation and its tensors.

    call: runs it and returns the tensors that it made or changed.
    expected: the same tensors from the float64 reference; to be called first, as operations work in place.
    judged_as: for each tensor the dtype whose error budget counts; empty for their own. budgets: factor on it.
    """

    call: Call
    expected: Call
    cost: Cost
    judged_as: tuple[torch.dtype, ...] = ()
    budgets: float = 1

    def results(self) -> list[Result]:
        """Run the reference, then the operation."""
        want = tensors(self.expected())
        got = tensors(self.call())
        results = []
        for index, (tensor, reference) in enumerate(zip(got, want, strict=True)):
            judged_as = None
            if self.judged_as:
                judged_as = self.judged_as[index]
            results.append(Result(tensor, reference, judged_as, self.budgets))
        return results


def tensors(result: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return an operation's result as a sequence of tensors."""
    if isinstance(result, torch.Tensor):
        return [result]
    return result


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

    def rotary(self, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Shuffled positions, and cosines and sines of random angles."""
        angles = self.floats(tokens, dim // 2)
        return self.permutation(tokens), torch.cat([angles.cos(), angles.sin()], dim=1)


def work_of(operation: str, reference: Any, cost: Cost | int, *arguments: Any, **options: Any) -> Work:
    """Of an operation and the function of its name in a module of references, which take the same arguments.

    cost: bytes alone where nothing is multiplied.
    """
    if isinstance(cost, int):
        cost = Cost(0, cost)
    return Work(
        lambda: getattr(paged, operation)(*arguments, **options),
        lambda: getattr(reference, operation)(*arguments, **options),
        cost,
    )


@dataclass(frozen=True)
class _Int8Layer(Layer):
    """One whose caches are int8, with the scales of their rows."""

    k_scale: torch.Tensor
    v_scale: torch.Tensor


def paged_attention(
    draw: Draw, *, lengths: Sequence[tuple[int, int]], heads: tuple[int, int], dim: int, is_int8: bool = False
) -> Work:
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in lengths)
    case = AttentionCase("kernels", "lengths", groups, heads, BLOCK_SIZE, dim)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    cost = case.cost(draw.dtype)
    if is_int8:
        rows = 2 * heads[1] * sum(seq_len for _, seq_len in lengths)
        cost = Cost(cost.flops, cost.num_bytes - rows * (dim * draw.dtype.itemsize - row_bytes(dim, torch.int8)))
        k_cache, k_scale = cast_to_cache(layer.k_cache, None, torch.int8)
        v_cache, v_scale = cast_to_cache(layer.v_cache, None, torch.int8)
        assert k_scale is not None
        assert v_scale is not None
        layer = _Int8Layer(layer.q, k_cache, v_cache, k_scale, v_scale)
    return Work(ours(step, [layer])[0], lambda: expected(step, layer), cost)


def paged_mla_attention(
    draw: Draw, *, lengths: Sequence[tuple[int, int]], heads: int, sizes: tuple[int, int], chosen: int = 0
) -> Work:
    """A step over latents; chosen: the keys that a query sees, 2 (2 latent + rope) operations a head each."""
    latent, rope = sizes
    groups = tuple((1, q_len, seq_len) for q_len, seq_len in lengths)
    case = AttentionCase("kernels", "latents", groups, (heads, 1), 64, latent + rope, latent, latent=True)
    step, (layer,) = case.tensors(draw.device, draw.dtype, 1)
    cost = case.cost(draw.dtype)
    if not chosen:
        return Work(ours(step, [layer])[0], lambda: expected(step, layer), cost)
    first = torch.arange(len(layer.q), device=draw.device).remainder(7)[:, None]
    indices = (torch.arange(chosen, device=draw.device) * 3 + first).to(torch.int32)
    seq_lens = [seq_len for _, seq_len in lengths]
    indices = torch.where(indices < min(seq_lens), indices, -1)
    seen = int((indices >= 0).sum())
    unread = max(sum(seq_lens) - seen, 0) * (latent + rope) * draw.dtype.itemsize
    arguments = {"q": layer.q, "kv_cache": layer.k_cache[:, :, 0], **step.arguments, "indices": indices}
    arguments |= {"softmax_scale": (latent + rope) ** -0.5, "v_head_dim": latent}
    max_seqlen_q, plan = arguments.pop("max_seqlen_q"), step.plan()
    return Work(
        lambda: paged.paged_mla_attention(**arguments, max_seqlen_q=max_seqlen_q, plan=plan),
        lambda: mla_reference.paged_mla_attention(**arguments)[0],
        Cost(2 * heads * (2 * latent + rope) * seen, cost.num_bytes - unread),
    )


def choose_keys(draw: Draw, *, lengths: Sequence[tuple[int, int]], heads: int, dim: int, top_k: int) -> Work:
    """A query, a key and a head take 2 dim operations; a key's row is read once, a score written and read."""
    problem = Problem("", tuple(lengths), (heads, 1), dim, block_size=64, dtype=draw.dtype)
    arguments = index_problem(problem, draw.device, is_packed=True)
    pairs = num_keys = 0
    for q_len, seq_len in lengths:
        pairs += q_len * (2 * seq_len - q_len + 1) // 2
        num_keys += seq_len
    num_bytes = num_keys * (dim + 4) + 8 * pairs + _bytes(arguments["q"], arguments["weights"])
    return work_of("choose_keys", mla_reference, Cost(2 * heads * dim * pairs, num_bytes), **arguments, top_k=top_k)


def concat_and_cache_mla(draw: Draw, *, tokens: int, sizes: tuple[int, int]) -> Work:
    latent, k_rope = draw.normal(tokens, sizes[0]), draw.normal(tokens, sizes[1])
    num_blocks = -(-2 * tokens // BLOCK_SIZE)
    cache = draw.normal(num_blocks, BLOCK_SIZE, sum(sizes))
    slots = draw.permutation(num_blocks * BLOCK_SIZE)[:tokens]

    def call() -> torch.Tensor:
        paged.concat_and_cache_mla(latent, k_rope, cache, slots)
        return cache

    def expected() -> torch.Tensor:
        return cache_reference.concat_and_cache_mla(latent.cpu(), k_rope.cpu(), cache.cpu(), slots.cpu())

    return Work(call, expected, Cost(0, 2 * _bytes(latent, k_rope) + _bytes(slots)))


def concat_and_cache_mla_packed(draw: Draw, *, tokens: int, sizes: tuple[int, int]) -> Work:
    """Rows of 656 bytes: codes in e4m3, float32 scales, and the rotated part in bfloat16. Each part is judged as what
    it is: a code may be the neighbour of the nearest, as float32 rounds before the code is chosen."""
    latent, k_rope = draw.normal(tokens, sizes[0]), draw.normal(tokens, sizes[1])
    num_blocks = -(-2 * tokens // BLOCK_SIZE)
    cache = torch.zeros(num_blocks * BLOCK_SIZE, 656, dtype=torch.uint8, device=draw.device)
    slots = draw.permutation(len(cache))[:tokens]

    def call() -> list[torch.Tensor]:
        paged.concat_and_cache_mla(latent, k_rope, cache.view(num_blocks, BLOCK_SIZE, 656), slots)
        codes, scales, rope = cache.split((512, 16, 128), 1)
        return [codes.view(torch.float8_e4m3fn), scales.view(torch.float32), rope.view(torch.bfloat16)]

    def expected() -> list[torch.Tensor]:
        caches = []
        for rows in cache_reference.packed_latents(latent.cpu(), k_rope.cpu()):
            caches.append(rows.new_zeros(len(cache), rows.shape[1]).index_copy_(0, slots.cpu(), rows))
        return caches

    return Work(call, expected, Cost(0, _bytes(latent, k_rope, slots) + 656 * tokens))


def mla_norm_rope_and_cache(draw: Draw, *, tokens: int, heads: int, sizes: tuple[int, int]) -> Work:
    size, rope = sizes
    q = draw.normal(tokens, heads, rope)
    latent, k_rope = draw.normal(tokens, size), draw.normal(tokens, rope)
    cache = draw.normal(-(-2 * tokens // BLOCK_SIZE), BLOCK_SIZE, size + rope)
    slots = draw.permutation(len(cache) * BLOCK_SIZE)[:tokens]
    positions, cos_sin = draw.rotary(tokens, rope)
    weight = draw.normal(size)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        rotation = positions.cpu(), cos_sin.cpu(), True
        normed = layers_reference.rms_norm(latent, weight, 1e-6)
        rotated = layers_reference.rotate(k_rope.cpu().unsqueeze(1), *rotation)[:, 0]
        want = cache_reference.concat_and_cache_mla(normed, rotated, cache.cpu().double(), slots.cpu())
        return layers_reference.rotate(q.cpu(), *rotation), want

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        paged.mla_norm_rope_and_cache(q, latent, k_rope, cache, slots, positions, cos_sin, weight, interleaved=True)
        return q, cache

    return Work(call, expected, Cost(0, 2 * _bytes(q, latent, k_rope) + _bytes(slots, positions, cos_sin)))


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
    tensors = {**vars(layer), **step.arguments, "plan": plan, "prefix_plan": prefix_plan}
    cost = case.cost(draw.dtype)
    repeated = 2 * (sequences - 1) * prefix * heads[1] * dim * draw.dtype.itemsize
    return Work(
        lambda: paged.cascade_attention(**tensors, shared_prefix_len=prefix),
        lambda: expected(step, layer),
        Cost(cost.flops, cost.num_bytes - repeated),
    )


class _CacheWrite:
    """Keys and values, caches with twice the room, a random slot for each token, and scales of caches in e4m3."""

    def __init__(self, draw: Draw, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool) -> None:
        num_blocks = -(-2 * tokens // BLOCK_SIZE)
        self.k, self.v = draw.normals(2, tokens, num_kv_heads, dim)
        self.k_cache, self.v_cache = draw.normal(2, num_blocks, BLOCK_SIZE, num_kv_heads, dim)
        self.slots = draw.permutation(num_blocks * BLOCK_SIZE)[:tokens]
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

    def expected(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches in float64, unrounded."""
        k_cache, v_cache = self.k_cache.double().cpu(), self.v_cache.double().cpu()
        slots = self.slots.cpu()
        return cache_reference.reshape_and_cache(keys.cpu(), self.v.cpu(), k_cache, v_cache, slots, **self.scales)


def reshape_and_cache(draw: Draw, *, tokens: int, num_kv_heads: int, dim: int, is_fp8: bool = False) -> Work:
    write = _CacheWrite(draw, tokens, num_kv_heads, dim, is_fp8)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        paged.reshape_and_cache(*write.arguments, **write.scales)
        return write.k_cache, write.v_cache

    return Work(call, lambda: write.expected(write.k), Cost(0, write.num_bytes))


def copy_blocks(draw: Draw, *, num_caches: int, pairs: int, num_kv_heads: int, dim: int) -> Work:
    caches = draw.normals(num_caches, 2 * pairs, BLOCK_SIZE, num_kv_heads, dim)
    block_pairs = draw.permutation(2 * pairs).view(pairs, 2)

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


def merge_attn_states(draw: Draw, *, tokens: int, num_heads: int, dim: int) -> Work:
    out_a, out_b = draw.normals(2, tokens, num_heads, dim)
    lse_a, lse_b = draw.floats(2, num_heads, tokens)
    num_bytes = 3 * _bytes(out_a, lse_a)
    return work_of("merge_attn_states", attention_reference, num_bytes, out_a, lse_a, out_b, lse_b)


def rms_norm(draw: Draw, *, tokens: int, hidden_size: int) -> Work:
    x, weight = draw.normal(tokens, hidden_size), draw.normal(hidden_size)
    return work_of("rms_norm", layers_reference, _bytes(x, x, weight), x, weight, eps=1e-6)


def fused_add_rms_norm(draw: Draw, *, tokens: int, hidden_size: int) -> Work:
    x, residual = draw.normals(2, tokens, hidden_size)
    weight = draw.normal(hidden_size)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        total = (x.double() + residual.double()).to(draw.dtype)
        return layers_reference.rms_norm(total, weight, 1e-6), total

    cost = Cost(0, 2 * _bytes(x, residual) + _bytes(weight))
    return Work(lambda: paged.fused_add_rms_norm(x, residual, weight), expected, cost)


def rotary_embedding(draw: Draw, *, tokens: int, heads: tuple[int, int], dim: int) -> Work:
    q, k = draw.normal(tokens, heads[0], dim), draw.normal(tokens, heads[1], dim)
    positions, cos_sin = draw.rotary(tokens, dim)
    return Work(
        lambda: paged.rotary_embedding(positions, q, k, cos_sin),
        lambda: [layers_reference.rotate(x, positions, cos_sin, False) for x in (q, k)],
        Cost(0, 2 * _bytes(q, k) + _bytes(positions, cos_sin)),
    )


def qk_norm_rope_and_cache(draw: Draw, *, tokens: int, heads: tuple[int, int], dim: int, is_fp8: bool = False) -> Work:
    q, write = draw.normal(tokens, heads[0], dim), _CacheWrite(draw, tokens, heads[1], dim, is_fp8)
    positions, cos_sin = draw.rotary(tokens, dim)
    q_weight, k_weight = draw.normals(2, dim)

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = {"q_weight": q_weight, "k_weight": k_weight}
        rotated = paged.qk_norm_rope_and_cache(q, *write.arguments, positions, cos_sin, **weights, **write.scales)
        return rotated, write.k_cache, write.v_cache

    def expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed_q = layers_reference.rms_norm(q, q_weight, 1e-6)
        normed_k = layers_reference.rms_norm(write.k, k_weight, 1e-6)
        rotated_k = layers_reference.rotate(normed_k, positions, cos_sin, False)
        return layers_reference.rotate(normed_q, positions, cos_sin, False), *write.expected(rotated_k)

    cost = Cost(0, write.num_bytes + 2 * _bytes(q) + _bytes(positions, cos_sin, q_weight, k_weight))
    return Work(call, expected, cost)


def silu_and_mul(draw: Draw, *, tokens: int, size: int) -> Work:
    x = draw.normal(tokens, 2 * size)
    return work_of("silu_and_mul", layers_reference, _bytes(x) * 3 // 2, x)


def greedy_argmax(draw: Draw, *, rows: int, vocab_size: int) -> Work:
    logits = draw.normal(rows, vocab_size)
    return work_of("greedy_argmax", sampling_reference, _bytes(logits) + 8 * rows, logits)


def sample_tokens(draw: Draw, *, rows: int, vocab_size: int, **filters: float) -> Work:
    """Logits in float32, as forwards give them: read once, or three times where there are filters."""
    logits = 3 * draw.floats(rows, vocab_size)
    keys = torch.randint(0, 1 << 32, (rows, 2), device=draw.device)
    temperature = torch.full((rows,), 0.8, device=draw.device)
    options = {name: torch.full((rows,), value, device=draw.device) for name, value in filters.items()}
    num_bytes = _bytes(logits) + 8 * rows
    if filters:
        num_bytes += 2 * _bytes(logits)
    return work_of("sample_tokens", sampling_reference, num_bytes, logits, keys, temperature, **options)


def route_tokens(draw: Draw, *, tokens: int, num_experts: int, top_k: int) -> Work:
    logits = draw.normal(tokens, num_experts)
    return work_of("route_tokens", moe_reference, _bytes(logits) + 8 * tokens * top_k, logits, top_k)


def moe_align_block_size(draw: Draw, *, tokens: int, num_experts: int, top_k: int, block_size: int) -> Work:
    ids = draw.floats(tokens, num_experts).topk(top_k).indices.int().contiguous()
    return Work(
        lambda: paged.moe_align_block_size(ids, block_size, num_experts),
        lambda: _alignment(ids, block_size, num_experts),
        Cost(0, _bytes(ids) + _alignment_bytes(ids.numel(), block_size, num_experts)),
    )


def _alignment(ids: torch.Tensor, block_size: int, num_experts: int) -> list[torch.Tensor]:
    """The reference's alignment as the operation returns it."""
    blocks, experts, num_padded = moe_reference.moe_align_block_size(ids, block_size, num_experts)
    unused = max_num_blocks(ids.numel(), block_size, num_experts) - len(experts)
    return [
        functional.pad(torch.tensor(blocks).flatten(), (0, unused * block_size), value=ids.numel()),
        functional.pad(torch.tensor(experts), (0, unused), value=-1),
        torch.tensor([num_padded]),
    ]


def _alignment_bytes(num_entries: int, block_size: int, num_experts: int) -> int:
    """Of the three int32 tensors that an alignment consists of."""
    num_blocks = int(max_num_blocks(num_entries, block_size, num_experts))
    return 4 * (num_blocks * (block_size + 1) + 1)


def route_and_align(draw: Draw, *, tokens: int, num_experts: int, top_k: int, block_size: int) -> Work:
    logits = draw.normal(tokens, num_experts)
    ticket = torch.zeros(1, dtype=torch.int32, device=draw.device)
    routing = paged.Routing(top_k)

    def call() -> list[torch.Tensor]:
        weights, ids, aligned = paged.route_and_align(logits, routing, block_size, ticket=ticket)
        return [weights, ids, *aligned]

    def expected() -> list[torch.Tensor]:
        weights, ids = moe_reference.route_tokens(logits, top_k)
        return [weights, ids, *_alignment(ids, block_size, num_experts)]

    entries = tokens * top_k
    return Work(
        call, expected, Cost(0, _bytes(logits) + 8 * entries + _alignment_bytes(entries, block_size, num_experts))
    )


def fused_moe(
    draw: Draw, *, tokens: int, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int
) -> Work:
    model = MoeModel("kernels", num_experts, top_k, hidden_size, intermediate_size, num_experts)
    case = MoeCase(model, tokens, "balanced")
    layer, batch = case.layer(draw.device, draw.dtype), case.batch(draw.device, draw.dtype)
    return Work(
        layer.call(batch),
        lambda: moe_reference.fused_moe(*layer.arguments(batch)),
        case.cost(layer, batch),
        budgets=moe_budgets(draw.dtype),
    )


def moe_budgets(dtype: torch.dtype) -> int:
    """Return how many budgets the results of experts have: in 16 bits the activation is rounded too, which takes up to
    0.84 of one among 600 tokens."""
    if dtype == torch.float32:
        return 1
    return 2


def quantized_linear(
    draw: Draw, *, tokens: int, in_features: int, out_features: int, form: str, group_size: int
) -> Work:
    """Activations are e4m3 numbers with 1.75 as the largest of every 128, so that quantising them is exact."""
    x = draw.normal(tokens, in_features).clamp(-1.75, 1.75).to(torch.float8_e4m3fn).to(draw.dtype)
    x[:, ::128] = 1.75
    weight = quantize(draw.floats(out_features, in_features) / math.sqrt(in_features), form, group_size=group_size)
    moved = _bytes(x, weight.values, weight.scale) + tokens * out_features * draw.dtype.itemsize
    cost = Cost(2 * tokens * in_features * out_features, moved)
    return work_of("quantized_linear", quantization_reference, cost, x, weight)


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
    adapters: list[dict[int, tuple[torch.Tensor, torch.Tensor, float]]] = [{} for _ in ranks]
    products = [0] * num_adapters  # of a row
    for slot, part in itertools.product(range(num_adapters), range(num_parts)):
        rank = ranks[slot][part]
        products[slot] += rank * (in_features + part_sizes[part])
        if rank:
            down, up = a[slot, part, :rank], b[slot, :rank].split(part_sizes, dim=-1)[part]
            down.normal_(0, in_features**-0.5)
            up.normal_(0, rank**-0.5)
            adapters[slot][part] = down, up.T, float(scales[slot, part])
    rank_table = torch.tensor(ranks, dtype=torch.int32, device=draw.device)
    weights = paged.LoraWeights(a, b, rank_table, scales, part_sizes)
    grouped = paged.LoraBatch.group(torch.tensor(row_slots, dtype=torch.int32))
    batch = paged.LoraBatch(grouped.rows.to(draw.device), grouped.slots.to(draw.device))
    slots = [slot for slot in row_slots if slot >= 0]
    num_products = sum(products[slot] for slot in slots)
    moved = len(slots) * ((in_features + 2 * out_features) * draw.dtype.itemsize + 4)
    return Work(
        lambda: paged.add_lora(out, x, weights, batch),
        lambda: lora_reference.add_lora(out, x, adapters, part_sizes, row_slots),
        Cost(2 * num_products, moved + _bytes(a, b, rank_table, scales)),
    )
