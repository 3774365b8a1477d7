"""The product with quantised weights: every format at few rows and at many, and the kernels around it."""

from __future__ import annotations

from typing import Any

from paged.bench.compilation.case import EVERY_CASE, NUM_SMS, CompileCase, kernel_case
from paged.kernels.common.device import Device
from paged.kernels.common.packed.packing import FP8_BLOCK
from paged.kernels.common.packed.quantize_rows import _quantize_rows_kernel
from paged.kernels.quantization.config import GROUP_M, LinearShape, LinearTile, linear_tile
from paged.kernels.quantization.gemm import SUM_COLUMNS, _quantized_linear_kernel, _sum_partials_kernel

# Layers of Llama-3-8B, [out_features, in_features]: the output of attention, whose input is split for few rows, and
# both inputs of the MLP side by side.
OUT, GATE_UP = (4096, 4096), (28672, 4096)

# Name -> code, how scales come, the type of a scale, rows and columns that share one, whether the input is quantised.
FORMATS: dict[str, tuple[str, str, str, int, int, bool]] = {
    "e4m3 block": ("e4m3", "", "*fp32", 128, 128, True),
    "e4m3 channel": ("e4m3", "", "*fp32", 1, 0, True),
    "int8 channel": ("int8", "", "*fp32", 1, 0, True),
    "int8 weights": ("int8", "", "*bf16", 1, 0, False),
    "int8 g32": ("int8", "", "*bf16", 1, 32, False),
    "int4 channel": ("int4", "", "*bf16", 1, 0, False),
    "int4 g128": ("int4", "", "*bf16", 1, 128, False),
    "int4 g32": ("int4", "", "*bf16", 1, 32, False),
    "mxfp4": ("e2m1", "e8m0", "*u8", 1, 32, False),
    "nvfp4": ("e2m1", "e4m3", "*u8", 1, 16, False),
}
FEW_ROWS = ("e4m3 block", "int8 channel", "int8 g32", "int4 channel", "int4 g128", "mxfp4", "nvfp4")
MANY_ROWS = ("e4m3 block", "int8 channel", "int8 weights", "int4 g128", "int4 g32", "nvfp4")


