"""The kernels around the grouped GEMMs: routing, alignment, matrix-vector products and the sum over experts."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged.bench.compilation.case import CompileCase, kernel_case
from paged.kernels.moe.fused_moe import _moe_sum_kernel
from paged.kernels.moe.gemv import _down_gemv_kernel, _gate_up_gemv_kernel, down_gemv_tile
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


def cases() -> list[CompileCase]:
    """Each at the sizes of Qwen3-30B-A3B; routing also with every option of DeepSeek-V3."""
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
    constexprs |= {"ACTIVATION": "silu", "INTERLEAVED": False, "BLOCK_N": 8, "BLOCK_K": 512}
    return kernel_case(f"fused_moe gemv gate_up {dtype}", _gate_up_gemv_kernel, constexprs, KINDS, dtype=dtype)


def _down_gemv(top_k: int, dtype: str) -> CompileCase:
    num_experts, _, hidden_size, _ = QWEN3_30B_A3B
    block_n, block_k, num_warps = down_gemv_tile(top_k)
    constexprs = _WHOLE | {"N": hidden_size, "NUM_EXPERTS": num_experts, "TOP_K": top_k}
    constexprs |= {"BLOCK_E": top_k, "BLOCK_N": block_n, "BLOCK_K": block_k}
    name = f"fused_moe gemv down {dtype} top_k={top_k}"
    return kernel_case(name, _down_gemv_kernel, constexprs, KINDS, dtype=dtype, num_warps=num_warps)


def _routing(num_experts: int, routing: Routing) -> dict[str, Any]:
    """Constexprs of a routing; None makes the bias one, too."""
    no_bias = {"bias_ptr": None} if routing.correction_bias is None else {}
    return {**no_bias, **routing.constexprs(num_experts)}


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
