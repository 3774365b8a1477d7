"""Routing, alignment and the two grouped GEMMs at the shapes of Qwen3-30B-A3B and Mixtral 8x7B."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
import triton

from bench.compile import TARGETS, CompileCase
from paged.kernels.device import Device
from paged.kernels.moe_align_block_size import _count_kernel, _place_kernel
from paged.kernels.moe_config import MoeShape, MoeTile, fallback_tiles, quantized_tile
from paged.kernels.moe_gemm import _expert_gemm_kernel
from paged.kernels.moe_gemv import _down_gemv_kernel, _gate_up_gemv_kernel, down_gemv_tile
from paged.kernels.moe_sum import _moe_sum_kernel
from paged.kernels.moe_table import FOLDER, load_table
from paged.kernels.moe_weights import FP8_GROUP
from paged.kernels.quantize_token_groups import _quantize_token_groups_kernel
from paged.kernels.route_and_align import _route_and_align_kernel
from paged.kernels.route_tokens import Routing, _route_tokens_kernel

# Experts, experts a token, hidden size, intermediate size.
QWEN3_30B_A3B = (128, 8, 2048, 768)
MIXTRAL_8X7B = (8, 2, 4096, 14336)
# Streaming multiprocessors or compute units.
NUM_SMS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}


def cases() -> list[CompileCase]:
    """Every tile that the fallback returns, those of the tuned tables, and the kernels around the GEMMs."""
    found = _around()
    for target in TARGETS:
        for (gated, shape, dtype), tile in _fallbacks(target) | _tuned(target):
            found.append(gemm_case(target, tile, shape, gated, dtype))
        # The other activations with biases and alternating rows: sizes of gpt-oss-120b, one that no step divides, and
        # one off the 16-byte grid.
        for activation, tokens, size in (("gelu", 32, 2880), ("gelu_tanh", 800, 2064), ("swiglu_oai", 16384, 2880)):
            shape = MoeShape(4 * tokens, 128, size, size, 2)
            tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
            found.append(gemm_case(target, tiles.gate_up, shape, True, "bf16", activation, biased=True))
        found += _quantized(target)
        odd = MoeShape(8192, 128, 511, 33, 2)
        tile = fallback_tiles(odd, Device(target, NUM_SMS[target])).gate_up
        found.append(gemm_case(target, tile, odd, True, "bf16", "swiglu_oai", biased=True))
    return found


_Gemm = tuple[bool, MoeShape, str]


def _fallbacks(target: str) -> dict[tuple[_Gemm, MoeTile], None]:
    """A set in the order of insertion: which of the two GEMMs on which sizes, and its tile."""
    found: dict[tuple[_Gemm, MoeTile], None] = {}
    seen = set()
    for model in (QWEN3_30B_A3B, MIXTRAL_8X7B):
        num_experts, top_k, hidden_size, intermediate_size = model
        for dtype, element_size in (("bf16", 2), ("fp32", 4)):
            for tokens in (2**exponent for exponent in range(16)):
                shape = MoeShape(tokens * top_k, num_experts, hidden_size, intermediate_size, element_size)
                tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
                for gated, tile in ((True, tiles.gate_up), (False, tiles.down)):
                    if (gated, dtype, tile) not in seen:
                        seen.add((gated, dtype, tile))
                        found[(gated, shape, dtype), tile] = None
    return found


def _tuned(target: str) -> dict[tuple[_Gemm, MoeTile], None]:
    """The tables' entries, for the chips that were tuned."""
    found: dict[tuple[_Gemm, MoeTile], None] = {}
    for path in sorted(FOLDER.glob("*.json")):
        header = json.loads(path.read_text())
        if header["arch"] != target:
            continue
        for num_entries, tiles in load_table(path).items():
            sizes = (header[name] for name in ("num_experts", "hidden_size", "intermediate_size"))
            shape = MoeShape(num_entries, *sizes, 2)
            found |= {((True, shape, "bf16"), tiles.gate_up): None, ((False, shape, "bf16"), tiles.down): None}
    return found


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
) -> CompileCase:
    """One of the two GEMMs. layout: the format of quantised weights, and the rows and columns of a group."""
    columns, depth = shape.intermediate_size, shape.hidden_size
    if not gated:
        columns, depth = depth, columns
    kind, group_n, group_k = layout
    is_native = kind == "e4m3" and target in ("sm_90", "sm_100")
    weights = {"": f"*{dtype}", "int8": "*i8", "int4": "*u8", "e4m3": "*fp8e4nv" if is_native else "*u8"}
    pointers = {
        "x_ptr": "*fp8e4nv" if is_native else f"*{dtype}",
        "out_ptr": f"*{dtype}",
        **dict.fromkeys(("sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr"), "*i32"),
    }
    constexprs = {
        "N": columns,
        "EVEN_K": depth % tile.block_k == 0,
        "ENTRIES_PER_ROW": 8 if gated else 1,
        "ACTIVATION": activation if gated else "",
        "INTERLEAVED": biased,
        "FORMAT": kind,
        "X_GROUP": FP8_GROUP,
        "GROUP_N": group_n,
        "GROUP_K": group_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "SWAP_AB": tile.swap_ab,
    }
    uses_tma = tile.tma and not kind and depth % tile.block_k == 0
    box = f"1, {2 if gated else 1}, {tile.block_n}, {tile.block_k}"
    optional = {
        "w_ptr": None if uses_tma else weights[kind],
        "w_desc": f"tensordesc<{dtype}[{box}]>" if uses_tma else None,
        "bias_ptr": f"*{dtype}" if biased else None,
        "entry_weights_ptr": None if gated else "*fp32",
        "x_scale_ptr": "*fp32" if kind == "e4m3" else None,
        "w_scale_ptr": "*fp32" if kind else None,
    }
    pointers |= {name: kind for name, kind in optional.items() if kind}
    constexprs |= {name: None for name, kind in optional.items() if not kind}
    sizes = ("stride_x_row", "stride_w_expert", "stride_w_row", "K")
    case = _case("", _expert_gemm_kernel, pointers, ("num_entries", *sizes), constexprs)
    has_wgmma = tile.block_m >= 64 or tile.swap_ab
    copies = ("LDGSTS",) if depth % 16 == 0 else ()
    tensor_cores = {
        "sm_80": ("HMMA", *copies),
        "sm_90": ("HGMMA" if has_wgmma else "HMMA", *copies, *["UTMALDG"] * uses_tma),
        "gfx942": ("v_mfma",),
    }
    operation = f"{kind} " * bool(kind) + (f"gate_up {activation}" if gated else "down")
    size = f"{tile.block_m}x{tile.block_n}x{tile.block_k}{' swapped' * tile.swap_ab}{' tma' * uses_tma}"
    return replace(
        case,
        name=f"fused_moe {operation} {dtype} {columns}x{depth} {size}{' biased' if biased else ''} for {target}",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=sizes if depth % 16 == 0 else (),
        expect={} if dtype == "fp32" or kind else tensor_cores,
        targets=(target,),
    )


