"""Routing, alignment and the two grouped GEMMs at the shapes of Qwen3-30B-A3B and Mixtral 8x7B."""

from __future__ import annotations

from typing import Any

import torch
import triton

from bench.compile import TARGETS, CompileCase
from paged.kernels.fused_moe import _expert_gemm_kernel, _sum_experts_kernel
from paged.kernels.moe_align_block_size import _count_kernel, _place_kernel
from paged.kernels.moe_config import down_tile, gate_up_tile
from paged.kernels.route_and_align import _route_and_align_kernel
from paged.kernels.route_tokens import Routing, _route_tokens_kernel

# Experts, experts a token, hidden size, intermediate size.
QWEN3_30B_A3B = (128, 8, 2048, 768)
MIXTRAL_8X7B = (8, 2, 4096, 14336)


def cases() -> list[CompileCase]:
    """Every tile that the choosers return, and the kernels around the GEMMs."""
    found = _around()
    for target in TARGETS:
        for gated in (True, False):
            found += [_gemm(target, QWEN3_30B_A3B, tokens, gated, "bf16") for tokens in (8, 1024, 32768)]
            found.append(_gemm(target, MIXTRAL_8X7B, 32768, gated, "bf16"))
            found.append(_gemm(target, QWEN3_30B_A3B, 8, gated, "fp32"))
    return found


def _gemm(target: str, model: tuple[int, int, int, int], num_tokens: int, gated: bool, dtype: str) -> CompileCase:
    num_experts, top_k, hidden_size, intermediate_size = model
    tile = (gate_up_tile if gated else down_tile)(num_tokens * top_k, num_experts, 4 if dtype == "fp32" else 2, target)
    columns, depth = (intermediate_size, hidden_size) if gated else (hidden_size, intermediate_size)
    signature = {
        "x_ptr": f"*{dtype}",
        "w_ptr": f"*{dtype}",
        "entry_weights_ptr": "constexpr" if gated else "*fp32",
        "out_ptr": f"*{dtype}",
        "sorted_token_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32",
        "num_tokens_post_padded_ptr": "*i32",
        "num_entries": "i32",
        "stride_x_row": "i32",
        "stride_w_expert": "i32",
        "stride_w_row": "i32",
        "K": "i32",
    }
    constexprs = {
        "N": columns,
        "EVEN_K": depth % tile.block_k == 0,
        "ENTRIES_PER_ROW": top_k if gated else 1,
        "GATED": gated,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
    }
    tensor_cores = {
        "sm_80": ("HMMA", "LDGSTS"),
        "sm_90": ("HGMMA" if tile.block_m >= 64 else "HMMA", "LDGSTS"),
        "gfx942": ("v_mfma",),
    }
    operation = "gate_up" if gated else "down"
    size = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    return CompileCase(
        name=f"fused_moe {operation} {dtype} {columns}x{depth} {size} for {target}",
        kernel=_expert_gemm_kernel,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs | ({"entry_weights_ptr": None} if gated else {}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=("stride_x_row", "stride_w_expert", "stride_w_row", "K"),
        expect={} if dtype == "fp32" else tensor_cores,
        targets=(target,),
    )


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
            _sum_experts_kernel,
            {"parts_ptr": "*bf16", "topk_weights_ptr": "*fp32", "local_ids_ptr": "*i32", "out_ptr": "*bf16"},
            ("num_experts", "stride_out_token"),
            {"HIDDEN_SIZE": hidden_size, "TOP_K": top_k, "BLOCK_SIZE": 2048},
        ),
    ]


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
    return CompileCase(name=name, kernel=kernel, signature=signature, constexprs=constexprs, num_warps=num_warps)
