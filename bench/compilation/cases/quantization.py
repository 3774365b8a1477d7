"""The product with quantised weights: every format at few rows and at many, and the kernels around it."""

from __future__ import annotations

import math

import torch

from paged.bench.compilation.cases.case import EVERY_CASE, NUM_SMS, CompileCase
from paged.bench.compilation.cases.launches import DTYPES, SeenLaunch, empty, launch_case, launch_of, launches_of
from paged.kernels.quantization.gemm import _quantized_linear_kernel, _sum_partials_kernel
from paged.kernels.quantization.packing import FP8_BLOCK, num_words
from paged.kernels.quantization.quantize_rows import quantize_rows
from paged.kernels.quantization.quantized_linear import quantized_linear
from paged.kernels.quantization.weight import QuantizedWeight

# Layers of Llama-3-8B, [out_features, in_features]: the output projection of attention, and the MLP's gate and up side
# by side. For few rows, K of the output projection is split over programs.
OUT, GATE_UP = (4096, 4096), (28672, 4096)

# Name -> types of codes and of scales, rows and columns that share a scale, whether the input is quantised.
FORMATS: dict[str, tuple[str, torch.dtype, int, int, bool]] = {
    "e4m3 block": ("fp8e4nv", torch.float32, 128, 128, True),
    "e4m3 channel": ("fp8e4nv", torch.float32, 1, 0, True),
    "int8 channel": ("i8", torch.float32, 1, 0, True),
    "int8 weights": ("i8", torch.bfloat16, 1, 0, False),
    "int8 g32": ("i8", torch.bfloat16, 1, 32, False),
    "int4 channel": ("i32", torch.bfloat16, 1, 0, False),
    "int4 g128": ("i32", torch.bfloat16, 1, 128, False),
    "int4 g32": ("i32", torch.bfloat16, 1, 32, False),
    "mxfp4": ("i32", torch.float8_e8m0fnu, 1, 32, False),
    "nvfp4": ("i32", torch.float8_e4m3fn, 1, 16, False),
}
FEW_ROWS = ("e4m3 block", "int8 channel", "int8 g32", "int4 channel", "int4 g128", "mxfp4", "nvfp4")
MANY_ROWS = ("e4m3 block", "int8 channel", "int8 weights", "int4 g128", "int4 g32", "nvfp4")


def cases() -> list[CompileCase]:
    """Return cases of few, medium and many rows; zero points, other dtypes, and weight rows off the 16-byte grid."""
    cases = []
    for target in EVERY_CASE:
        for name in FEW_ROWS:
            cases.append(gemm_case(target, name, 16, OUT))
        for name in MANY_ROWS:
            cases.append(gemm_case(target, name, 4096, GATE_UP))
        cases += [
            gemm_case(target, "int4 g32", 16, OUT, zeros=True),
            gemm_case(target, "int4 g128", 4096, OUT, zeros=True),
            gemm_case(target, "e4m3 block", 32, GATE_UP),
            gemm_case(target, "int4 g128", 64, GATE_UP),
            gemm_case(target, "int4 g128", 16, OUT, "fp32"),
            gemm_case(target, "e4m3 block", 4096, OUT, "fp32"),
            gemm_case(target, "e4m3 channel", 16, (511, 1000)),
            gemm_case(target, "int4 channel", 4096, (511, 1001)),
        ]
        cases += _around(target)
    return cases


def gemm_case(
    target: str, name: str, num_rows: int, size: tuple[int, int], dtype: str = "bf16", *, zeros: bool = False
) -> CompileCase:
    """Return the case of one layer's product with this many rows."""
    columns, depth = size
    x, weight = empty(dtype, num_rows, depth), _weight(name, size, zeros=zeros)
    launch = launch_of(_quantized_linear_kernel, target, quantized_linear, x, weight)
    integers: tuple[str, ...] = ()
    expect = {}
    if depth % 16 == 0:
        integers = ("N", "K", "stride_w_row", "stride_scale_group", "stride_zero_group")
        if dtype != "fp32":
            is_native = launch.arguments["x_ptr"].dtype == launch.arguments["w_ptr"].dtype
            expect = _expected(target, launch.arguments["FORMAT"], is_native=is_native)
    if zeros:
        name = f"{name} zeros"
    return launch_case(
        f"quantized_linear {name} {dtype} {columns}x{depth} {_shown(launch)} for {target}",
        launch,
        targets=(target,),
        aligned=integers,
        expect=expect,
    )


def _weight(name: str, size: tuple[int, int], *, zeros: bool = False) -> QuantizedWeight:
    """Return weights in one of FORMATS, [columns, depth]."""
    codes, scale_dtype, group_n, group_k, quantizes_input = FORMATS[name]
    columns, depth = size
    shape = [columns // group_n]
    if group_k:
        shape.append(depth // group_k)
    width = depth
    if codes == "i32":
        width = num_words(depth)
    scale = torch.empty(shape, dtype=scale_dtype)
    zero_point = tensor_scale = None
    if zeros:
        zero_point = torch.empty(shape, dtype=torch.int8)
    if name in ("mxfp4", "nvfp4"):
        tensor_scale = empty("fp32")
    return QuantizedWeight(empty(codes, columns, width), scale, depth, zero_point, tensor_scale, quantizes_input)


def _expected(target: str, form: str, *, is_native: bool) -> dict[str, tuple[str, ...]]:
    """Return the expected matrix instructions, and loads 16 bytes wide."""
    if target == "gfx942":
        return {target: ("v_mfma", "load_dwordx4")}
    copy = "LDGSTS.128"
    if target == "sm_90" and form == "int8" and not is_native:
        copy = "LDGSTS"  # the codes are wgmma's left operand, in registers: copies have 8 bytes
    matrix = {"sm_80": "HMMA", "sm_90": "HGMMA"}
    if is_native:
        matrix = {"sm_80": "IMMA", "sm_90": {"e4m3": "QGMMA", "int8": "IGMMA"}[form]}
    if target in matrix:
        return {target: (copy, matrix[target])}
    return {target: (copy,)}


def _shown(launch: SeenLaunch) -> str:
    size = "{BLOCK_M}x{BLOCK_N}x{BLOCK_K}".format(**launch.arguments)
    if launch.arguments["SWAP_AB"]:
        size = f"{size} swapped"
    return f"{size} splits={launch.arguments['NUM_SPLITS']}"


def _around(target: str) -> list[CompileCase]:
    """Return cases of rounding activations to e4m3 and int8, by token or by 128 values, and of the sum of partials."""
    cases = []
    x = empty("bf16", 16, 4096)
    for kind, codes, group in (("e4m3", "fp8e4nv", 4096), ("e4m3", "fp8e4nv", FP8_BLOCK), ("int8", "i8", 4096)):
        (launch,) = launches_of(target, _quantize, x, DTYPES[codes], in_groups=group == FP8_BLOCK)
        cases.append(launch_case(f"quantize_rows {kind} groups of {group} for {target}", launch, targets=(target,)))
    for splits in (2, 8):
        # As many output columns as make two programs per SM.
        columns = 128 * math.ceil(2 * NUM_SMS[target] / splits)
        weight = _weight("int8 channel", (columns, 4096))
        launch = launch_of(_sum_partials_kernel, target, quantized_linear, x, weight)
        cases.append(launch_case(f"quantized_linear sum of {splits} partials for {target}", launch, targets=(target,)))
    return cases


def _quantize(x: torch.Tensor, dtype: torch.dtype, *, in_groups: bool) -> None:
    quantize_rows(x, dtype, in_groups=in_groups)(x, None)