def _quantized(target: str) -> list[CompileCase]:
    """Blocks of 128 x 128 in e4m3 at every number of rows; int8 and int4, which differ in how a register is decoded, in
    groups of 128 columns at the fewest and the most."""
    found, is_native = [], target in ("sm_90", "sm_100")
    e4m3, int8, int4 = (("e4m3", 128, 128), ("int8", 1, 128), ("int4", 1, 128))
    for tokens, layouts in ((64, (e4m3, int8)), (256, (e4m3, int4)), (512, (e4m3,)), (4096, (e4m3, int8, int4))):
        shape = MoeShape(8 * tokens, *QWEN3_30B_A3B[:1], *QWEN3_30B_A3B[2:], 2)
        tiles = fallback_tiles(shape, Device(target, NUM_SMS[target]))
        for layout in layouts:
            tile = quantized_tile(tiles.gate_up, 128, target, gated=True, is_native=is_native and layout == e4m3)
            found.append(gemm_case(target, tile, shape, True, "bf16", layout=layout))
    for layout in (e4m3, int4):
        tile = quantized_tile(tiles.down, 128, target, gated=False, is_native=is_native and layout == e4m3)
        found.append(gemm_case(target, tile, shape, False, "bf16", layout=layout))
    quantize = _case(
        f"quantize_token_groups for {target}",
        _quantize_token_groups_kernel,
        {"x_ptr": "*bf16", "q_ptr": "*u8" if is_native else "*bf16", "scale_ptr": "*fp32"},
        ("num_rows", "stride_x_row"),
        {"SIZE": shape.hidden_size, "GROUP": FP8_GROUP, "BLOCK_ROWS": 8, "NATIVE": is_native},
    )
    return [*found, replace(quantize, targets=(target,))]


def _around() -> list[CompileCase]:
    num_experts, top_k, hidden_size, _ = QWEN3_30B_A3B
    # DeepSeek-V3: 8 of 256 experts, out of 4 of 8 groups, and one for all tokens.
    deepseek = Routing(8, True, "sigmoid", torch.zeros(256), 8, 4, 2.5, 1)
    routings = ((num_experts, Routing(top_k)), (256, deepseek), (512, Routing(16)))
    return [
        *(case(count, routing) for case in (_route, _route_and_align) for count, routing in routings),
        _case(
            f"moe_align_block_size count experts={num_experts}",
            _count_kernel,
            dict.fromkeys(("topk_ids_ptr", "counts_ptr", "sorted_token_ids_ptr", "expert_ids_ptr"), "*i32"),
            ("num_entries", "num_mapped", "num_places", "max_num_blocks", "chunk_size"),
            {"expert_map_ptr": None, "NUM_EXPERTS": num_experts, "BLOCK_E": 128, "TILE": 2048},
        ),
        _case(
            f"moe_align_block_size place experts={num_experts}",
            _place_kernel,
            dict.fromkeys(
                ("topk_ids_ptr", "counts_ptr", "sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr"),
                "*i32",
            ),
            ("num_entries", "num_mapped", "num_chunks", "chunk_size"),
            {
                "expert_map_ptr": None,
                "NUM_EXPERTS": num_experts,
                "BLOCK_SIZE": 128,
                "BLOCK_C": 16,
                "BLOCK_E": 128,
                "TILE": 2048,
            },
        ),
        _case(
            f"fused_moe sum hidden={hidden_size}",
            _moe_sum_kernel,
            {"parts_ptr": "*bf16", "out_ptr": "*bf16"} | _ROUTED,
            ("num_mapped", "stride_out_token"),
            {
                "expert_map_ptr": None,
                "HIDDEN_SIZE": hidden_size,
                "NUM_EXPERTS": num_experts,
                "TOP_K": top_k,
                "BLOCK_SIZE": 1024,
            },
        ),
        *(_gate_up_gemv(dtype) for dtype in ("bf16", "fp32")),
        *(_down_gemv(top_k, dtype) for top_k, dtype in ((1, "bf16"), (8, "bf16"), (8, "fp32"), (16, "bf16"))),
    ]


