"""In an invariant forward by numba kernels no row's bits depend on the number of rows beside it, or on its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged.kernels.core.device import using_numba
from paged.kernels.cpu import launch
from paged.kernels.cpu.products import cpu_of_experts
from paged.kernels.cpu.quantization.experts import ExpertProducts
from paged.kernels.cpu.quantization.packed_product import CpuProduct
from paged.kernels.layers.linear import linear
from paged.kernels.moe.expert_products import add_gated, run_experts
from paged.kernels.moe.fused_moe import fused_moe
from paged.kernels.moe.route_tokens import route_tokens
from tests.backends import needs_numba
from tests.kernels.quantization.test_quantized_linear import FORMATS, Problem

pytestmark = [needs_numba, pytest.mark.by_cpu]

DTYPES = torch.float32, torch.bfloat16
# Every remainder of blocks of 4, 16 and 32 rows, and rows beyond those that libraries take over from numba kernels.
COUNTS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 100, 600)
NUM_ROWS = 640
Rows = Callable[[slice], torch.Tensor]


@pytest.fixture(autouse=True)
def _numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")


def differing(operation: Rows, counts: tuple[int, ...] = COUNTS) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of the parts whose bits are others than in all rows at once."""
    parts = []
    with using_numba(True, is_invariant=True):
        together = operation(slice(0, NUM_ROWS))
        for count in counts:
            for first in (0, 3, 40):
                rows = slice(first, first + count)
                if not torch.equal(operation(rows), together[rows]):
                    parts.append((first, count))
    return parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_outputs", [192, 100])
def test_plain_products(num_outputs: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(NUM_ROWS, 256).to(dtype), torch.randn(num_outputs, 256).to(dtype)
    bias = torch.randn(num_outputs).to(dtype)
    assert not differing(lambda rows: linear(x[rows], weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_packed_products(name: str, dtype: torch.dtype) -> None:
    problem = Problem.make(torch.device("cpu"), name, num_rows=NUM_ROWS, size=(128, 384), dtype=dtype, biased=True)
    product = CpuProduct(problem.weight, dtype)
    with using_numba(True, is_invariant=True):
        if not product.has_invariant_rows:
            pytest.skip("this CPU has no numba kernels of blocks")
    assert not differing(lambda rows: product(problem.x[rows], problem.bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_biased", [False, True])
def test_experts(is_biased: bool, dtype: torch.dtype) -> None:
    """Those of 8 that get most rows, and some that get none in parts."""
    operands = _experts(dtype, is_biased=is_biased)
    assert not differing(lambda rows: _run_experts(operands, rows))


def _experts(dtype: torch.dtype, *, is_biased: bool) -> dict[str, Any]:
    num_experts, hidden_size, size = 8, 128, 96
    operands: dict[str, Any] = {
        "w1": torch.randn(num_experts, 2 * size, hidden_size).to(dtype) / 8,
        "w2": torch.randn(num_experts, hidden_size, size).to(dtype) / 8,
    }
    if is_biased:
        operands["w1_bias"] = torch.randn(num_experts, 2 * size)
        operands["w2_bias"] = torch.randn(num_experts, hidden_size)
    operands["x"] = torch.randn(NUM_ROWS, hidden_size).to(dtype)
    logits = torch.randn(NUM_ROWS, num_experts) + torch.arange(num_experts) / 2
    operands["weights"], ids = logits.softmax(-1).topk(3)
    operands["ids"] = ids.int()
    return operands


def _run_experts(operands: dict[str, Any], rows: slice) -> torch.Tensor:
    biases = {name: tensor for name, tensor in operands.items() if name.endswith("_bias")}
    x, weights, ids = (operands[name][rows].contiguous() for name in ("x", "weights", "ids"))
    out: torch.Tensor = fused_moe(x, operands["w1"], operands["w2"], weights, ids, **biases)
    return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int8 channel", "int4 g32 zeros", "mxfp4"])
def test_packed_experts(name: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups, with a gated MLP beside them, for any 1 to 64 rows in any order."""
    gate_up, down = _packed_experts(name, 256, 128, dtype), _packed_experts(name, 128, 128, dtype)
    if not (gate_up.has_invariant_rows and down.has_invariant_rows):
        pytest.skip("this CPU has no numba kernels of blocks")
    monkeypatch.setattr(launch, "_WORK_OF_A_THREAD", 1)
    x, logits = torch.randn(64, 128).to(dtype), torch.randn(64, 8)
    gate, shared = torch.randn(64, 1).to(dtype), torch.randn(64, 128).to(dtype)

    def run(rows: torch.Tensor) -> torch.Tensor:
        weights, ids = route_tokens(logits[rows], 2, num_expert_groups=4, topk_groups=2)
        out = run_experts(x[rows], gate_up, down, weights, ids)
        return add_gated(out, shared[rows], gate[rows])

    with using_numba(True, is_invariant=True):
        together = run(torch.arange(64))
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        for count in range(1, 65):
            rows = torch.randperm(64)[:count]
            assert torch.equal(run(rows), together[rows]), count


def _packed_experts(name: str, num_outputs: int, num_columns: int, dtype: torch.dtype) -> ExpertProducts:
    products = []
    for _ in range(8):
        size = num_outputs, num_columns
        weight = Problem.make(torch.device("cpu"), name, size=size, dtype=dtype).weight
        products.append(CpuProduct(weight, dtype, cpu_of_experts(num_outputs, dtype)))
    return ExpertProducts(products, num_outputs)
