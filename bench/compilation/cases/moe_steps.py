"""The kernels around the grouped GEMMs: routing, alignment, matrix-vector products and the sum over experts."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged.bench.compilation.case import CompileCase
from paged.kernels.moe.gemv import _down_gemv_kernel, _gate_up_gemv_kernel, down_gemv_tile
from paged.kernels.moe.moe_align_block_size import _count_kernel, _place_kernel
from paged.kernels.moe.route_and_align import _route_and_align_kernel
from paged.kernels.moe.route_tokens import _route_tokens_kernel
from paged.kernels.moe.routing import Routing
from paged.kernels.moe.sum import _moe_sum_kernel

# Experts, experts a token, hidden size, intermediate size.
QWEN3_30B_A3B = (128, 8, 2048, 768)


def cases() -> list[CompileCase]:
    """Each at the sizes of Qwen3-30B-A3B; routing also with every option of DeepSeek-V3."""
    num_experts, top_k, hidden_size, _ = QWEN3_30B_A3B
    # DeepSeek-V3: 8 of 256 experts, out of 4 of 8 groups, and one for all tokens.
    deepseek = Routing(8, True, "sigmoid", torch.zeros(256), 8, 4, 2.5, 1)
    routings = ((num_experts, Routing(top_k)), (256, deepseek), (512, Routing(16)))
    return [
        *(case(count, routing) for case in (_route, _route_and_align) for count, routing in routings),
        kernel_case(
            f"moe_align_block_size count experts={num_experts}",
            _count_kernel,
            dict.fromkeys(("topk_ids_ptr", "counts_ptr", "sorted_token_ids_ptr", "expert_ids_ptr"), "*i32"),
            ("num_entries", "num_mapped", "max_num_tokens_padded", "max_num_blocks", "chunk_size"),
            {"expert_map_ptr": None, "NUM_EXPERTS": num_experts, "BLOCK_E": 128, "TILE": 2048},
        ),
        kernel_case(
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
        kernel_case(
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
    return kernel_case(
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
    return kernel_case(
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
    return kernel_case(
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
    return kernel_case(
        f"route_and_align experts={num_experts}",
        _route_and_align_kernel,
        _ROUTES | bias | {"ranks_ptr": "*i8", "counts_ptr": "*i32"} | dict.fromkeys(pointers, "*i32"),
        (
            "num_tokens",
            "num_mapped",
            "max_num_tokens_padded",
            "max_num_blocks",
            "scaling_factor",
            "stride_logits_token",
            "stride_logits_expert",
        ),
        constexprs,
        num_warps=8,
    )


def kernel_case(
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