_ROUTED = {"weights_ptr": "*fp32", "ids_ptr": "*i32"}


def _gate_up_gemv(dtype: str) -> CompileCase:
    num_experts, top_k, _, intermediate_size = QWEN3_30B_A3B
    return _case(
        f"fused_moe gemv gate_up {dtype}",
        _gate_up_gemv_kernel,
        {"x_ptr": f"*{dtype}", "w_ptr": f"*{dtype}", "ids_ptr": "*i32", "out_ptr": f"*{dtype}"},
        ("num_mapped", "stride_x_token", "stride_w_expert", "stride_w_row", "K"),
        {
            "bias_ptr": None,
            "expert_map_ptr": None,
            "N": intermediate_size,
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "ACTIVATION": "silu",
            "INTERLEAVED": False,
            "BLOCK_N": 8,
            "BLOCK_K": 512,
        },
    )


def _down_gemv(top_k: int, dtype: str) -> CompileCase:
    num_experts, _, hidden_size, _ = QWEN3_30B_A3B
    block_n, block_k, num_warps = down_gemv_tile(top_k)
    return _case(
        f"fused_moe gemv down {dtype} top_k={top_k}",
        _down_gemv_kernel,
        {"x_ptr": f"*{dtype}", "w_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"} | _ROUTED,
        ("num_mapped", "stride_w_expert", "stride_w_row", "stride_out_token", "K"),
        {
            "bias_ptr": None,
            "expert_map_ptr": None,
            "N": hidden_size,
            "NUM_EXPERTS": num_experts,
            "TOP_K": top_k,
            "BLOCK_E": top_k,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        num_warps,
    )


_ROUTES = {"logits_ptr": "*bf16", "weights_ptr": "*fp32", "ids_ptr": "*i32"}


def _bias(routing: Routing) -> tuple[dict[str, str], dict[str, object]]:
    """Signature and constexprs of the bias, which None makes a constexpr."""
    return ({}, {"bias_ptr": None}) if routing.correction_bias is None else ({"bias_ptr": "*fp32"}, {})


def _route(num_experts: int, routing: Routing) -> CompileCase:
    bias, no_bias = _bias(routing)
    return _case(
        f"route_tokens experts={num_experts}",
        _route_tokens_kernel,
        _ROUTES | bias,
        ("num_tokens", "scaling_factor", "stride_logits_token", "stride_logits_expert"),
        {**no_bias, **routing.constexprs(num_experts), "BLOCK_T": 1024 // num_experts},
    )


def _route_and_align(num_experts: int, routing: Routing) -> CompileCase:
    bias, no_bias = _bias(routing)
    columns = triton.next_power_of_2(num_experts + routing.num_shared_experts)
    pointers = ("sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr", "ticket_ptr")
    constexprs = {
        **no_bias,
        **routing.constexprs(num_experts),
        "expert_map_ptr": None,
        "NUM_EXPERTS": num_experts + routing.num_shared_experts,
        "BLOCK_SIZE": 16,
        "BLOCK_T": 16,
        "BLOCK_C": columns,
        "MAX_TILES": 16,
        "TILE": 1024,
    }
    return _case(
        f"route_and_align experts={num_experts}",
        _route_and_align_kernel,
        _ROUTES | bias | {"ranks_ptr": "*i8", "counts_ptr": "*i32"} | dict.fromkeys(pointers, "*i32"),
        (
            "num_tokens",
            "num_mapped",
            "num_places",
            "max_num_blocks",
            "scaling_factor",
            "stride_logits_token",
            "stride_logits_expert",
        ),
        constexprs,
        num_warps=8,
    )


def _case(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    scalars: tuple[str, ...],
    constexprs: dict[str, Any],
    num_warps: int = 4,
) -> CompileCase:
    kinds = pointers | {scalar: "fp32" if scalar == "scaling_factor" else "i32" for scalar in scalars}
    signature = {argument: kinds.get(argument, "constexpr") for argument in kernel.arg_names}
    sizes = tuple(name for name in scalars if name == "K" or (name.startswith("stride_") and "logits" not in name))
    return CompileCase(name, kernel, signature, constexprs, num_warps, divisible_by_16=sizes)
