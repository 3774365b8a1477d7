"""The grouped GEMMs of the fused MoE with every tile and weight format, and the kernels around them."""

from __future__ import annotations

import json
from typing import Any

import torch

from paged.bench.compilation.cases.case import EVERY_CASE, NUM_SMS, TARGETS, CompileCase
from paged.bench.compilation.cases.launches import DTYPES, empty, launch_case, launch_of, launches_of
from paged.kernels.core.device import Device
from paged.kernels.moe.config import FOLDER, MoeShape, MoeTile, fallback_tiles, load_table
from paged.kernels.moe.fused_moe import fused_moe, moe_sum
from paged.kernels.moe.gemm import _expert_gemm_kernel, expert_gemm
from paged.kernels.moe.moe_align_block_size import MoeAlignment, moe_align_block_size
from paged.kernels.moe.route_and_align import route_and_align
from paged.kernels.moe.route_tokens import route_tokens
from paged.kernels.moe.routing import Routing
from paged.kernels.moe.weights import ExpertLinear
from paged.kernels.quantization.packing import num_words

# Models: number of experts, experts per token, hidden size, intermediate size.
QWEN3_30B_A3B = (128, 8, 2048, 768)
MIXTRAL_8X7B = (8, 2, 4096, 14336)
GPT_OSS_20B = (32, 4, 2880, 2880)
_PACKED_LAYOUTS = {"mxfp4": ("mxfp4", 1, 32), "nvfp4": ("nvfp4", 1, 16), "int4": ("int4", 1, 64)}
_SCALES = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}
# Target -> expected instructions for packed weights: matrix instructions, and loads 16 bytes wide.
_PACKED_CODE = {
    **dict.fromkeys(("sm_80", "sm_89", "sm_120"), ("HMMA", "LDGSTS.128")),
    "sm_90": ("HGMMA", "LDGSTS.128"),
    **dict.fromkeys(("sm_100", "sm_103"), ("LDGSTS.128",)),
    "gfx942": ("v_mfma", "load_dwordx4"),
}


def expert_cases() -> list[CompileCase]:
    """Return cases of every tile of the fallback and of the tuned tables; activations, biases and odd sizes once."""
    cases = _around()
    for target in TARGETS:
        cases += _packed(target)
        for (gated, dtype, tile), shape in _fallbacks(target).items():
            cases.append(gemm_case(target, tile, shape, gated, dtype))
        for gated, tile, shape in _tuned(target):
            layout = _PACKED_LAYOUTS.get(shape.packed, ("", 1, 0))
            cases.append(gemm_case(target, tile, shape, gated, "bf16", layout=layout))
        if target not in EVERY_CASE:
            continue
        # The other activations, with biases and alternating rows: sizes of gpt-oss-120b, a size that no step divides,
        # and a size off the 16-byte grid.
        activations = (
            *(("gelu", 32, 2880), ("gelu_tanh", 800, 2064), ("swiglu_oai", 16384, 2880)),
            *(("situ", 32, 3072), ("situ", 16384, 3072), ("silu_10", 800, 2048)),
        )
        for activation, tokens, size in activations:
            shape = MoeShape(4 * tokens, 128, size, size, 2)
            tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
            cases.append(gemm_case(target, tiles.gate_up, shape, True, "bf16", activation, biased=True))
        cases += _quantized(target)
        odd = MoeShape(8192, 128, 511, 33, 2)
        tile = fallback_tiles(odd, Device(target, NUM_SMS[target])).gate_up
        cases.append(gemm_case(target, tile, odd, True, "bf16", "swiglu_oai", biased=True))
    return cases


