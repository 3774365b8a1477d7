"""Checks of `paged verify`: every public kernel at the benchmarks' sizes, then its options and edge cases.

A check yields results of operations beside those of the float64 reference or of a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from paged.batch import DecodeInput, UnifiedBatch, UnifiedBatchItem
from paged.bench.attention import problem as attention_problem
from paged.bench.attention.problem import Problem
from paged.bench.attention.problems import PROBLEMS
from paged.bench.check import Result
from paged.bench.kernels.cases import CASES, Case
from paged.bench.kernels.work import Draw, lora_work
from paged.bench.mla import problem as mla_problem
from paged.bench.moe.cases import MoeCase, MoeModel
from paged.bench.moe.formats import FORMATS
from paged.bench.operations import DEFINITIONS, Judgement
from paged.bench.verification.candidate import NotTakenError
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.executors.closed_form import expected_logits
from paged.executors.paged_attention_executor import PagedAttentionExecutor, PagedExecutorConfig
from paged.kernels.common.device import use_triton
from paged.kernels.quantization import reference
from paged.kernels.quantization.cpu_experts import ExpertProducts
from paged.kernels.quantization.cpu_product import CpuProduct, cpu_of_experts
from paged.kernels.quantization.quantize import quantize
from paged.kernels.quantization.weight import QuantizedWeight

Results = Iterator[Result]
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
# These two take half of the time in the interpreter.
_SLOW = ("fused_moe.prefill", "add_lora.prefill")
# Attention problems of a quick run, one for every option.
_QUICK = (
    "mixed batch",
    "split decodes",
    "left window",
    "softcap",
    "sinks",
    "ALiBi",
    "tree",
    "fp8 cache",
    "int8 cache",
    "coverage",
)


@dataclass(frozen=True)
class Check:
    """One row for every dtype."""

    name: str
    results: Callable[[torch.device, torch.dtype], Results]
    is_quick: bool = True


def _benchmarked(case: Case, device: torch.device, dtype: torch.dtype) -> Results:
    yield from case.work("check", device, dtype).results()


def _attention(problem: Problem, device: torch.device, dtype: torch.dtype) -> Results:
    problem = replace(problem, dtype=dtype)
    yield from _both("paged_attention", **attention_problem.call_of(problem, device))
    if not use_triton(torch.empty(0, device=device)):
        # Without the log-sum-exp the PyTorch implementation takes another path.
        yield from _both("paged_attention", **attention_problem.call_of(problem, device) | {"return_lse": False})


def _far_blocks(device: torch.device, dtype: torch.dtype) -> Results:
    """Three blocks 2^30 elements apart: the last one's offset needs 64 bits. Only the pages touched take memory."""
    if dtype == torch.float32:
        dtype = torch.float16
    num_elements = 2**31 + 8 * 32
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * num_elements + 2**28:
        raise NotTakenError("4.3 GB of memory are not free")
    far = torch.empty(num_elements, device=device, dtype=dtype).as_strided((3, 8, 1, 32), (2**30, 32, 32, 1))
    near = torch.randn(3, 8, 1, 32, device=device, dtype=dtype)
    far.copy_(near)
    lengths: dict[str, Any] = {"block_table": [[2, 1]], "cu_seqlens_q": [0, 2], "seq_lens": [14]}
    call: dict[str, Any] = {}
    for name, values in lengths.items():
        call[name] = torch.tensor(values, device=device, dtype=torch.int32)
    call |= {"q": torch.randn(2, 2, 32, device=device, dtype=dtype), "max_seqlen_q": 2}
    definition = DEFINITIONS["paged_attention"]
    want = definition.want({**call, "k_cache": near, "v_cache": near})
    got = definition.call({**call, "k_cache": far, "v_cache": far})
    yield from definition.beside(got, want, Judgement()).values()


def _latent_attention(problem: mla_problem.Problem, device: torch.device, dtype: torch.dtype) -> Results:
    yield from _both("paged_mla_attention", **mla_problem.call_of(replace(problem, dtype=dtype), device))


