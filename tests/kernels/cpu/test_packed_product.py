"""Products that a CPU has for packed weights, and the choice between them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch

from paged.kernels.cpu import launch, products
from paged.kernels.cpu.products import Cpu, choose_product, this_cpu
from paged.kernels.cpu.quantization import packed_product
from paged.kernels.cpu.quantization.packed_product import CpuProduct
from paged.kernels.quantization import definition
from paged.kernels.quantization.weight import QuantizedWeight
from tests.backends import needs_numba
from tests.kernels.faulty import load_copy
from tests.kernels.quantization.test_quantized_linear import FORMATS, Problem
from tests.tolerance import assert_close, assert_within

FULL = Cpu("AVX512", multiplies_int8=True, multiplies_bf16=True)
AVX2, DEFAULT = (Cpu(name, multiplies_int8=False, multiplies_bf16=False) for name in ("AVX2", "DEFAULT"))


@pytest.mark.parametrize(
    ("form", "group", "rows", "rounds", "cpu", "expected"),
    [
        ("int8", (1, 0), 64, True, FULL, "int8"),
        ("int8", (1, 0), 64, False, FULL, "unpacked"),  # activations stay as they are
        ("int8", (1, 0), 64, True, AVX2, "unpacked"),
        ("int8", (1, 0), 64, True, AVX2._replace(multiplies_codes=True), "int8"),
        ("int8", (1, 0), 80, True, AVX2._replace(multiplies_codes=True), "unpacked"),
        ("int4", (1, 128), 64, False, AVX2, "int4"),
        ("int4", (1, 96), 64, False, FULL, "int4"),
        ("int4", (1, 128), 72, False, FULL, "unpacked"),  # rows are no multiple of 16
        ("int4", (1, 128), 64, False, DEFAULT, "unpacked"),
        ("int4", (1, 128), 64, False, FULL._replace(multiplies_codes=True), "blocks"),
        ("int4", (1, 128), 80, False, FULL._replace(multiplies_codes=True), "int4"),  # no full block of 64 rows
        ("e4m3", (128, 128), 64, True, FULL, "unpacked"),
        ("nvfp4", (1, 16), 64, False, FULL, "unpacked"),
        ("nvfp4", (1, 16), 64, False, FULL._replace(multiplies_codes=True), "blocks"),
        ("mxfp4", (1, 32), 96, False, FULL._replace(multiplies_codes=True), "unpacked"),  # no full block of 64 rows
    ],
)
def test_choice(form: str, group: tuple[int, int], rows: int, rounds: bool, cpu: Cpu, expected: str) -> None:
    assert choose_product(form, group, rows, 384, rounds, cpu) == expected


@pytest.mark.by_cpu
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "torch") for name in FORMATS),
        *(pytest.param(name, "numba", marks=needs_numba) for name in FORMATS if not name.startswith("e4m3")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_format(name: str, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what rounding weights, or their scales and zero points, to the dtype of x moves the result."""
    monkeypatch.setenv("PAGED_BACKEND", backend)
    monkeypatch.setattr(products, "MANY_ROWS", 40)
    few, many = 208, 128
    if dtype == torch.bfloat16:
        few, many = many, few
    for num_rows, num_outputs in ((1, few), (5, 80), (5, 72), (40, many)):
        size = (num_outputs, 384)
        problem = Problem.make(
            torch.device("cpu"), name, num_rows=num_rows, size=size, dtype=dtype, biased=num_rows > 1
        )
        product = CpuProduct(problem.weight, dtype)
        if dtype == torch.float32 and product.kind not in ("int4", "blocks"):
            want = definition.quantized_linear(problem.x, problem.weight, bias=problem.bias)
            assert_close(product(problem.x, problem.bias), want)
            continue
        assert product.is_in_blocks == (_takes_blocks(problem.weight) and backend == "numba")
        _check_rounded(product, problem)


