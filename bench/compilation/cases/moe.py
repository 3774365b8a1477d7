"""The two grouped GEMMs of the fused MoE with every tile that the wrapper can choose and every format of weights, and
the kernels around them."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton

from paged.bench.compilation.case import EVERY_CASE, NATIVE_FP8, NUM_SMS, TARGETS, CompileCase, kernel_case
from paged.kernels.common.device import Device
from paged.kernels.common.packed.packing import FP8_BLOCK
from paged.kernels.moe.config import FOLDER, MoeShape, MoeTile, fallback_tiles, load_table, quantized_tile
from paged.kernels.moe.fused_moe import _moe_sum_kernel
from paged.kernels.moe.gemm import _expert_gemm_kernel
from paged.kernels.moe.gemv import GATE_UP_TILE, _down_gemv_kernel, _gate_up_gemv_kernel, down_tile
from paged.kernels.moe.moe_align_block_size import _count_kernel, _place_kernel
from paged.kernels.moe.route_and_align import _route_and_align_kernel
from paged.kernels.moe.route_tokens import _route_tokens_kernel
from paged.kernels.moe.routing import Routing

# Experts, experts a token, hidden size, intermediate size.
QWEN3_30B_A3B = (128, 8, 2048, 768)
# Arguments that are neither constexprs, int32 scalars nor of the hidden states' dtype.
KINDS = {"scaling_factor": "fp32", "ranks_ptr": "*i8"} | dict.fromkeys(("weights_ptr", "bias_ptr"), "*fp32")
KINDS |= dict.fromkeys(("topk_ids_ptr", "ids_ptr", "counts_ptr", "ticket_ptr"), "*i32")
KINDS |= dict.fromkeys(("expert_ids_ptr", "sorted_token_ids_ptr", "num_tokens_post_padded_ptr"), "*i32")
MIXTRAL_8X7B = (8, 2, 4096, 14336)
GPT_OSS_20B = (32, 4, 2880, 2880)
_PACKED_LAYOUTS = {"mxfp4": ("mxfp4", 1, 32), "nvfp4": ("nvfp4", 1, 16), "int4": ("int4", 1, 128)}
# Of packed weights: matrix instructions, and loads 16 bytes wide.
_PACKED_CODE = {
    **dict.fromkeys(("sm_80", "sm_89", "sm_120"), ("HMMA", "LDGSTS.128")),
    "sm_90": ("HGMMA", "LDGSTS.128"),
    **dict.fromkeys(("sm_100", "sm_103"), ("LDGSTS.128",)),
    "gfx942": ("v_mfma", "load_dwordx4"),
}


def cases() -> list[CompileCase]:
    """Every tile that the fallback returns and those of the tuned tables; activations, biases and odd sizes once."""
    cases = _steps()
    for target in TARGETS:
        cases += _packed(target)
        for (gated, dtype, tile), shape in _fallbacks(target).items():
            cases.append(gemm_case(target, tile, shape, gated, dtype))
        for gated, tile, shape in _tuned(target):
            layout = _PACKED_LAYOUTS.get(shape.packed, ("", 1, 0))
            cases.append(gemm_case(target, tile, shape, gated, "bf16", layout=layout))
        if target not in EVERY_CASE:
            continue
        # The other activations with biases and alternating rows: sizes of gpt-oss-120b, one that no step divides, and
        # one off the 16-byte grid.
        for activation, tokens, size in (("gelu", 32, 2880), ("gelu_tanh", 800, 2064), ("swiglu_oai", 16384, 2880)):
            shape = MoeShape(4 * tokens, 128, size, size, 2)
            tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
            cases.append(gemm_case(target, tiles.gate_up, shape, True, "bf16", activation, biased=True))
        cases += _quantized(target)
        odd = MoeShape(8192, 128, 511, 33, 2)
        tile = fallback_tiles(odd, Device(target, NUM_SMS[target])).gate_up
        cases.append(gemm_case(target, tile, odd, True, "bf16", "swiglu_oai", biased=True))
    return cases


def _fallbacks(target: str) -> dict[tuple[bool, str, MoeTile], MoeShape]:
    """Return the first shape for every choice of GEMM (gated or not), dtype and tile."""
    shapes: dict[tuple[bool, str, MoeTile], MoeShape] = {}
    for num_experts, top_k, hidden_size, intermediate_size in (QWEN3_30B_A3B, MIXTRAL_8X7B):
        for dtype, element_size in (("bf16", 2), ("fp32", 4)):
            for exponent in range(16):
                num_entries = top_k * 2**exponent
                shape = MoeShape(num_entries, num_experts, hidden_size, intermediate_size, element_size)
                tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
                shapes.setdefault((True, dtype, tiles.gate_up), shape)
                shapes.setdefault((False, dtype, tiles.down), shape)
    return shapes


def _tuned(target: str) -> list[tuple[bool, MoeTile, MoeShape]]:
    """The tables' entries, for the chips that were tuned."""
    entries = []
    for path in sorted(FOLDER.glob("*.json")):
        header = json.loads(path.read_text())
        if header["arch"] != target:
            continue
        sizes = {name: header[name] for name in ("num_experts", "hidden_size", "intermediate_size")}
        for num_entries, tiles in load_table(path).items():
            shape = MoeShape(num_entries, **sizes, element_size=2, packed=header.get("packed", ""))
            entries += [(True, tiles.gate_up, shape), (False, tiles.down, shape)]
    return entries