def _fallbacks(target: str) -> dict[tuple[bool, str, MoeTile], MoeShape]:
    """Return a case, with the first suitable shape, for every choice of GEMM (gated or not), dtype and tile."""
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
    """Return the entries of the tables for tuned chips."""
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
    """Return the case of one of the two GEMMs. layout: format of quantised weights, rows and columns of a group.

    Weights that `shape` calls packed have scales and zero points with adjacent rows.
    """
    kind = layout[0]
    if gated:
        columns, depth = shape.intermediate_size, shape.hidden_size
        num_rows, entries_per_row, entry_weights = 2 * columns, 8, None
    else:
        columns, depth = shape.hidden_size, shape.intermediate_size
        num_rows, entries_per_row, entry_weights = columns, 1, empty("fp32", 8)
        activation = ""
    x, out = empty(dtype, 8 // entries_per_row, depth), empty(dtype, 8, columns)
    linear = _linear(layout, num_rows, depth, dtype, shape.packed, biased=biased, zeros=zeros)
    launch = launch_of(
        _expert_gemm_kernel,
        target,
        expert_gemm,
        x,
        linear,
        out,
        MoeAlignment(empty("i32", 128), empty("i32", 1), empty("i32", 1)),
        tile,
        activation=activation,
        interleaved=biased,
        entry_weights=entry_weights,
        entries_per_row=entries_per_row,
    )
    ones = ("stride_scale_group", "stride_zeros_group", "stride_tensor_scale")
    if shape.packed:
        ones = ("stride_scale_row", "stride_zeros_row", "stride_tensor_scale")
    aligned: tuple[str, ...] | None = None
    if depth % 16 != 0:
        aligned = ()
    uses_tma = bool(launch.boxes)
    product = "down"
    if gated:
        product = f"gate_up {activation}"
    flags = {"packed": bool(shape.packed), "zeros": zeros}
    words = ["fused_moe", kind, *(word for word, is_set in flags.items() if is_set), product]
    size = "{BLOCK_M}x{BLOCK_N}x{BLOCK_K}".format(**launch.arguments)
    words += [dtype, f"{columns}x{depth}", size]
    flags = {"swapped": launch.arguments["SWAP_AB"], "tma": uses_tma, "biased": biased}
    words += [*(word for word, is_set in flags.items() if is_set), "for", target]
    return launch_case(
        " ".join(filter(None, words)),
        launch,
        ones,
        aligned=aligned,
        expect=_expected_code(tile, shape, dtype, kind, depth, uses_tma),
        targets=(target,),
    )


def _linear(
    layout: tuple[str, int, int], rows: int, depth: int, dtype: str, packed: str, *, biased: bool, zeros: bool
) -> ExpertLinear:
    """Return weights of two experts. Packed weights have scales and zero points with adjacent rows."""
    kind, group_n, group_k = layout
    bias = scale = zero_points = tensor_scale = None
    if biased:
        bias = empty(dtype, 2, rows)
    if packed:
        w = empty("i32", 2, rows, num_words(depth))
        groups = -(-depth // group_k), rows
        scale = torch.empty(2, *groups, dtype=_SCALES.get(kind, DTYPES[dtype])).mT
        if zeros:
            zero_points = empty("i8", 2, *groups).mT
        if kind == "nvfp4":
            tensor_scale = empty("fp32", 2)
    elif kind:
        code, columns = {"e4m3": ("fp8e4nv", depth), "int8": ("i8", depth), "int4": ("u8", depth // 2)}[kind]
        w, scale = empty(code, 2, rows, columns), empty("fp32", 2, rows // group_n, depth // group_k)
    else:
        w = empty(dtype, 2, rows, depth)
    return ExpertLinear(w, bias, scale, zero_points, tensor_scale)


def _expected_code(
    tile: MoeTile, shape: MoeShape, dtype: str, kind: str, depth: int, uses_tma: bool
) -> dict[str, tuple[str, ...]]:
    """Return the expected matrix instructions, and asynchronous copies for rows on the 16-byte grid."""
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
    """Return cases of e4m3 in blocks at every number of rows, and of int8 and int4 at the fewest and the most rows.

    int8 and int4 differ in how a register is decoded; both have groups of 128 columns.
    """
    cases = []
    e4m3, int8, int4 = (("e4m3", 128, 128), ("int8", 1, 128), ("int4", 1, 128))
    num_experts, top_k, hidden_size, intermediate_size = QWEN3_30B_A3B
    for tokens, layouts in ((64, (e4m3, int8)), (256, (e4m3, int4)), (512, (e4m3,)), (4096, (e4m3, int8, int4))):
        shape = MoeShape(top_k * tokens, num_experts, hidden_size, intermediate_size, 2)
        tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
        for layout in layouts:
            cases.append(gemm_case(target, tiles.gate_up, shape, True, "bf16", layout=layout))
    for layout in (e4m3, int4):
        cases.append(gemm_case(target, tiles.down, shape, False, "bf16", layout=layout))
    return cases


def _packed(target: str) -> list[CompileCase]:
    """Return cases of gpt-oss-20b with every tile in MXFP4, and of other formats at the fewest and the most rows.

    MXFP4 has the most to decode.
    """
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


def routing_cases() -> list[CompileCase]:
    """Return routing with the sizes of Qwen3-30B-A3B and DeepSeek-V4, every option of DeepSeek-V3, and 512 experts."""
    # DeepSeek-V3 takes 8 of 256 experts, out of 4 of 8 groups, and one shared expert.
    deepseek = Routing(8, True, "sigmoid", torch.zeros(256), 8, 4, 2.5, 1)
    deepseek_v4 = Routing(6, True, "sqrt_softplus", torch.zeros(256), routed_scaling_factor=1.5)
    num_experts, top_k, _, _ = QWEN3_30B_A3B
    cases = []
    for count, routing in ((num_experts, Routing(top_k)), (256, deepseek), (256, deepseek_v4), (512, Routing(16))):
        logits, name = empty("bf16", 1, count), f"experts={count}"
        if routing.scoring == "sqrt_softplus":
            name += " sqrt_softplus"
        (launch,) = launches_of("sm_90", route_tokens, logits, **vars(routing))
        cases.append(launch_case(f"route_tokens {name}", launch, aligned=()))
        (launch,) = launches_of("sm_90", route_and_align, logits, routing, 16)
        cases.append(launch_case(f"route_and_align {name}", launch, aligned=()))
    return cases


def alignment_cases() -> list[CompileCase]:
    num_experts, top_k, _, _ = QWEN3_30B_A3B
    count_entries, place = launches_of("sm_90", moe_align_block_size, empty("i32", 1, top_k), 128, num_experts)
    return [
        launch_case(f"moe_align_block_size count experts={num_experts}", count_entries),
        launch_case(f"moe_align_block_size place experts={num_experts}", place),
    ]


def _around() -> list[CompileCase]:
    """Return the sum of a token's experts, and the products of a single token, at the sizes of Qwen3-30B-A3B."""
    num_experts, top_k, hidden_size, _ = QWEN3_30B_A3B
    weights, ids, out = empty("fp32", 1, top_k), empty("i32", 1, top_k), empty("bf16", 1, hidden_size)
    (add,) = launches_of("sm_90", moe_sum, empty("bf16", top_k, hidden_size), weights, ids, num_experts, None, out)
    cases = [launch_case(f"fused_moe sum hidden={hidden_size}", add)]
    for dtype in ("bf16", "fp32"):
        cases.append(_gemv("gate_up", top_k, dtype))
    for count, dtype in ((1, "bf16"), (8, "bf16"), (8, "fp32"), (16, "bf16")):
        cases.append(_gemv("down", count, dtype))
    return cases


def _gemv(product: str, top_k: int, dtype: str) -> CompileCase:
    """Return the case of one of the two products of one token.

    Weights are fetched ahead, and programs_per_sm programs of 16-bit weights make a single wave.
    """
    num_experts, _, hidden_size, intermediate_size = QWEN3_30B_A3B
    w1 = empty(dtype, num_experts, 2 * intermediate_size, hidden_size)
    w2 = empty(dtype, num_experts, hidden_size, intermediate_size)
    routes = empty("fp32", 1, top_k), empty("i32", 1, top_k)
    gate_up, down = launches_of("sm_90", fused_moe, empty(dtype, 1, hidden_size), w1, w2, *routes)
    copies = dict.fromkeys(("sm_80", "sm_90", "sm_100"), ("LDGSTS.128",))
    name, launch, programs_per_sm = f"fused_moe gemv down {dtype} top_k={top_k}", down, 4
    if product == "gate_up":
        name, launch, programs_per_sm = f"fused_moe gemv gate_up {dtype}", gate_up, 6
    if dtype == "fp32":
        programs_per_sm = 1
    return launch_case(name, launch, expect=copies, programs_per_sm=programs_per_sm)