def _chosen_keys(is_packed: bool, device: torch.device, dtype: torch.dtype) -> Results:
    problem = Problem("", ((1, 300), (3, 3), (9, 40)), (32, 1), 128, padding_rows=1, dtype=dtype)
    arguments = mla_problem.index_problem(problem, device, is_packed=is_packed)
    for top_k in (16, 2048):
        yield from _both("choose_keys", **arguments, top_k=top_k)


def _both(operation: str, *positional: Any, **named: Any) -> Results:
    """An operation beside its reference, for the same arguments."""
    definition = DEFINITIONS[operation]
    yield from definition.check(definition.by_name(*positional, **named)).values()


def _moe_options(activation: str, device: torch.device, dtype: torch.dtype) -> Results:
    """Interleaved gates, biases, and experts of another rank; one token takes matrix-vector products."""
    for tokens in (1, 12):
        case = MoeCase(MoeModel("", 8, 2, 48, 40, 8), tokens, "balanced")
        layer = case.layer(device, dtype)
        x, w1, w2, topk_weights, topk_ids = layer.arguments(case.batch(device, dtype))
        if activation == "relu2":
            w1 = w1[:, :40]
        options: dict[str, Any] = {
            "activation": activation,
            "interleaved": True,
            "w1_bias": torch.randn(w1.shape[:2], device=device),
            "w2_bias": torch.randn(8, 48, device=device),
            "expert_map": torch.tensor([3, 0, -1, 7, 5, -1, 1, 2], dtype=torch.int32, device=device),
        }
        yield from _both("fused_moe", x, 4 * w1, w2, topk_weights, topk_ids, **options)


def _quantized_moe(layout: str, device: torch.device, dtype: torch.dtype) -> Results:
    case = MoeCase(MoeModel("", 3, 2, 192, 96, 3), 5, "balanced", FORMATS[layout])
    layer = case.layer(device, torch.float32)
    yield from _both("fused_moe", *layer.arguments(case.batch(device, dtype)), **layer.options)


def _cpu_product(form: str, _: torch.device, dtype: torch.dtype) -> Results:
    """Packed weights in the order of this CPU's product. Integers up to 127 in every group of activations, and scales
    in bfloat16, are rounded by no product."""
    for num_rows, biased in ((1, False), (7, True)):
        x, weight = _unrounded_rows(num_rows, dtype), _unrounded_weight(form)
        bias = None
        if biased:
            bias = torch.randn(len(weight.values), dtype=dtype)
        want = reference.quantized_linear(x, weight, bias=bias)
        # ATen's product of int4 is in bfloat16.
        yield Result(CpuProduct(weight, dtype)(x, bias), want, judged_as=torch.bfloat16)


def _cpu_experts(form: str, _: torch.device, dtype: torch.dtype) -> Results:
    """Packed weights of experts, of which one has no entries."""
    weights = [_unrounded_weight(form) for _ in range(4)]
    num_outputs = len(weights[0].values)
    cpu = cpu_of_experts(num_outputs, dtype)
    multiply = ExpertProducts([CpuProduct(weight, dtype, cpu) for weight in weights], num_outputs)
    x, bias = _unrounded_rows(9, dtype), torch.randn(len(weights), num_outputs).to(dtype).float()
    ends, rows = torch.tensor([1, 6, 6, 12], dtype=torch.int32), torch.randint(len(x), (12,))
    out = multiply(x, ends, rows, bias)
    for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        want = reference.quantized_linear(x[rows[start:end]], weights[expert], bias=bias[expert])
        yield Result(out[start:end], want, judged_as=torch.bfloat16)