def gemm_case(
    target: str,
    tile: MoeTile,
    shape: MoeShape,
    gated: bool,
    dtype: str,
    activation: str = "silu",
    *,
    biased: bool = False,
    layout: tuple[str, int, int] = ("", 1, 0),
    zeros: bool = False,
) -> CompileCase:
    """One of the two GEMMs. layout: the format of quantised weights, and the rows and columns of a group; those that
    `shape` says are packed have scales, and zero points, whose rows are neighbours."""
    columns, depth, entries_per_row = shape.intermediate_size, shape.hidden_size, 8
    if not gated:
        columns, depth, entries_per_row, activation = depth, columns, 1, ""
    kind, group_n, group_k = layout
    codes = {"mxfp4": "e2m1", "nvfp4": "e2m1"}.get(kind, kind)
    scale_codes = {"mxfp4": "e8m0", "nvfp4": "e4m3"}.get(kind, "")
    ones = ["stride_scale_group", "stride_zeros_group"]
    if shape.packed:
        ones = ["stride_scale_row", "stride_zeros_row"]
    constexprs: dict[str, Any] = {
        "N": columns,
        "EVEN_K": depth % tile.block_k == 0,
        "ENTRIES_PER_ROW": entries_per_row,
        "ACTIVATION": activation,
        "INTERLEAVED": biased,
        "FORMAT": codes,
        "SCALE": scale_codes,
        "X_GROUP": FP8_BLOCK,
        "GROUP_N": group_n,
        "GROUP_K": group_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "SWAP_AB": tile.swap_ab,
        # As the launcher makes constants of ones.
        **dict.fromkeys(ones, 1),
        "stride_tensor_scale": 1,
    }
    uses_tma = tile.tma and not kind and depth % tile.block_k == 0
    kinds = dict(KINDS)
    optional = _optional_tensors(target, shape, gated, dtype, kind, biased, zeros)
    if uses_tma:
        num_parts = 1
        if gated:
            num_parts = 2
        optional["w_ptr"] = None
        optional["w_desc"] = f"tensordesc<{dtype}[1, {num_parts}, {tile.block_n}, {tile.block_k}]>"
    for argument, argument_kind in optional.items():
        if argument_kind is None:
            constexprs[argument] = None
        else:
            kinds[argument] = argument_kind
    product = "down"
    if gated:
        product = f"gate_up {activation}"
    flags = {"packed": bool(shape.packed), "zeros": zeros}
    words = ["fused_moe", kind, *(word for word, is_set in flags.items() if is_set), product]
    words += [dtype, f"{columns}x{depth}", f"{tile.block_m}x{tile.block_n}x{tile.block_k}"]
    flags = {"swapped": tile.swap_ab, "tma": uses_tma, "biased": biased}
    words += [*(word for word, is_set in flags.items() if is_set), "for", target]
    aligned = None
    if depth % 16 != 0:
        aligned = ()
    return kernel_case(
        " ".join(filter(None, words)),
        _expert_gemm_kernel,
        constexprs,
        kinds,
        dtype=dtype,
        aligned=aligned,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        expect=_expected_code(tile, shape, dtype, kind, depth, uses_tma),
        targets=(target,),
    )