def cases() -> list[CompileCase]:
    """16 and 4,096 rows, and between them; zero points, other dtypes, rows of weights off the 16-byte grid."""
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
    """One launch as `quantized_gemm` makes it."""
    form, scale, scale_type, group_n, group_k, quantizes_input = FORMATS[name]
    columns, depth = size
    aligned = depth % 16 == 0
    is_native = quantizes_input and (form == "int8" or (target in ("sm_90", "sm_100") and dtype != "fp32"))
    native_type = {"int8": "*i8"}.get(form, "*fp8e4nv")
    is_packed = form in ("int4", "e2m1")
    x_type, element_size = f"*{dtype}", {"bf16": 2, "fp32": 4}[dtype]
    w_type = {"int8": "*i8", "int4": "*i32", "e2m1": "*i32"}.get(form, "*u8")
    if is_native:
        x_type, element_size, w_type = native_type, 1, native_type
    shape = LinearShape(num_rows, columns, depth, element_size, is_packed, group_k, aligned)
    tile = linear_tile(shape, Device(target, NUM_SMS[target]))
    pointers: dict[str, str | None] = {
        "x_ptr": x_type,
        "x_scale_ptr": None,
        "w_ptr": w_type,
        "scale_ptr": scale_type,
        "zero_point_ptr": None,
        "tensor_scale_ptr": None,
        "bias_ptr": None,
        "out_ptr": f"*{dtype}",
    }
    if quantizes_input:
        pointers["x_scale_ptr"] = "*fp32"
    if zeros:
        pointers["zero_point_ptr"] = "*i8"
    if scale:
        pointers["tensor_scale_ptr"] = "*fp32"
    if tile.num_splits > 1:
        pointers["out_ptr"] = "*fp32"
    x_groups, x_unit = 0, 1
    if group_n == FP8_BLOCK:
        x_groups = FP8_BLOCK
    integers: tuple[str, ...] = ()
    expect = {}
    if aligned:
        x_unit = 16 // element_size
        integers = ("N", "K", "stride_w_row", "stride_scale_group", "stride_zero_group")
        if dtype != "fp32":
            expect = _expected(target, form, is_native=is_native)
    constexprs: dict[str, Any] = {
        "FORMAT": form,
        "SCALE": scale,
        "GROUP_N": group_n,
        "GROUP_K": group_k,
        "X_GROUPS": x_groups,
        "EVEN_K": depth % tile.block_k == 0,
        "X_UNIT": x_unit,
        "NUM_SPLITS": tile.num_splits,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": GROUP_M,
        "SWAP_AB": tile.swap_ab,
    }
    if zeros:
        name = f"{name} zeros"
    text = f"quantized_linear {name} {dtype} {columns}x{depth} {_shown(tile)} for {target}"
    return kernel_case(
        text,
        _quantized_linear_kernel,
        constexprs,
        pointers,
        targets=(target,),
        aligned=integers,
        expect=expect,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _expected(target: str, form: str, *, is_native: bool) -> dict[str, tuple[str, ...]]:
    """Matrix instructions, and loads 16 bytes wide."""
    if target == "gfx942":
        return {target: ("v_mfma", "load_dwordx4")}
    copy = "LDGSTS.128"
    if target == "sm_90" and form == "int8" and not is_native:
        copy = "LDGSTS"  # bytes that become the left operand of wgmma in registers are copied 8 at a time
    matrix = {"sm_80": "HMMA", "sm_90": "HGMMA"}
    if is_native:
        matrix = {"sm_80": "IMMA", "sm_90": {"e4m3": "QGMMA", "int8": "IGMMA"}[form]}
    if target in matrix:
        return {target: (copy, matrix[target])}
    return {target: (copy,)}


def _shown(tile: LinearTile) -> str:
    size = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    if tile.swap_ab:
        size = f"{size} swapped"
    return f"{size} splits={tile.num_splits}"


def _around(target: str) -> list[CompileCase]:
    """Activations to e4m3 and int8, a token or 128 values at a time, and the sum of partials."""
    is_native = target in ("sm_90", "sm_100")
    e4m3 = "*bf16"
    if is_native:
        e4m3 = "*u8"
    cases = []
    for kind, q, largest, group, block_rows, block_k in (
        ("e4m3", e4m3, 448.0, 4096, 1, 1024),
        ("e4m3", e4m3, 448.0, FP8_BLOCK, 8, 128),
        ("int8", "*i8", 127.0, 4096, 1, 1024),
    ):
        constexprs = {
            "SIZE": 4096,
            "GROUP": group,
            "LARGEST": largest,
            "ALIGNED": True,
            "NATIVE": is_native,
            "BLOCK_ROWS": block_rows,
            "BLOCK_K": block_k,
        }
        pointers = {"x_ptr": "*bf16", "given_scale_ptr": None, "q_ptr": q, "scale_ptr": "*fp32"}
        name = f"quantize_rows {kind} groups of {group} for {target}"
        cases.append(kernel_case(name, _quantize_rows_kernel, constexprs, pointers, targets=(target,)))
    pointers = dict.fromkeys(("partials_ptr", "x_scale_ptr", "scale_ptr"), "*fp32")
    pointers |= {"tensor_scale_ptr": None, "bias_ptr": None, "out_ptr": "*bf16"}
    for splits in (2, 8):
        constexprs = {"GROUP_N": 1, "NUM_SPLITS": splits, "BLOCK_N": SUM_COLUMNS}
        name = f"quantized_linear sum of {splits} partials for {target}"
        cases.append(kernel_case(name, _sum_partials_kernel, constexprs, pointers, targets=(target,)))
    return cases
