"""What `paged verify` checks: every public kernel at the benchmarks' sizes, then options and edges of each.

A check yields pairs of tensors: what an operation gave, and what the float64 reference or a closed form says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import paged
from paged.batch import DecodeInput, UnifiedBatch, UnifiedBatchItem
from paged.bench.attention.problem import Problem, solve
from paged.bench.attention.problems import PROBLEMS
from paged.bench.kernels.cases import CASES, Case
from paged.bench.moe.formats import FORMATS, quantize
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.executors.command_line.closed_form import expected_logits
from paged.executors.paged_attention_executor import PagedAttentionExecutor, PagedExecutorConfig
from paged.kernels.attention import reference as attention_reference
from paged.kernels.cache import reference as cache_reference
from paged.kernels.common.device import use_triton
from paged.kernels.layers import reference as layers_reference
from paged.kernels.lora import reference as lora_reference
from paged.kernels.moe import reference as moe_reference

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
# Half of the time in the interpreter goes into these two.
_SLOW = ("fused_moe.prefill", "add_lora.prefill")
# Of the attention problems, one for every option.
_QUICK = ("mixed batch", "split decodes", "left window", "softcap", "sinks", "ALiBi", "tree", "fp8 cache", "coverage")


@dataclass(frozen=True)
class Check:
    """One row for every dtype. judged_as: whose budget results have, where not that of their own dtype; budgets: how
    many of them."""

    name: str
    pairs: Callable[[torch.device, torch.dtype], Pairs]
    judged_as: torch.dtype | None = None
    budgets: int = 1
    is_quick: bool = True


def _benchmarked(case: Case, device: torch.device, dtype: torch.dtype) -> Pairs:
    work = case.work("check", device, dtype)
    want, got = work.expected(), work.call()  # in this order, as operations work in place
    if isinstance(want, torch.Tensor) or isinstance(got, torch.Tensor):
        assert isinstance(want, torch.Tensor)
        assert isinstance(got, torch.Tensor)
        yield got, want
    else:
        yield from zip(got, want, strict=True)


def _attention(problem: Problem, device: torch.device, dtype: torch.dtype) -> Pairs:
    # Without the log-sum-exp the PyTorch twin takes another path.
    for return_lse in (True,) if use_triton(torch.empty(0, device=device)) else (True, False):
        solved = solve(replace(problem, dtype=dtype), device, return_lse=return_lse)
        yield solved.out, solved.expected_out
        if solved.lse is not None:
            yield solved.lse, solved.expected_lse


def _moe(device: torch.device, tokens: int, sizes: tuple[int, int, int], top_k: int) -> list[torch.Tensor]:
    """Hidden states and weights whose products have about unit variance, in float32, and where tokens go."""
    num_experts, hidden_size, intermediate_size = sizes
    x = torch.randn(tokens, hidden_size, device=device)
    w1 = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device) / math.sqrt(hidden_size)
    w2 = torch.randn(num_experts, hidden_size, intermediate_size, device=device) / math.sqrt(intermediate_size)
    return [x, w1, w2, *moe_reference.route_tokens(torch.randn(tokens, num_experts), top_k)]


def _moe_options(activation: str, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Interleaved gates, biases, and experts of another rank; one token takes matrix-vector products."""
    for tokens in (1, 12):
        x, w1, w2, weights, ids = _moe(device, tokens, (8, 48, 40), 2)
        tensors = [x.to(dtype), (4 * w1).to(dtype), w2.to(dtype), weights.float().to(device), ids.to(device)]
        options: dict[str, Any] = {
            "activation": activation,
            "interleaved": True,
            "w1_bias": torch.randn(8, 80, device=device),
            "w2_bias": torch.randn(8, 48, device=device),
            "expert_map": torch.tensor([3, 0, -1, 7, 5, -1, 1, 2], dtype=torch.int32, device=device),
        }
        yield paged.fused_moe(*tensors, **options), moe_reference.fused_moe(*tensors, **options)


def _quantized_moe(layout: str, device: torch.device, dtype: torch.dtype) -> Pairs:
    x, *whole, weights, ids = _moe(device, 5, (3, 192, 96), 2)
    (w1, w1_scale), (w2, w2_scale) = (quantize(w, *FORMATS[layout]) for w in whole)
    tensors = x.to(dtype), w1, w2, weights.float().to(device), ids.to(device)
    scales: dict[str, Any] = {"w1_scale": w1_scale, "w2_scale": w2_scale}
    yield paged.fused_moe(*tensors, **scales), moe_reference.fused_moe(*tensors, **scales)