def _unrounded_rows(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randint(-126, 127, (num_rows, 384)).to(dtype)
    x[:, ::16] = 127
    return x


def _unrounded_weight(form: str) -> QuantizedWeight:
    weight = quantize(torch.randn(192, 384), form, group_size=128 if form == "int4" else -1)
    if form == "int4":
        weight = replace(weight, scale=weight.scale.bfloat16().float())
    return weight


def _routing(device: torch.device, dtype: torch.dtype) -> Results:
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
        yield from _both("route_tokens", logits, 8, **options)


def _argmax(device: torch.device, dtype: torch.dtype) -> Results:
    """Ties, masks, penalties, and a row with no token left."""
    logits = ((torch.randn(6, 5000, device=device) * 4).round() / 2).to(dtype)
    logits[2] = -math.inf
    for shape in ((5000,), (6, 5000)):
        options = {
            "token_mask": torch.rand(shape, device=device) < 0.8,
            "repetition_penalty": torch.where(torch.rand(shape, device=device) < 0.5, 1.0, 1.3),
        }
        yield from _both("greedy_argmax", logits, **options)


def _rotary(interleaved: bool, device: torch.device, dtype: torch.dtype) -> Results:
    """A quarter of the head turns, positions repeat."""
    angles = torch.rand(64, 12, device=device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([0, 40, 7, 7], device=device)
    q = torch.randn(4, 5, 96, device=device, dtype=dtype)
    k = torch.randn(4, 1, 96, device=device, dtype=dtype)
    yield from _both("rotary_embedding", positions, q, k, cos_sin, interleaved=interleaved)


def _skipped_slots(device: torch.device, dtype: torch.dtype) -> Results:
    """Negative slots are skipped, in caches where K and V of a block lie side by side, blocks of 24 and odd heads."""
    key, value = torch.randn(2, 5, 3, 80, device=device, dtype=dtype)
    k_cache, v_cache = torch.randn(4, 2, 24, 3, 80, device=device, dtype=dtype).unbind(1)
    slots = torch.tensor([95, -1, 0, 25, -7], device=device)
    yield from _both("reshape_and_cache", key, value, k_cache, v_cache, slots)


def _int8_rows(device: torch.device, dtype: torch.dtype) -> Results:
    """Rows of int8 times their scales are the rows, to half a step of their largest magnitude / 127."""
    key, value = torch.randn(2, 5, 3, 80, device=device, dtype=dtype)
    key, value = key / 100, value * 1000
    caches = torch.zeros(2, 4, 24, 3, 80, dtype=torch.int8, device=device).unbind()
    k_scale, v_scale = torch.zeros(4, 24, 3, 2, device=device).unbind(-1)
    slots = torch.tensor([95, 2, 0, 25, 7], device=device)
    yield from _both("reshape_and_cache", key, value, *caches, slots, k_scale=k_scale, v_scale=v_scale)


def _empty_states(device: torch.device, dtype: torch.dtype) -> Results:
    """Rows that saw nothing, in one part or in both."""
    out_a, out_b = torch.randn(2, 7, 3, 80, device=device, dtype=dtype)
    lse_a, lse_b = torch.randn(2, 3, 7, device=device) * 5
    lse_a[:, 1:4] = -math.inf
    lse_b[:, 3:6] = -math.inf
    yield from _both("merge_attn_states", out_a, lse_a, out_b, lse_b)


def _odd_norm(device: torch.device, dtype: torch.dtype) -> Results:
    x, weight = torch.randn(3, 1025, device=device, dtype=dtype) * 30, torch.randn(1025, device=device, dtype=dtype)
    yield from _both("rms_norm", x, weight, 1e-5)


def _odd_activations(device: torch.device, dtype: torch.dtype) -> Results:
    """A size that fills no tile, and every activation."""
    gates = torch.randn(3, 2 * 1025, device=device, dtype=dtype) * 4
    for activation in _ACTIVATIONS:
        yield from _both("silu_and_mul", gates, activation=activation)


def _ragged_ranks(device: torch.device, dtype: torch.dtype) -> Results:
    """Adapters of different ranks that leave parts alone, beside rows without one."""
    ranks = ((4, 4, 4), (20, 0, 7), (0, 9, 0))
    yield from lora_work(Draw(device, dtype), [1, -1, 0, 2, 2, 1, -1, 0], 48, (40, 24, 24), ranks).results()


def _oracle(heads: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Results:
    """One-hot embeddings through cache and attention: chunks beside decode steps, verify rows, a fork, a truncation.

    Whatever a wrong block, position or weight does to an answer, it is no longer the histogram of the visible tokens.
    """
    config = PagedExecutorConfig(num_heads=heads[0], num_kv_heads=heads[1], max_sequence_length=128)
    cache = PagedKvCacheConfig(
        num_layers=2, num_kv_heads=heads[1], head_dim=8, block_size=8, num_blocks=64, dtype=dtype, device=device
    )
    manager = PagedKvCacheManager(cache)
    executor = PagedAttentionExecutor(config, manager)
    texts = {
        "a": torch.randint(0, config.vocab_size, (61,)).tolist(),
        "b": torch.randint(0, config.vocab_size, (24,)).tolist(),
    }

    def run(*items: tuple[str, int, int]) -> Results:
        batch = []
        for name, start, end in items:
            batch.append(UnifiedBatchItem(name, texts[name][start:end], pos_offset=start))
        for (name, _, end), row in zip(items, executor.unified_decode(UnifiedBatch(batch)), strict=True):
            assert row is not None
            yield Result(row.to(dtype), expected_logits(config, texts[name][:end]))

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
        yield Result(output.logits[0].to(dtype), expected_logits(config, texts["c"][:count]))
    executor.truncate_kv(fork, 9)
    texts["c"] = texts["c"][:9] + texts["b"]
    yield from run(("c", 9, 33), ("a", 50, 61))


def _listed() -> list[Check]:
    """Return a check for each benchmark case, problem, activation and format."""
    checks = []
    for case in CASES:
        checks.append(Check(case.name, partial(_benchmarked, case), is_quick=case.name not in _SLOW))
    for problem in PROBLEMS:
        name = f"paged_attention: {problem.name}"
        checks.append(Check(name, partial(_attention, problem), is_quick=problem.name in _QUICK))
    for latent_problem in mla_problem.PROBLEMS:
        name = f"paged_mla_attention: {latent_problem.name}"
        is_quick = latent_problem.name in ("mixed batch", "chosen keys", "packed")
        checks.append(Check(name, partial(_latent_attention, latent_problem), is_quick))
    for activation in (*_ACTIVATIONS, "relu2"):
        name = f"fused_moe: {activation}"
        checks.append(Check(name, partial(_moe_options, activation), is_quick=activation == "swiglu_oai"))
    for layout in FORMATS:
        checks.append(Check(f"fused_moe: {layout}", partial(_quantized_moe, layout)))
    for form in ("int8", "int4", "mxfp4", "nvfp4"):
        checks.append(Check(f"product on a CPU: {form}", partial(_cpu_product, form)))
        checks.append(Check(f"experts on a CPU: {form}", partial(_cpu_experts, form)))
    return checks


CHECKS = (
    *_listed(),
    Check("paged_attention: block offsets beyond 2^31", _far_blocks),
    Check("choose_keys", partial(_chosen_keys, False)),
    Check("choose_keys: e4m3", partial(_chosen_keys, True)),
    Check("route_tokens: groups, bias, shared experts", _routing),
    Check("greedy_argmax: ties, masks, penalties", _argmax),
    Check("rotary_embedding: a quarter of the head", partial(_rotary, False)),
    Check("rotary_embedding: interleaved", partial(_rotary, True)),
    Check("reshape_and_cache: skipped slots", _skipped_slots),
    Check("reshape_and_cache: int8", _int8_rows),
    Check("merge_attn_states: empty rows", _empty_states),
    Check("rms_norm: odd size", _odd_norm),
    Check("silu_and_mul: odd size, activations", _odd_activations),
    Check("add_lora: ragged ranks", _ragged_ranks),
    Check("oracle: a histogram of tokens", partial(_oracle, (4, 4))),
    Check("oracle: grouped heads", partial(_oracle, (4, 2))),
)
