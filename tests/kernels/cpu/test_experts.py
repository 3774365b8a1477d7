"""Products of entries sorted by expert with packed weights of all experts, in one numba kernel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from paged.kernels.cpu import launch
from paged.kernels.cpu.products import cpu_of_experts, this_cpu
from paged.kernels.cpu.quantization.experts import ExpertProducts
from paged.kernels.cpu.quantization.packed_product import CpuProduct
from paged.kernels.quantization import definition
from tests.backends import needs_numba
from tests.kernels.faulty import load_copy
from tests.kernels.quantization.test_quantized_linear import Problem
from tests.tolerance import assert_within

pytestmark = [needs_numba, pytest.mark.by_cpu]
SIZE = NUM_OUTPUTS, NUM_COLUMNS = 192, 256
# The second expert has no entries, the fourth more than one chunk, and the last three entries have no expert.
COUNTS = (1, 0, 5, 42, 3)
NUM_ROWS = 20


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND", "numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(launch, "_WORK_OF_A_THREAD", 1)


def _check(name: str, dtype: torch.dtype) -> None:
    """Within what rounding activations and scales moves the result: a weight and an activation by 2^-8 of itself."""
    if not this_cpu().multiplies_codes or this_cpu().has_amx:
        pytest.skip("no numba kernels for all experts at once")
    weights = [Problem.make(torch.device("cpu"), name, size=SIZE, dtype=dtype).weight for _ in COUNTS]
    cpu = cpu_of_experts(NUM_OUTPUTS, dtype)
    multiply = ExpertProducts([CpuProduct(weight, dtype, cpu) for weight in weights], NUM_OUTPUTS)
    x = torch.randn(NUM_ROWS, NUM_COLUMNS, dtype=dtype)
    ends = torch.tensor(COUNTS).cumsum(0).int()
    rows = torch.randint(NUM_ROWS, (sum(COUNTS) + 3,))
    bias = torch.randn(len(COUNTS), NUM_OUTPUTS)
    for rows_of_x, bias_of_experts in ((rows, bias), (None, None)):
        inputs = x
        if rows_of_x is None:
            inputs = x[rows]
        out = multiply(inputs, ends, rows_of_x, bias_of_experts)
        assert (out.dtype, len(out)) == (dtype, len(rows))
        start = 0
        for expert, count in enumerate(COUNTS):
            of_expert = x[rows[start : start + count]]
            want = definition.quantized_linear(of_expert, weights[expert])
            if bias_of_experts is not None:
                want += bias_of_experts[expert]
            size_of = of_expert.double().abs() @ definition.dequantize(weights[expert]).abs().T
            assert_within(out[start : start + count], want, (size_of + want.abs()) * 2**-7)
            start += count


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int8 channel", torch.float32),
        ("int8 channel", torch.bfloat16),
        ("int4 g128", torch.float32),
        ("int4 g32 zeros", torch.bfloat16),
        ("mxfp4", torch.bfloat16),
        ("nvfp4", torch.bfloat16),
    ],
    ids=str,
)
def test_all_experts_at_once(name: str, dtype: torch.dtype) -> None:
    _check(name, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "text", "replacement"),
    [
        ("nvfp4", "nb.floats(factor)[group]", "nb.floats(factor)[0]"),  # the first expert's factor
        ("nvfp4", "2 * (of_group * (width // columns) + output)", "2 * output"),  # the first expert's scales
        ("nvfp4", "(of_group + output) * (width // 2)", "output * (width // 2)"),  # the first expert's codes
        ("nvfp4", "bias += of_group * 4", "bias += 0"),  # the first expert's bias
        ("nvfp4", "max(end - done + cost - 1, 0)", "max(end - done, 0)"),  # a thread leaves blocks out
        ("nvfp4", "_row_of(rows_of_x, entry + row)", "_row_of(rows_of_x, row)"),  # rows of other entries
        ("int8 channel", "place = of_group + output", "place = output"),  # the first expert's weights
    ],
)
def test_check_sees_a_fault(
    name: str, text: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_product = import_module("paged.kernels.cpu.quantization.block_product")
    source = Path(block_product.__file__ or "").read_text()
    assert text in source, "the kernels have changed: this fault no longer applies"
    package, _, last = block_product.__name__.rpartition(".")
    copy = load_copy(f"{package}.faulty_{last}", tmp_path, source.replace(text, replacement), monkeypatch)
    monkeypatch.setattr(sys.modules[package], last, copy)
    with pytest.raises(AssertionError):
        _check(name, torch.bfloat16)