@needs_numba
@pytest.mark.by_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int4 g32 zeros", "int4 g128", "mxfp4", "nvfp4"])
def test_unpacked_tiles(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4-bit weights, as AMX multiplies many rows: two tiles."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(packed_product, "_TILE", 64 * 384)
    problem = Problem.make(torch.device("cpu"), name, num_rows=40, size=(128, 384), dtype=dtype, biased=True)
    product = CpuProduct(problem.weight, dtype)
    if not product.is_in_blocks:
        pytest.skip("no numba kernels of blocks")
    product.most_rows = 39
    _check_rounded(product, problem)


def _check_rounded(product: CpuProduct, problem: Problem) -> None:
    """A weight, as a scale, an int4 zero point and an activation, is off by 2^-9 of itself."""
    x, weight = problem.x, problem.weight
    want, got = definition.quantized_linear(x, weight, bias=problem.bias), product(x, problem.bias)
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    size_of = x.double().abs() @ (definition.dequantize(weight).abs() + 8 * _step(weight)).T
    assert_within(got, want, (size_of + want.abs()) * 2**-7)
    assert_within((got - want).abs().mean(), 0.0, 2**-9 * size_of.mean())


@needs_numba
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "text", "replacement"),
    [
        ("int4 g128 zeros", "", ""),  # no fault
        ("int4 g128 zeros", "zeros + at_scale", "zeros"),  # the first block's zero points
        ("int4 g128 zeros", "= -offset * total", "= offset * total"),  # codes beside the wrong zero
        ("nvfp4", "nb.floats(factor)[group] if factor", "np.float32(1) if factor"),
        ("mxfp4", "E2M1_OFFSET + int(", "E2M1_OFFSET - int("),  # the sign is lost
        ("int8 channel", "rows + (row + 1) * row_bytes - 4", "rows + row_bytes - 4"),  # the first row's scale
        ("int8 channel", "nb.floats(sums), i * BLOCK", "nb.floats(sums), 0"),  # another row's sums
    ],
)
def test_checks_see_a_fault_of_the_blocks(
    name: str, text: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not this_cpu().multiplies_codes:
        pytest.skip("no numba kernels of blocks")
    block_product = import_module("paged.kernels.cpu.quantization.block_product")
    source = Path(block_product.__file__ or "").read_text()
    assert text in source, "the kernels have changed: this fault no longer applies"
    package, _, last = block_product.__name__.rpartition(".")
    copy = load_copy(f"{package}.faulty_{last}", tmp_path, source.replace(text, replacement), monkeypatch)
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(sys.modules[package], last, copy)
    problem = Problem.make(torch.device("cpu"), name, num_rows=5, size=(128, 384), dtype=torch.bfloat16, biased=True)
    cpu = this_cpu()._replace(multiplies_int8=False)  # oneDNN has other blocks for so few outputs and many threads
    with nullcontext() if not text else pytest.raises(AssertionError):
        _check_rounded(CpuProduct(problem.weight, torch.bfloat16, cpu), problem)


def _takes_blocks(weight: QuantizedWeight) -> bool:
    """Whether numba kernels for 4-bit weights take these on this CPU."""
    return this_cpu().multiplies_codes and weight.is_packed and weight.out_features % 64 == 0


def _step(weight: QuantizedWeight) -> torch.Tensor:
    """The distance of two codes of each weight, if it has zero points, else 0."""
    if weight.zero_point is None or weight.format != "int4":
        return torch.zeros(weight.out_features, weight.in_features, dtype=torch.float64)
    off = dataclasses.replace(weight, zero_point=weight.zero_point - 1)
    return definition.dequantize(off) - definition.dequantize(weight)


@pytest.mark.by_cpu
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "") for name in ("int8 channel", "e4m3 channel", "int4 g128")),
        pytest.param("int4 g128", "numba", marks=needs_numba),
    ],
)
def test_what_is_not_finite_stays_in_its_row(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", backend)
    problem = Problem.make(torch.device("cpu"), name, num_rows=4, size=(64, 384))
    product = CpuProduct(problem.weight, torch.float32)
    want = product(problem.x)
    problem.x[1, 5], problem.x[2, 7] = float("nan"), float("inf")
    got = product(problem.x)
    assert not got[1:3].isfinite().any()
    assert torch.equal(got[::3], want[::3])


@pytest.mark.parametrize("name", ["int8 channel", "int4 g32 zeros"])
@pytest.mark.parametrize("rounds_input", [True, False])
def test_input_scale_and_order(name: str, rounds_input: bool) -> None:
    problem = Problem.make(torch.device("cpu"), name, size=(64, 384))
    weight = problem.weight
    changes = {"input_scale": torch.tensor(2 / 127)} if weight.quantizes_input else {}
    weight = dataclasses.replace(weight, input_order=torch.randperm(384).int(), **changes)
    problem.x[:] = problem.x.bfloat16()
    got, want = CpuProduct(weight, torch.float32)(problem.x), definition.quantized_linear(problem.x, weight)
    assert_within(got, want, 0.02 * want.abs().max())


@needs_numba
@pytest.mark.by_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "outputs"), [("int8 channel", 80), ("int8 channel", 192), ("e4m3 channel", 80)], ids=str
)
@pytest.mark.parametrize(("num_rows", "threads"), [(1, 1), (7, 3), (40, 2)])
def test_numba_kernels_give_the_same_bits(
    name: str, outputs: int, num_rows: int, threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties, zeros, subnormal numbers, what is not finite, and what a given scale clamps."""
    if outputs == 192 and not (this_cpu().multiplies_int8 or this_cpu().multiplies_codes):
        pytest.skip("plain products of 192 outputs have numba kernels of their own")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(launch, "_WORK_OF_A_THREAD", 1)
    problem = Problem.make(torch.device("cpu"), name, num_rows=num_rows, size=(outputs, 352), dtype=dtype)
    x = torch.randn(num_rows, 368, dtype=dtype)[:, 16:]
    x[0, ::7], x[0, 3] = 2.5, 127
    if num_rows > 4:
        x[1], x[2], x[3, 5], x[4, 7] = 0, 1e-40, torch.nan, -torch.inf
    finite = [row for row in range(num_rows) if row not in (3, 4)]
    for scale in (None, torch.tensor(1 / 128)):
        product = CpuProduct(dataclasses.replace(problem.weight, input_scale=scale), dtype)
        for bias in (None, torch.randn(outputs, dtype=dtype), torch.randn(outputs)):
            monkeypatch.setenv("PAGED_BACKEND", "torch")
            want = product(x, bias)
            monkeypatch.setenv("PAGED_BACKEND", "numba")
            got = product(x, bias)
            assert got.dtype == dtype
            assert torch.equal(got[finite], want[finite])
            assert not got[3:5].isfinite().any()


@needs_numba
@pytest.mark.parametrize(("has_amx", "most"), [(False, 64), (True, 8)])
def test_rows_that_numba_kernels_take(has_amx: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(products, "this_cpu", lambda: this_cpu()._replace(has_amx=has_amx))
    product = CpuProduct(Problem.make(torch.device("cpu"), "int8 channel", size=(64, 384)).weight, torch.float32)
    if not product._takes_numba(torch.zeros(1, 384)):
        pytest.skip("no int8 products in vectors of 64")
    if not product.by_onednn:
        most = products.MANY_ROWS - 1
    assert product._takes_numba(torch.zeros(most, 384))
    assert not product._takes_numba(torch.zeros(most + 1, 384))


@needs_numba
def test_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first number of rows for which the other product is faster, once for weights alike."""
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    weight = Problem.make(torch.device("cpu"), "int4 g128", size=(64, 384)).weight
    first, second = CpuProduct(weight, torch.float32), CpuProduct(weight, torch.float32)
    if not first.is_in_blocks:
        pytest.skip("no numba kernels of blocks")
    seconds = iter((1, 2, 3, 2))  # for 8 and 32 rows
    monkeypatch.setattr(products, "_seconds", lambda *_: next(seconds))
    limits: dict[Hashable, float] = {}
    for product in (first, second):
        product.measure(torch.float32, limits)
        assert product._takes_numba(torch.zeros(8, 384))
        assert not product._takes_numba(torch.zeros(9, 384))


@pytest.mark.by_cpu
def test_memory_is_the_stored_one() -> None:
    for name in ("int8 channel", "int4 g128", "int4 g128 zeros"):
        weight = Problem.make(torch.device("cpu"), name, size=(256, 1024)).weight
        product = CpuProduct(weight, torch.bfloat16)
        stored = weight.values.nbytes + 2 * weight.scale.numel()
        held = sum(tensor.nbytes for tensor in product.tensors)
        assert product.kind == "unpacked" or held <= 1.15 * stored
    assert this_cpu() is this_cpu()
