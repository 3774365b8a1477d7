"""quantized_linear against float64, on both backends."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import InvalidInputError, QuantizedWeight, UnsupportedError, quantized_linear
from paged.kernels.core.device import Device
from paged.kernels.quantization import definition, gemm, product, quantize_rows
from paged.kernels.quantization import quantized_linear as linear
from paged.kernels.quantization.quantize import quantize
from tests.kernels.faulty import planted, turns_red
from tests.tolerance import DTYPES, assert_close

NAN = float("nan")
SIZES = {"tensor": 0, "block": 128, "g32": 32, "g64": 64, "g96": 96, "g128": 128}


def _arguments(name: str) -> tuple[str, dict[str, Any]]:
    """Of `quantize`."""
    form, *words = name.split()
    options: dict[str, Any] = {"symmetric": False} if "zeros" in words else {}
    options |= {"quantizes_input": False} if "alone" in words else {}
    sizes = [SIZES[word] for word in words if word in SIZES]
    return form, options | ({"group_size": sizes[0]} if sizes else {})


# Every form, with every number of columns a group; "alone": activations are not quantised.
FORMATS = {
    name: _arguments(name)
    for name in (
        *("e4m3 tensor", "e4m3 channel", "e4m3 block", "e4m3 alone", "e4m3 block alone", "int8 tensor", "int8 channel"),
        *("int8 alone", "int8 channel zeros", "int8 g32", "int8 g64 zeros", "int8 g128", "int4 tensor", "int4 channel"),
        *("int4 channel zeros", "int4 g32", "int4 g32 zeros", "int4 g64", "int4 g96 zeros", "int4 g128"),
        *("int4 g128 zeros", "mxfp4", "nvfp4"),
    )
}


def _quantized(name: str, plain: torch.Tensor, **fields: Any) -> QuantizedWeight:
    form, arguments = FORMATS[name]
    options = {name: value for name, value in arguments.items() if name != "quantizes_input"}
    fields |= {name: value for name, value in arguments.items() if name == "quantizes_input"}
    return dataclasses.replace(quantize(plain, form, **options), **fields)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Rows and a layer. Rows and columns of weights differ in size by up to 4, so that no scale is another's.

    Of activations that are quantised none is so near to the middle of two codes that float32 may take the other one.
    """

    x: torch.Tensor
    weight: QuantizedWeight
    bias: torch.Tensor | None = None

    @staticmethod
    def make(
        device: torch.device,
        name: str,
        *,
        num_rows: int = 5,
        size: tuple[int, int] = (72, 384),
        dtype: torch.dtype = torch.float32,
        biased: bool = False,
        **options: Any,
    ) -> Problem:
        rows, columns = size
        sizes = torch.exp2(2 * torch.rand(-(-rows // 8), -(-columns // 16)))
        plain = torch.randn(rows, columns) * sizes.repeat_interleave(8, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
        weight = _quantized(name, plain.to(device) / columns**0.5, **options)
        x = torch.randn(num_rows, columns, device=device).to(dtype)
        if weight.quantizes_input:
            x[near_ties(x, weight)] = 0
        return Problem(x, weight, torch.randn(rows, device=device).to(dtype) if biased else None)

    def check(self) -> None:
        """The result is the definition's up to the rounding of the result, and of code times scale where that is in 16
        bits."""
        want = definition.quantized_linear(self.x, self.weight, bias=self.bias)
        got = quantized_linear(self.x, self.weight, bias=self.bias)
        assert got.dtype == self.x.dtype
        assert_close(got, want, rounded=self.rounded())

    def rounded(self) -> torch.Tensor | None:
        """The definition with code times scale in the dtype of x, for those whose groups are shorter than a step."""
        group_k = self.weight.group[1]
        if self.x.dtype == torch.float32 or self.weight.format != "int4" or group_k == 0 or group_k % 128 == 0:
            return None
        w = definition.dequantize(self.weight).to(self.x.dtype).cpu().double()
        x = self.x.cpu().double()
        if self.weight.input_order is not None:
            x = x[:, self.weight.input_order.cpu().long()]
        return x @ w.T + (0 if self.bias is None else self.bias.cpu().double())


def near_ties(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Which values are rounded to another code when they, but not the largest of their group, change by 1e-5."""
    size = 128 if weight.scale.dim() == 2 else x.shape[1]
    wide = x.double()
    groups = torch.nn.functional.pad(wide, (0, -x.shape[1] % size)).unflatten(1, (-1, size)).abs()
    is_largest = (groups == groups.amax(-1, keepdim=True)).flatten(1)[:, : x.shape[1]]
    up, down = (definition.input_of(wide.where(is_largest, wide * (1 + side * 1e-5)), weight) for side in (1, -1))
    return up != down


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *(("triton", dtype) for dtype in DTYPES[1:]),
        pytest.param("triton", torch.float32, marks=pytest.mark.thorough),
        *(pytest.param("torch", dtype, marks=pytest.mark.by_cpu) for dtype in DTYPES),
    ],
    indirect=["backend"],
)
@pytest.mark.usefixtures("backend")
def test_matches_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    Problem.make(device, name, dtype=dtype, biased=True).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("num_rows", "names"),
    [
        (count, names)
        for even, odd in ((0, 1), (3, 16), (17, 65))
        for count, names in ((even, ("e4m3 block", "int4 g128 zeros")), (odd, ("int8 channel", "nvfp4")))
    ],
    ids=str,
)
def test_numbers_of_rows(num_rows: int, names: tuple[str, ...], device: torch.device) -> None:
    """Few rows, whose input is split, and the tiles of 32, 64 and 128 rows."""
    for name in names:
        Problem.make(device, name, num_rows=num_rows, size=(40, 640), dtype=torch.float16).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("e4m3 block", (300, 200)),  # more columns than a tile, blocks cut short both ways
        ("e4m3 channel", (33, 171)),  # rows off the 16-byte grid
        ("e4m3 channel", (33, 128)),  # as wide as a block, which is none
        ("int8 alone", (33, 171)),
        ("int4 channel zeros", (33, 171)),
        ("int4 g32", (40, 160)),  # no whole unit of 128 columns
        ("int4 g96 zeros", (40, 96)),
        ("mxfp4", (24, 80)),  # and no whole group
        ("nvfp4", (24, 40)),
        ("int4 g64", (1, 64)),
        ("e4m3 block", (5, 7)),
    ],
)
def test_odd_sizes(name: str, size: tuple[int, int], device: torch.device) -> None:
    Problem.make(device, name, num_rows=18, size=size, dtype=torch.float16).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("name", "largest"), [("e4m3 channel", 448), ("int8 tensor", 127)])
def test_static_activations(name: str, largest: int, device: torch.device) -> None:
    """Values beyond the largest are the largest."""
    problem = Problem.make(device, name, input_scale=torch.tensor(2.0 / largest, device=device))
    assert (problem.x.abs() > 2).any()
    problem.check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["int4 g32 zeros", "int8 g64 zeros"])
def test_input_order(name: str, device: torch.device) -> None:
    problem = Problem.make(device, name, biased=True)
    order = torch.randperm(problem.weight.in_features, device=device).int()
    dataclasses.replace(problem, weight=dataclasses.replace(problem.weight, input_order=order)).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["e4m3 block", "int4 g128", "int8 channel"])
def test_strided_rows_and_out(name: str, device: torch.device) -> None:
    """What lies between the rows is NaN: it must not be read, and must still be there."""
    problem = Problem.make(device, name)
    want = quantized_linear(problem.x, problem.weight)
    x = torch.nn.functional.pad(problem.x, (8, 24), value=NAN)[:, 8:-24]
    wide = torch.full((len(x), want.shape[1] + 5), NAN, device=device)
    out = wide[:, 2:-3]
    assert quantized_linear(x, problem.weight, out=out) is out
    assert torch.equal(out, want)
    assert wide[:, :2].isnan().all()
    assert wide[:, -3:].isnan().all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["e4m3 block", "int8 channel", "int4 g128", "mxfp4"])
def test_what_is_not_finite_stays_in_its_row(name: str, device: torch.device) -> None:
    problem = Problem.make(device, name, num_rows=4)
    want = quantized_linear(problem.x, problem.weight)
    problem.x[1, 5], problem.x[2, 7] = NAN, math.inf
    got = quantized_linear(problem.x, problem.weight)
    assert not got[1:3].isfinite().any()
    assert torch.equal(got[::3], want[::3])


@pytest.mark.parametrize("name", FORMATS)
def test_rounds_to_the_nearest_code(name: str) -> None:
    """A weight is off by half the distance of neighbouring codes at most, beside the rounding of its scale."""
    form, plain = FORMATS[name][0], torch.randn(40, 384)
    off = (definition.dequantize(_quantized(name, plain)) - plain).abs().max() / plain.abs().max()
    # Half a step of the largest code; MXFP4's scales are powers of 2, so that its largest code may be twice too large.
    assert 0 < off <= {"e4m3": 16 / 448, "int8": 0.51 / 127, "int4": 0.51 / 7, "mxfp4": 2 / 6, "nvfp4": 1.1 / 6}[form]


@pytest.mark.parametrize("columns", [256, 1024, 8192])
def test_row_counts_reach_every_tile(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether activations are quantised or not, up to where the input is split no more."""
    monkeypatch.setattr(gemm, "device_of", lambda device: Device("sm_90", 132))
    weight = quantize(torch.zeros(columns, 512), "int8")
    most = 12_000
    counts = gemm.row_counts(most, weight, torch.float16)

    def tiles(count: int) -> list[object]:
        return [gemm._tile(count, size, True, weight) for size in (1, 2)]

    reached = [tiles(count) for count in counts]
    assert all(tiles(count) in reached for count in range(1, most))
    assert len(counts) < 20


def test_rejects_what_does_not_fit(device: torch.device) -> None:
    problem = Problem.make(device, "int4 g32 zeros")
    x, weight = problem.x, problem.weight
    quantized_linear(x, weight)
    for given, options, message in (
        ((x[:, 1:], weight), {}, r"x: shape \[5, 383\], expected \[num_rows, 384\]"),
        ((x.double(), weight), {}, r"x: dtype torch[.]float64"),
        ((x.T.contiguous().T, weight), {}, "x: last dimension has stride 5"),
        ((x, weight.values), {}, r"weight: .*, expected a QuantizedWeight"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            quantized_linear(*given, **options)
    with pytest.raises(UnsupportedError, match="quantized_linear has no gradients"):
        quantized_linear(x.clone().requires_grad_(), weight)


def test_weights_that_do_not_fit(device: torch.device) -> None:
    int4, block, mxfp4 = (Problem.make(device, name).weight for name in ("int4 g32 zeros", "e4m3 block", "mxfp4"))
    scale, zero_point = int4.scale, int4.zero_point
    zero = torch.zeros(1, 3, dtype=torch.int8, device=device)
    for weight, changed, message in (
        (int4, {"values": int4.values[:, 1:]}, r"values: shape \[72, 47\], expected \[out_features, 48\]"),
        (int4, {"in_features": 0}, "in_features: 0"),
        (int4, {"scale": scale[1:]}, r"scale: shape \[71, 12\], expected \[72, groups\]"),
        (int4, {"scale": scale[:, 1:]}, "scale: 11 groups, expected a divisor of 384 columns"),
        (int4, {"zero_point": zero_point[:, 1:]}, r"zero_point: shape \[72, 11\], expected \[72, 12\]"),
        (int4, {"tensor_scale": scale}, r"tensor_scale: shape \[72, 12\], expected \[\]"),
        (int4, {"input_scale": scale[0, 0]}, "input_scale: given without quantizes_input"),
        (int4, {"input_order": torch.arange(383).int()}, r"input_order: shape \[383\], expected \[384\]"),
        (block, {"scale": block.scale[:, 1:]}, r"scale: shape \[1, 2\], expected \[1, 3\]"),
        (block, {"zero_point": zero}, "zero_point: given with e4m3 weights"),
        (mxfp4, {"scale": mxfp4.scale[:, 1:]}, r"scale: shape \[72, 11\], expected \[72, 12\]"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            dataclasses.replace(weight, **changed)
    for weight, changed, message in (
        (int4, {"scale": scale.repeat(1, 2)}, "scale: groups of 16 columns, expected a multiple of 32"),
        (int4, {"quantizes_input": True}, "quantizes_input: int4 weights with scales of shape"),
        (block, {"input_scale": block.scale[0, 0]}, "input_scale: given with scales of 128 x 128 blocks"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            dataclasses.replace(weight, **changed)


def test_quantize_rejects_what_does_not_fit() -> None:
    plain = torch.randn(8, 96)
    for weight, form, options, message in (
        (plain, "int3", {}, "form: 'int3', expected one of"),
        (plain, "int4", {"group_size": 64}, "group_size: 64, expected a divisor of 96 columns"),
        (plain, "e4m3", {"group_size": 32}, "group_size: 32, expected -1, 0 or 128 with e4m3"),
        (plain, "nvfp4", {"symmetric": False}, "symmetric: False with nvfp4"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            quantize(weight, form, **options)


def test_results_do_not_depend_on_other_rows(backend: str, device: torch.device) -> None:
    """Within a tile's rows: a row alone gives the same bits as among others."""
    problem = Problem.make(device, "int4 g128", num_rows=7, dtype=torch.float16)
    out = quantized_linear(problem.x, problem.weight)
    alone = torch.cat([quantized_linear(problem.x[row : row + 1], problem.weight) for row in range(7)])
    if backend == "triton":
        assert torch.equal(out, alone)
    assert_close(alone, definition.quantized_linear(problem.x, problem.weight))


MODULES = {each.__name__.rpartition(".")[2]: each for each in (product, gemm, quantize_rows)}
# Fault -> the file, text of it, and what the faulty copy has in its place.
MUTATIONS = {
    "no fault": ("gemm", "", ""),
    "nibbles are swapped": ("product", "tl.join(low, high)", "tl.join(high, low)"),
    "the next run's nibble": ("product", "(words >> 4 * RUN) & 0x", "(words >> 4 * (3 - RUN)) & 0x"),
    "the sign is lost": ("product", "& -0x7FFF8000", "& 0"),
    "the neighbour's scale": ("product", "stride_scale_group, step + 1,", "stride_scale_group, step + 2,"),
    "the first group's scale for all runs": ("product", "(first + RUN) // GROUP_K", "first // GROUP_K"),
    "the first half's scale for a whole run": ("product", "groups + per_run", "groups"),
    "the zero point is one off": ("product", "zero = zero_point.to(half) + ", "zero = zero_point.to(half) + 1 + "),
    "the neighbour's zero point": ("product", "zeros[run if BY_RUN else 0]", "next_zeros[run if BY_RUN else 0]"),
    "the int8 zero point is added": ("product", "values.to(dtype) - zero", "values.to(dtype) + zero"),
    "the grid of blocks is transposed": (
        "gemm",
        "scale_rows.to(tl.int64) * stride_scale_row",
        "scale_rows.to(tl.int64) * stride_scale_group",
    ),
    "another row's activation scale": ("gemm", "x_rows * num_x_groups", "x_rows * 0"),
    "a step is dropped": ("product", "range(first_step, end_step)", "range(first_step, end_step - 1)"),
    "a split is dropped": ("gemm", "tl.static_range(NUM_SPLITS):", "tl.static_range(1, NUM_SPLITS):"),
    "no bias": ("gemm", "if bias_ptr is not None:", "if False:"),
    "no scale for all": ("gemm", "acc *= tl.load(tensor_scale_ptr)", "acc *= 1.0"),
    "activations are cut off": ("quantize_rows", "round_to_int8(x)", "x.to(tl.int8)"),
    "activations beyond the largest code": ("quantize_rows", "largest / LARGEST", "largest / (LARGEST + 64)"),
}
PROBLEMS = (
    ("int4 g128 zeros", {"size": (20, 512)}),
    ("int4 g32", {"size": (20, 256), "dtype": torch.float16}),
    ("int8 channel zeros", {"size": (20, 256)}),
    ("mxfp4", {"size": (20, 256)}),
    ("nvfp4", {"size": (20, 256), "biased": True}),
    ("int8 channel", {"size": (20, 256), "biased": True}),
    ("e4m3 block", {"size": (150, 384)}),
)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", MUTATIONS)
def test_checks_see_the_fault(fault: str, tmp_path: Path, device: torch.device) -> None:
    name, *change = MUTATIONS[fault]
    with planted([MODULES[name]], [*MODULES.values(), linear], tmp_path, *change):
        is_found = any(turns_red(Problem.make(device, name, **options).check) for name, options in PROBLEMS)
    assert is_found == (fault != "no fault")
