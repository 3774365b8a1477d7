"""quantized_linear against float64, on both backends."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from paged import InvalidInputError, QuantizedWeight, UnsupportedError, quantized_linear
from paged.kernels.common.device import Device
from paged.kernels.quantization import gemm, reference
from paged.kernels.quantization.config import LinearShape, linear_tile
from paged.kernels.quantization.quantize import quantize
from tests.kernels.quantization.problem import FORMATS, Problem
from tests.tolerance import assert_close, dtypes

NAN = float("nan")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", dtypes())
def test_matches_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    Problem.make(device, name, dtype=dtype, biased=True).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["e4m3 block", "int8 channel", "int4 g128 zeros", "nvfp4"])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 17, 65])
def test_numbers_of_rows(name: str, num_rows: int, device: torch.device) -> None:
    """Few rows, whose input is split, and the tiles of 32, 64 and 128 rows."""
    Problem.make(device, name, num_rows=num_rows, size=(136, 640), dtype=torch.float16).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("e4m3 block", (300, 200)),  # more columns than a tile, blocks cut short both ways
        ("e4m3 channel", (33, 171)),  # rows off the 16-byte grid
        ("int8 weights alone", (33, 171)),
        ("int4 channel zeros", (33, 171)),
        ("int4 g32", (40, 160)),  # no whole unit of 128 columns
        ("int4 g96 zeros", (40, 96)),
        ("mxfp4", (24, 80)),  # and no whole group
        ("nvfp4", (24, 40)),
        ("int4 g64", (1, 64)),
        ("e4m3 block", (5, 7)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_odd_sizes(name: str, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    Problem.make(device, name, num_rows=18, size=size, dtype=dtype).check()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["e4m3 channel", "int8 tensor"])
def test_static_activations(name: str, device: torch.device) -> None:
    """Values beyond the largest are the largest."""
    problem = Problem.make(
        device, name, input_scale=torch.tensor(2.0 / FORMATS_LARGEST[name.split()[0]], device=device)
    )
    assert (problem.x.abs() > 2).any()
    problem.check()


FORMATS_LARGEST = {"e4m3": 448, "int8": 127}


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
@pytest.mark.parametrize("name", ["e4m3 channel", "e4m3 block", "int8 channel", "int4 g128", "mxfp4"])
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_what_is_not_finite_stays_in_its_row(name: str, bad: float, device: torch.device) -> None:
    problem = Problem.make(device, name, num_rows=4)
    want = quantized_linear(problem.x, problem.weight)
    problem.x[1, 5] = bad
    got = quantized_linear(problem.x, problem.weight)
    assert not got[1].isfinite().any()
    keep = torch.tensor([0, 2, 3], device=device)
    assert torch.equal(got[keep], want[keep])


@pytest.mark.usefixtures("backend")
def test_zero_rows_and_zero_weights(device: torch.device) -> None:
    for name in ("e4m3 block", "int8 channel", "int4 g32 zeros", "nvfp4", "mxfp4"):
        form, arguments = FORMATS[name]
        weight = quantize(torch.zeros(24, 128, device=device), form, **arguments)
        assert torch.equal(
            quantized_linear(torch.zeros(3, 128, device=device), weight), torch.zeros(3, 24, device=device)
        )
        assert torch.equal(
            quantized_linear(torch.randn(3, 128, device=device), weight), torch.zeros(3, 24, device=device)
        )


@pytest.mark.parametrize("name", FORMATS)
def test_rounds_to_the_nearest_code(name: str) -> None:
    """A weight is off by half the distance of neighbouring codes at most, beside the rounding of its scale."""
    form, arguments = FORMATS[name]
    plain = torch.randn(40, 384)
    off = (reference.dequantize(quantize(plain, form, **arguments)) - plain).abs().max() / plain.abs().max()
    # Half a step of the largest code; MXFP4's scales are powers of 2, so that its largest code may be twice too large.
    assert 0 < off <= {"e4m3": 16 / 448, "int8": 0.51 / 127, "int4": 0.51 / 7, "mxfp4": 2 / 6, "nvfp4": 1.1 / 6}[form]


def test_tiles() -> None:
    h100 = Device("sm_90", 132)

    def tile(num_rows: int, columns: int = 4096, group_k: int = 128, **options: bool) -> tuple[int, int, int]:
        shape = LinearShape(num_rows, columns, 4096, 2, options.get("is_packed", True), group_k)
        found = linear_tile(shape, h100)
        return found.block_m, found.block_k, found.num_splits

    assert [tile(rows) for rows in (1, 16, 17, 64, 65)] == [
        (16, 128, 8), (16, 128, 8), (32, 128, 8), (64, 128, 2), (128, 128, 2)
    ]  # fmt: skip
    assert tile(1, columns=28672) == (16, 128, 2)
    assert tile(4096, columns=28672) == (128, 128, 1)
    assert tile(4096, group_k=32, is_packed=False)[1] == 32
    blackwell = linear_tile(LinearShape(4096, 4096, 4096, 2, True, 128), Device("sm_100", 148))
    assert blackwell.block_m == 64  # of more rows tensor memory has no room for the weights


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
    with pytest.raises(InvalidInputError, match=r"x: shape \[5, 383\], expected \[num_rows, 384\]"):
        quantized_linear(x[:, 1:], weight)
    with pytest.raises(InvalidInputError, match=r"x: dtype torch[.]float64"):
        quantized_linear(x.double(), weight)
    with pytest.raises(InvalidInputError, match="x: last dimension has stride 5"):
        quantized_linear(x.T.contiguous().T, weight)
    with pytest.raises(InvalidInputError, match=r"bias: shape \[71\], expected \[72\]"):
        quantized_linear(x, weight, bias=torch.zeros(71, device=device))
    with pytest.raises(InvalidInputError, match=r"out: shape \[5, 71\], expected \[5, 72\]"):
        quantized_linear(x, weight, out=torch.zeros(5, 71, device=device))
    with pytest.raises(InvalidInputError, match=r"weight: .*, expected a QuantizedWeight"):
        quantized_linear(x, weight.values)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="quantized_linear has no gradients"):
        quantized_linear(x.clone().requires_grad_(), weight)


def test_weights_that_do_not_fit(device: torch.device) -> None:
    weight = Problem.make(device, "int4 g32 zeros").weight
    scale, zero_point = weight.scale, weight.zero_point
    assert zero_point is not None
    for changed, error, message in (
        (
            {"values": weight.values[:, 1:]},
            InvalidInputError,
            r"values: shape \[72, 47\], expected \[out_features, 48\]",
        ),
        ({"values": weight.values.T.contiguous().T}, InvalidInputError, "values: strides"),
        ({"values": weight.values.short()}, InvalidInputError, r"values: dtype torch[.]int16"),
        ({"in_features": 0}, InvalidInputError, "in_features: 0"),
        ({"in_features": 385}, InvalidInputError, r"values: shape \[72, 48\], expected \[out_features, 64\]"),
        ({"scale": scale[1:]}, InvalidInputError, r"scale: shape \[71, 12\], expected \[72, groups\]"),
        ({"scale": scale[:, 1:]}, InvalidInputError, "scale: 11 groups, expected a divisor of 384 columns"),
        ({"scale": scale.double()}, InvalidInputError, "scale: dtype"),
        ({"scale": scale.repeat(1, 2)}, UnsupportedError, "scale: groups of 16 columns, expected a multiple of 32"),
        ({"zero_point": zero_point[:, 1:]}, InvalidInputError, r"zero_point: shape \[72, 11\], expected \[72, 12\]"),
        ({"zero_point": zero_point.int()}, InvalidInputError, "zero_point: dtype"),
        ({"tensor_scale": scale}, InvalidInputError, r"tensor_scale: shape \[72, 12\], expected \[\]"),
        ({"quantizes_input": True}, UnsupportedError, "quantizes_input: int4 weights with scales of shape"),
        ({"input_scale": scale[0, 0]}, InvalidInputError, "input_scale: given without quantizes_input"),
        ({"input_order": torch.arange(383).int()}, InvalidInputError, r"input_order: shape \[383\], expected \[384\]"),
        ({"input_order": torch.arange(384)}, InvalidInputError, "input_order: dtype"),
    ):
        with pytest.raises(error, match=message):
            dataclasses.replace(weight, **changed)
    block = Problem.make(device, "e4m3 block").weight
    with pytest.raises(InvalidInputError, match=r"scale: shape \[1, 2\], expected \[1, 3\]"):
        dataclasses.replace(block, scale=block.scale[:, 1:])
    with pytest.raises(UnsupportedError, match="input_scale: given with scales of 128 x 128 blocks"):
        dataclasses.replace(block, input_scale=block.scale[0, 0])
    with pytest.raises(InvalidInputError, match="zero_point: given with e4m3 weights"):
        dataclasses.replace(block, zero_point=torch.zeros(1, 3, dtype=torch.int8, device=device))
    mxfp4 = Problem.make(device, "mxfp4").weight
    with pytest.raises(InvalidInputError, match=r"scale: shape \[72, 11\], expected \[72, 12\]"):
        dataclasses.replace(mxfp4, scale=mxfp4.scale[:, 1:])
    assert isinstance(mxfp4, QuantizedWeight)


def test_quantize_rejects_what_does_not_fit() -> None:
    plain = torch.randn(8, 96)
    for options, message in (
        ({"form": "int3"}, "form: 'int3', expected one of"),
        ({"form": "int4", "group_size": 64}, "group_size: 64, expected a divisor of 96 columns"),
        ({"form": "e4m3", "group_size": 32}, "group_size: 32, expected -1, 0 or 128 with e4m3"),
        ({"form": "nvfp4", "symmetric": False}, "symmetric: False with nvfp4"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            quantize(plain, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="weight: dtype"):
        quantize(plain.double(), "int4")


def test_results_do_not_depend_on_other_rows(backend: str, device: torch.device) -> None:
    """Within a tile's rows: a row alone gives the same bits as among others."""
    problem = Problem.make(device, "int4 g128", num_rows=7, dtype=torch.float16)
    out = quantized_linear(problem.x, problem.weight)
    alone = torch.cat([quantized_linear(problem.x[row : row + 1], problem.weight) for row in range(7)])
    if backend == "triton":
        assert torch.equal(out, alone)
    assert_close(alone, reference.quantized_linear(problem.x, problem.weight))
