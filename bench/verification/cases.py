"""Checks of `paged verify`: every public kernel at the benchmarks' sizes, then its options and edge cases.

A check yields results of operations beside the results of the float64 reference or of a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from paged.bench.bounds import first_order
from paged.bench.cards.card import Card, Edge, Row
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.check import Result
from paged.bench.verification.candidate import NotTakenError
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.cache.manager import PagedKvCacheManager
from paged.executors.closed_form import expected_logits
from paged.executors.paged_attention_executor import PagedAttentionExecutor, PagedExecutorConfig
from paged.kernels.cpu.products import cpu_of_experts
from paged.kernels.cpu.quantization.experts import ExpertProducts
from paged.kernels.cpu.quantization.packed_product import CpuProduct
from paged.kernels.quantization import definition as quantization
from paged.kernels.quantization.quantize import quantize
from paged.kernels.quantization.weight import QuantizedWeight
from paged.step.batch import DecodeInput, UnifiedBatch, UnifiedBatchItem

Results = Iterator[Result]


@dataclass(frozen=True)
class Check:
    """One row of the table for every dtype."""

    name: str
    results: Callable[[torch.device, torch.dtype], Results]
    is_quick: bool = True


def checks_of(card: Card) -> list[Check]:
    """Return a check for each row and each edge of a card."""

    def of_row(row: Row, device: torch.device, dtype: torch.dtype) -> Results:
        yield from card.check(card.problem(row, "check", device, dtype)).values()

    def of_edge(edge: Edge, device: torch.device, dtype: torch.dtype) -> Results:
        for arguments in edge.problems(Draw(device, dtype)):
            yield from card.check(arguments).values()

    checks = [Check(card.row_name(row), partial(of_row, row), row.is_quick) for row in card.rows]
    for edge in card.edges:
        checks.append(Check(card.edge_name(edge), partial(of_edge, edge), edge.is_quick))
    return checks


def _far_blocks(device: torch.device, dtype: torch.dtype) -> Results:
    """Check three blocks 2^30 elements apart: the last offset needs 64 bits. Only touched pages take memory."""
    if dtype == torch.float32:
        dtype = torch.float16
    num_elements = 2**31 + 8 * 32
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * num_elements + 2**28:
        raise NotTakenError("4.3 GB of memory are not free")
    # A storage, because `torch.empty` would touch every page where uninitialised memory is filled with NaN.
    storage = torch.UntypedStorage(2 * num_elements, device=device)
    far = torch.empty(0, device=device, dtype=dtype).set_(storage, 0, (3, 8, 1, 32), (2**30, 32, 32, 1))
    near = torch.randn(3, 8, 1, 32, device=device, dtype=dtype)
    far.copy_(near)
    lengths: dict[str, Any] = {"block_table": [[2, 1]], "cu_seqlens_q": [0, 2], "seq_lens": [14]}
    call: dict[str, Any] = {}
    for name, values in lengths.items():
        call[name] = torch.tensor(values, device=device, dtype=torch.int32)
    call |= {"q": torch.randn(2, 2, 32, device=device, dtype=dtype), "max_seqlen_q": 2}
    card = CARDS["paged_attention"]
    close = {**call, "k_cache": near, "v_cache": near}
    want = card.want(close)
    got = card.call({**call, "k_cache": far, "v_cache": far})
    yield from card.beside(close, got, want, card.bounds(close, want)).values()


def _cpu_product(form: str, _: torch.device, dtype: torch.dtype) -> Results:
    """Check packed weights in the order of this CPU's product.

    No product rounds the inputs: activations are integers up to 127 in every group, and scales are bfloat16.
    """
    for num_rows, biased in ((1, False), (7, True)):
        x, weight = _unrounded_rows(num_rows, dtype), _unrounded_weight(form)
        bias = None
        if biased:
            bias = torch.randn(len(weight.values), dtype=dtype)
        want = quantization.quantized_linear(x, weight, bias=bias)
        yield Result(CpuProduct(weight, dtype)(x, bias), want, _product_bound(x, weight, dtype, want))


def _cpu_experts(form: str, _: torch.device, dtype: torch.dtype) -> Results:
    """Check packed weights of experts, one of which has no entries."""
    weights = [_unrounded_weight(form) for _ in range(4)]
    num_outputs = len(weights[0].values)
    cpu = cpu_of_experts(num_outputs, dtype)
    multiply = ExpertProducts([CpuProduct(weight, dtype, cpu) for weight in weights], num_outputs)
    x, bias = _unrounded_rows(9, dtype), torch.randn(len(weights), num_outputs).to(dtype).float()
    ends, rows = torch.tensor([1, 6, 6, 12], dtype=torch.int32), torch.randint(len(x), (12,))
    out = multiply(x, ends, rows, bias)
    for expert, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        want = quantization.quantized_linear(x[rows[start:end]], weights[expert], bias=bias[expert])
        yield Result(out[start:end], want, _product_bound(x[rows[start:end]], weights[expert], dtype, want))


def _product_bound(x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype, want: torch.Tensor) -> torch.Tensor:
    """Return the bound of a product in a dtype of rows, or in bfloat16, in which ATen's int4 product computes."""
    if weight.values.dtype == torch.int32:
        dtype = torch.bfloat16
    numbers = quantization.dequantize(weight)
    return 2 * first_order.product_in(dtype, x.double(), numbers, want)


def _unrounded_rows(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randint(-126, 127, (num_rows, 384)).to(dtype)
    x[:, ::16] = 127
    return x


def _unrounded_weight(form: str) -> QuantizedWeight:
    weight = quantize(torch.randn(192, 384), form, group_size=128 if form == "int4" else -1)
    if form == "int4":
        weight = replace(weight, scale=weight.scale.bfloat16().float())
    return weight


def _oracle(heads: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Results:
    """Check one-hot embeddings through cache and attention: chunks, decodes, verify rows, a fork, a truncation.

    The answer is the histogram of the visible tokens. So any wrong block, position or weight shows.
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
            yield _beside_closed_form(row.to(dtype), expected_logits(config, texts[name][:end]))

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
        yield _beside_closed_form(output.logits[0].to(dtype), expected_logits(config, texts["c"][:count]))
    executor.truncate_kv(fork, 9)
    texts["c"] = texts["c"][:9] + texts["b"]
    yield from run(("c", 9, 33), ("a", 50, 61))


def _beside_closed_form(logits: torch.Tensor, want: torch.Tensor) -> Result:
    """Return logits beside the closed form, whose terms are all positive, so that every rounding is relative.

    Weights, outputs, logits and sums of heads are rounded to the dtype once each.
    """
    roundings = 4 * torch.finfo(logits.dtype).eps / 2
    return Result(logits, want, 2 * (roundings + 2 * first_order.gamma(128) + 4 * first_order.ELEMENTARY) * want)


def _listed() -> list[Check]:
    """Return the checks of all cards, and of packed weights on a CPU."""
    checks = []
    for card in CARDS.values():
        checks += checks_of(card)
    for form in ("int8", "int4", "mxfp4", "nvfp4"):
        checks.append(Check(f"product on a CPU: {form}", partial(_cpu_product, form)))
        checks.append(Check(f"experts on a CPU: {form}", partial(_cpu_experts, form)))
    return checks


CHECKS = (
    *_listed(),
    Check("paged_attention: block offsets beyond 2^31", _far_blocks),
    Check("oracle: a histogram of tokens", partial(_oracle, (4, 4))),
    Check("oracle: grouped heads", partial(_oracle, (4, 2))),
)