def _routing(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Groups of experts, a bias as large as the scores, shared experts, and a row that holds NaN."""
    logits = torch.randn(9, 256, device=device, dtype=dtype)
    logits[4, 1] = math.nan
    for scoring in ("softmax", "sigmoid"):
        options: dict[str, Any] = {
            "scoring": scoring,
            "correction_bias": torch.rand(256, device=device),
            "num_expert_groups": 8,
            "topk_groups": 4,
            "routed_scaling_factor": 2.5,
            "num_shared_experts": 2,
        }
        yield from zip(
            paged.route_tokens(logits, 8, **options), moe_reference.route_tokens(logits, 8, **options), strict=True
        )


def _argmax(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Ties, masks, penalties, and a row with no token left."""
    logits = ((torch.randn(6, 5000, device=device) * 4).round() / 2).to(dtype)
    logits[2] = -math.inf
    for shape in ((5000,), (6, 5000)):
        options = {
            "token_mask": torch.rand(shape, device=device) < 0.8,
            "repetition_penalty": torch.where(torch.rand(shape, device=device) < 0.5, 1.0, 1.3),
        }
        yield paged.greedy_argmax(logits, **options), layers_reference.greedy_argmax(logits, **options)


def _rotary(interleaved: bool, device: torch.device, dtype: torch.dtype) -> Pairs:
    """A quarter of the head turns, positions repeat."""
    angles = torch.rand(64, 12, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([0, 40, 7, 7], device=device)
    q, k = (torch.randn(4, heads, 96, device=device, dtype=dtype) for heads in (5, 1))
    want = [layers_reference.rotate(x, positions, cos_sin, interleaved) for x in (q, k)]
    rotated_q, rotated_k = paged.rotary_embedding(positions, q, k, cos_sin, interleaved=interleaved)
    assert rotated_k is not None
    yield rotated_q, want[0]
    yield rotated_k, want[1]


def _skipped_slots(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Negative slots are skipped, in caches where K and V of a block lie side by side, blocks of 24 and odd heads."""
    key, value = (torch.randn(5, 3, 80, device=device, dtype=dtype) for _ in range(2))
    k_cache, v_cache = torch.randn(4, 2, 24, 3, 80, device=device, dtype=dtype).unbind(1)
    slots = torch.tensor([95, -1, 0, 25, -7], device=device)
    want = cache_reference.reshape_and_cache(key.cpu(), value.cpu(), k_cache.cpu(), v_cache.cpu(), slots)
    paged.reshape_and_cache(key, value, k_cache, v_cache, slots)
    yield k_cache, want[0]
    yield v_cache, want[1]


def _empty_states(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Rows that saw nothing, in one part or in both."""
    out_a, out_b = (torch.randn(7, 3, 80, device=device, dtype=dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(3, 7, device=device) * 5 for _ in range(2))
    lse_a[:, 1:4] = -math.inf
    lse_b[:, 3:6] = -math.inf
    got, want = (
        merge(out_a, lse_a, out_b, lse_b) for merge in (paged.merge_attn_states, attention_reference.merge_attn_states)
    )
    yield from zip(got, want, strict=True)


def _norms(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Sizes that fill no tile, and every activation."""
    x, weight = torch.randn(3, 1025, device=device, dtype=dtype) * 30, torch.randn(1025, device=device, dtype=dtype)
    yield paged.rms_norm(x, weight, 1e-5), layers_reference.rms_norm(x, weight, 1e-5)
    gates = torch.randn(3, 2 * 1025, device=device, dtype=dtype) * 4
    for activation in _ACTIVATIONS:
        yield paged.silu_and_mul(gates, activation=activation), layers_reference.silu_and_mul(gates, activation)


def _ragged_ranks(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Adapters of different ranks that leave parts alone, beside rows without one; what no adapter has is NaN."""
    sizes, ranks, max_rank = (40, 24, 24), ((4, 4, 4), (20, 0, 7), (0, 9, 0)), 20
    a = torch.full((3, 3, max_rank, 48), math.nan, device=device, dtype=dtype)
    b = torch.full((3, max_rank, sum(sizes)), math.nan, device=device, dtype=dtype)
    scales = torch.rand(3, 3, device=device) + 0.5
    adapters: list[dict[int, tuple[torch.Tensor, torch.Tensor, float]]] = [{}, {}, {}]
    for slot, part in ((slot, part) for slot in range(3) for part in range(3) if ranks[slot][part]):
        rank, columns = ranks[slot][part], slice(sum(sizes[:part]), sum(sizes[: part + 1]))
        a[slot, part, :rank] = torch.randn(rank, 48, device=device) / math.sqrt(48)
        b[slot, :rank, columns] = torch.randn(rank, sizes[part], device=device) / math.sqrt(rank)
        adapters[slot][part] = a[slot, part, :rank], b[slot, :rank, columns].T, float(scales[slot, part])
    rows = [1, -1, 0, 2, 2, 1, -1, 0]
    x, out = (torch.randn(len(rows), size, device=device, dtype=dtype) for size in (48, sum(sizes)))
    want = lora_reference.add_lora(out, x, adapters, sizes, rows)
    grouped = paged.LoraBatch.group(torch.tensor(rows, dtype=torch.int32))
    batch = paged.LoraBatch(grouped.rows.to(device), grouped.slots.to(device))
    weights = paged.LoraWeights(a, b, torch.tensor(ranks, dtype=torch.int32, device=device), scales, sizes)
    yield paged.add_lora(out, x, weights, batch), want


def _oracle(heads: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Pairs:
    """One-hot embeddings through cache and attention: chunks beside decode steps, verify rows, a fork, a truncation.

    Whatever a wrong block, position or weight does to an answer, it is no longer the histogram of the visible tokens.
    """
    config = PagedExecutorConfig(num_heads=heads[0], num_kv_heads=heads[1], max_sequence_length=128)
    cache = PagedKvCacheConfig(
        num_layers=2, num_kv_heads=heads[1], head_dim=8, block_size=8, num_blocks=64, dtype=dtype, device=device
    )
    manager = PagedKvCacheManager(cache)
    executor = PagedAttentionExecutor(config, manager)
    texts = {name: torch.randint(0, config.vocab_size, (length,)).tolist() for name, length in (("a", 61), ("b", 24))}

    def run(*items: tuple[str, int, int]) -> Pairs:
        batch = [UnifiedBatchItem(name, texts[name][start:end], pos_offset=start) for name, start, end in items]
        for (name, _, end), row in zip(items, executor.unified_decode(UnifiedBatch(batch)), strict=True):
            assert row is not None
            yield row.to(dtype), expected_logits(config, texts[name][:end])

    yield from run(("a", 0, 17), ("b", 0, 20))
    yield from run(("a", 17, 49), ("b", 20, 21))
    first = manager.get_handle("a")
    assert first is not None
    fork = manager.fork(first, "c")
    texts["c"] = texts["a"][:49] + texts["b"][:5]
    yield from run(("a", 49, 50), ("c", 49, 54), ("b", 21, 22))
    steps = [DecodeInput(torch.tensor([[token]]), fork) for token in texts["b"][5:8]]
    texts["c"] += texts["b"][5:8]
    for count, output in enumerate(executor.forward_verify(steps), 55):
        yield output.logits[0].to(dtype), expected_logits(config, texts["c"][:count])
    executor.truncate_kv(fork, 9)
    texts["c"] = texts["c"][:9] + texts["b"]
    yield from run(("c", 9, 33), ("a", 50, 61))


CHECKS = (
    *(Check(case.name, partial(_benchmarked, case), is_quick=case.name not in _SLOW) for case in CASES),
    *(
        Check(f"paged_attention: {problem.name}", partial(_attention, problem), is_quick=problem.name in _QUICK)
        for problem in PROBLEMS
    ),
    *(
        Check(f"fused_moe: {activation}", partial(_moe_options, activation), is_quick=activation == "swiglu_oai")
        for activation in _ACTIVATIONS
    ),
    *(
        # Rounding what e4m3 weights multiply, first the hidden states and then the activation, may tip either way.
        Check(
            f"fused_moe: {layout}",
            partial(_quantized_moe, layout),
            judged_as=torch.float8_e4m3fn if layout.startswith("e4m3") else None,
            budgets=2 if layout.startswith("e4m3") else 1,
        )
        for layout in FORMATS
    ),
    Check("route_tokens: groups, bias, shared experts", _routing),
    Check("greedy_argmax: ties, masks, penalties", _argmax),
    Check("rotary_embedding: a quarter of the head", partial(_rotary, False)),
    Check("rotary_embedding: interleaved", partial(_rotary, True)),
    Check("reshape_and_cache: skipped slots", _skipped_slots),
    Check("merge_attn_states: empty rows", _empty_states),
    Check("rms_norm, silu_and_mul: odd sizes", _norms),
    Check("add_lora: ragged ranks", _ragged_ranks),
    Check("oracle: a histogram of tokens", partial(_oracle, (4, 4))),
    Check("oracle: grouped heads", partial(_oracle, (4, 2))),
)