def _optional_tensors(
    target: str, shape: MoeShape, gated: bool, dtype: str, kind: str, biased: bool, zeros: bool
) -> dict[str, str | None]:
    """Types of the arguments that not every product takes, None for those that this one does without."""
    types: dict[str, str | None] = {
        "w_ptr": {"": f"*{dtype}", "int8": "*i8", "int4": "*u8", "e4m3": "*u8"}.get(kind, "*i32"),
        "w_desc": None,
        "bias_ptr": None,
        "entry_weights_ptr": None,
        "x_scale_ptr": None,
        "scale_ptr": None,
        "zeros_ptr": None,
        "tensor_scale_ptr": None,
    }
    if shape.packed:
        types["w_ptr"] = "*i32"
    if biased:
        types["bias_ptr"] = f"*{dtype}"
    if not gated:
        types["entry_weights_ptr"] = "*fp32"
    if kind == "e4m3":
        types["x_scale_ptr"] = "*fp32"
        if target in NATIVE_FP8:
            types["x_ptr"] = types["w_ptr"] = "*fp8e4nv"
    if kind in ("mxfp4", "nvfp4"):
        types["scale_ptr"] = "*u8"
    elif shape.packed:
        types["scale_ptr"] = f"*{dtype}"
    elif kind:
        types["scale_ptr"] = "*fp32"
    if zeros:
        types["zeros_ptr"] = "*i8"
    if kind == "nvfp4":
        types["tensor_scale_ptr"] = "*fp32"
    return types


def _expected_code(
    tile: MoeTile, shape: MoeShape, dtype: str, kind: str, depth: int, uses_tma: bool
) -> dict[str, tuple[str, ...]]:
    """Matrix instructions, and asynchronous copies of rows on the 16-byte grid."""
    if dtype == "fp32":
        return {}
    if shape.packed:
        return _PACKED_CODE
    if kind:
        return {}
    copies = []
    if depth % 16 == 0:
        copies.append("LDGSTS")
    hopper = ["HMMA", *copies]
    if tile.block_m >= 64 or tile.swap_ab:
        hopper[0] = "HGMMA"
    if uses_tma:
        hopper.append("UTMALDG")
    return {
        **dict.fromkeys(("sm_80", "sm_89", "sm_120"), ("HMMA", *copies)),
        "sm_90": tuple(hopper),
        "gfx942": ("v_mfma",),
    }


def _quantized(target: str) -> list[CompileCase]:
    """Blocks of 128 x 128 in e4m3 at every number of rows; int8 and int4, which differ in how a register is decoded, in
    groups of 128 columns at the fewest and the most."""
    cases, is_native = [], target in NATIVE_FP8
    e4m3, int8, int4 = (("e4m3", 128, 128), ("int8", 1, 128), ("int4", 1, 128))
    num_experts, top_k, hidden_size, intermediate_size = QWEN3_30B_A3B
    for tokens, layouts in ((64, (e4m3, int8)), (256, (e4m3, int4)), (512, (e4m3,)), (4096, (e4m3, int8, int4))):
        shape = MoeShape(top_k * tokens, num_experts, hidden_size, intermediate_size, 2)
        tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
        for layout in layouts:
            tile = quantized_tile(tiles.gate_up, 128, target, gated=True, is_native=is_native and layout == e4m3)
            cases.append(gemm_case(target, tile, shape, True, "bf16", layout=layout))
    for layout in (e4m3, int4):
        tile = quantized_tile(tiles.down, 128, target, gated=False, is_native=is_native and layout == e4m3)
        cases.append(gemm_case(target, tile, shape, False, "bf16", layout=layout))
    return cases


def _packed(target: str) -> list[CompileCase]:
    """Sizes of gpt-oss-20b with every tile in MXFP4, which has the most to decode; the other formats at the fewest and
    the most rows."""
    cases = []
    device = Device(target, NUM_SMS[target])
    num_experts, top_k, hidden_size, intermediate_size = GPT_OSS_20B
    mxfp4, with_zeros = _PACKED_LAYOUTS["mxfp4"], ("int4", 1, 32)
    for tokens in (1, 64, 128, 256, 4096):
        layouts = [mxfp4]
        if target in EVERY_CASE and tokens in (64, 4096):
            layouts = [*_PACKED_LAYOUTS.values(), with_zeros]
        for layout in layouts:
            shape = MoeShape(top_k * tokens, num_experts, hidden_size, intermediate_size, 2, layout[0])
            tiles = fallback_tiles(shape, device)
            options: dict[str, Any] = {"biased": True, "layout": layout, "zeros": layout == with_zeros}
            cases.append(gemm_case(target, tiles.gate_up, shape, True, "bf16", "swiglu_oai", **options))
            if layout == mxfp4:
                cases.append(gemm_case(target, tiles.down, shape, False, "bf16", **options))
    if target in EVERY_CASE:
        for layout in (mxfp4, with_zeros):
            shape = MoeShape(64, num_experts, hidden_size, intermediate_size, 4, layout[0])
            tile = fallback_tiles(shape, device).gate_up
            cases.append(gemm_case(target, tile, shape, True, "fp32", "swiglu_oai", biased=True, layout=layout))
    return cases


def _steps() -> list[CompileCase]:
    """The kernels before and after the grouped GEMMs at the sizes of Qwen3-30B-A3B; routing also with every option of
    DeepSeek-V3."""
    num_experts, top_k, hidden_size, _ = QWEN3_30B_A3B
    # DeepSeek-V3: 8 of 256 experts, out of 4 of 8 groups, and one for all tokens.
    deepseek = Routing(8, True, "sigmoid", torch.zeros(256), 8, 4, 2.5, 1)
    routings = ((num_experts, Routing(top_k)), (256, deepseek), (512, Routing(16)))
    align = {"expert_map_ptr": None, "NUM_EXPERTS": num_experts, "BLOCK_E": 128, "TILE": 2048}
    total = {"expert_map_ptr": None, "NUM_EXPERTS": num_experts, "HIDDEN_SIZE": hidden_size, "TOP_K": top_k}
    place = align | {"BLOCK_SIZE": 128, "BLOCK_C": 16}
    return [
        *(case(count, routing) for case in (_route, _route_and_align) for count, routing in routings),
        kernel_case(f"moe_align_block_size count experts={num_experts}", _count_kernel, align, KINDS),
        kernel_case(f"moe_align_block_size place experts={num_experts}", _place_kernel, place, KINDS),
        kernel_case(f"fused_moe sum hidden={hidden_size}", _moe_sum_kernel, total | {"BLOCK_SIZE": 1024}, KINDS),
        *(_gate_up_gemv(dtype) for dtype in ("bf16", "fp32")),
        *(_down_gemv(top_k, dtype) for top_k, dtype in ((1, "bf16"), (8, "bf16"), (8, "fp32"), (16, "bf16"))),
    ]


# Without biases, on one rank.
_WHOLE: dict[str, Any] = {"bias_ptr": None, "expert_map_ptr": None}


def _gate_up_gemv(dtype: str) -> CompileCase:
    num_experts, top_k, _, intermediate_size = QWEN3_30B_A3B
    constexprs = _WHOLE | {"N": intermediate_size, "NUM_EXPERTS": num_experts, "TOP_K": top_k}
    block_n, block_k = GATE_UP_TILE
    constexprs |= {"ACTIVATION": "silu", "INTERLEAVED": False, "BLOCK_N": block_n, "BLOCK_K": block_k}
    name = f"fused_moe gemv gate_up {dtype}"
    options = _gemv_options(dtype, 6)
    return kernel_case(name, _gate_up_gemv_kernel, constexprs, KINDS, dtype=dtype, **options)


def _down_gemv(top_k: int, dtype: str) -> CompileCase:
    num_experts, _, hidden_size, _ = QWEN3_30B_A3B
    block_n, block_k = down_tile(top_k)
    constexprs = _WHOLE | {"N": hidden_size, "NUM_EXPERTS": num_experts, "TOP_K": top_k}
    constexprs |= {"BLOCK_E": top_k, "BLOCK_N": block_n, "BLOCK_K": block_k}
    name = f"fused_moe gemv down {dtype} top_k={top_k}"
    return kernel_case(name, _down_gemv_kernel, constexprs, KINDS, dtype=dtype, **_gemv_options(dtype, 4))


def _gemv_options(dtype: str, programs_per_sm: int) -> dict[str, Any]:
    """Weights are fetched ahead, and so many programs of 16-bit ones make a single wave for one token."""
    copies = dict.fromkeys(("sm_80", "sm_90", "sm_100"), ("LDGSTS.128",))
    if dtype == "fp32":
        programs_per_sm = 1
    return {"expect": copies, "programs_per_sm": programs_per_sm}


def _routing(num_experts: int, routing: Routing) -> dict[str, Any]:
    """Constexprs of a routing; None makes the bias one, too."""
    constexprs = routing.constexprs(num_experts)
    if routing.correction_bias is None:
        return {"bias_ptr": None, **constexprs}
    return constexprs


def _route(num_experts: int, routing: Routing) -> CompileCase:
    constexprs = _routing(num_experts, routing) | {"BLOCK_T": 1024 // num_experts}
    return kernel_case(f"route_tokens experts={num_experts}", _route_tokens_kernel, constexprs, KINDS, aligned=())


def _route_and_align(num_experts: int, routing: Routing) -> CompileCase:
    num_columns = num_experts + routing.num_shared_experts
    constexprs = _routing(num_experts, routing) | {"expert_map_ptr": None, "NUM_EXPERTS": num_columns}
    constexprs |= {"BLOCK_C": triton.next_power_of_2(num_columns)}
    constexprs |= {"BLOCK_SIZE": 16, "BLOCK_T": 16, "MAX_TILES": 16, "TILE": 1024}
    name = f"route_and_align experts={num_experts}"
    return kernel_case(name, _route_and_align_kernel, constexprs, KINDS, aligned=(), num_warps=8)
