"""Fused MoE for few tokens: a matrix-vector product for each entry, without sorting.

It takes two launches and stores no partial results: the second product adds up a token's experts itself.
"""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.launch import Launch, strides, wait_for_inputs
from ..layers.activation import gated_activation
from .moe_align_block_size import expert_rows, num_mapped
from .weights import MoeCall

# Weights that a step of either product reads: 32 a thread of 4 warps. More would take so many registers that fewer
# programs share an SM, see limits.md.
_STEP_WEIGHTS = 4096
# Columns and depth of a step of the first product, which reads a gate row and an up row for each column.
GATE_UP_TILE = 8, _STEP_WEIGHTS // (2 * 8)
# Depth of a step of the second product.
_DOWN_DEPTH = 128
# Two steps are fetched ahead, 16 KB of 16-bit weights a program. limits.md says how many bytes an SM needs in flight.
_STAGES = tl.constexpr(3)


@triton.jit
def _gate_up_gemv_kernel(
    x_ptr,  # [num_tokens, K]
    w_ptr,  # [NUM_EXPERTS, 2 * N, K]
    bias_ptr,  # [NUM_EXPERTS, 2 * N], or None
    ids_ptr,  # [num_tokens, TOP_K] int32
    expert_map_ptr,  # [num_mapped], or None
    out_ptr,  # [num_tokens * TOP_K, N], contiguous
    num_mapped,
    stride_x_token,
    stride_w_expert,
    stride_w_row,
    K,
    N: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of one entry. Entries run side by side, so entries of one expert share its rows in the L2."""
    wait_for_inputs()
    entry = tl.program_id(0).to(tl.int64)
    expert = expert_rows(tl.load(ids_ptr + entry), expert_map_ptr, num_mapped, NUM_EXPERTS).to(tl.int64)
    if expert < 0:
        return
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = tl.where(columns < N, columns, 0)
    gate_rows = in_row * 2 if INTERLEAVED else in_row
    distance: tl.constexpr = 1 if INTERLEAVED else N
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + entry // TOP_K * stride_x_token + offs_k
    w_ptrs = w_ptr + expert * stride_w_expert + gate_rows[:, None].to(tl.int64) * stride_w_row + offs_k[None, :]
    up_ptrs = w_ptrs + distance * stride_w_row
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=_STAGES):
        mask = offs_k < K - start
        x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(w_ptrs + start, mask=mask[None, :], other=0.0).to(tl.float32) * x
        up += tl.load(up_ptrs + start, mask=mask[None, :], other=0.0).to(tl.float32) * x
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * (2 * N) + gate_rows
        gate += tl.load(bias_ptrs).to(tl.float32)
        up += tl.load(bias_ptrs + distance).to(tl.float32)
    activated = gated_activation(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + entry * N + columns, activated, mask=columns < N)


@triton.jit
def _down_gemv_kernel(
    x_ptr,  # [num_tokens * TOP_K, K], contiguous
    w_ptr,  # [NUM_EXPERTS, N, K]
    bias_ptr,  # [NUM_EXPERTS, N], or None
    weights_ptr,  # [num_tokens, TOP_K] float32
    ids_ptr,  # [num_tokens, TOP_K] int32
    expert_map_ptr,  # [num_mapped], or None
    out_ptr,  # [num_tokens, N]
    num_mapped,
    stride_w_expert,
    stride_w_row,
    stride_out_token,
    K,
    N: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N columns of one token, all its experts side by side. Experts are always added in the same order."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, BLOCK_E)
    is_rank = ranks < TOP_K
    ids = tl.load(ids_ptr + token * TOP_K + ranks, mask=is_rank, other=-1)
    experts = expert_rows(ids, expert_map_ptr, num_mapped, NUM_EXPERTS).to(tl.int64)
    is_here = experts >= 0
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = tl.where(columns < N, columns, 0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (token * TOP_K + ranks)[:, None] * K + offs_k[None, :]
    row_ptrs = w_ptr + experts[:, None] * stride_w_expert + w_rows[None, :] * stride_w_row
    w_ptrs = row_ptrs[:, :, None] + offs_k[None, None, :]
    acc = tl.zeros((BLOCK_E, BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=_STAGES):
        mask = is_here[:, None] & (offs_k < K - start)[None, :]
        x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + start, mask=mask[:, None, :], other=0.0).to(tl.float32)
        acc += w * x[:, None, :]
    parts = tl.sum(acc, axis=2)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + experts[:, None] * N + w_rows[None, :]
        parts += tl.load(bias_ptrs, mask=is_here[:, None], other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + token * TOP_K + ranks, mask=is_rank, other=0.0)
    # A NaN weight makes the row NaN, even if its id names no expert.
    weights = tl.where(is_here | (weights != weights), weights, 0.0)
    out = tl.sum(parts * weights[:, None], axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out_token + columns, out, mask=columns < N)


def moe_gemv(call: MoeCall, launches: tuple[Launch, ...] | None = None) -> tuple[Launch, ...]:
    """Run `fused_moe` for a few tokens, into `call.out`.

    launches: result of an earlier call with tensors of the same signatures and the same other arguments.
    """
    gate_up, down = call.gate_up, call.down
    activated = call.hidden_states.new_empty((call.topk_ids.numel(), down.w.shape[2]))
    first, second = launches = _launches_for(call) if launches is None else launches
    routes = {"ids_ptr": call.topk_ids, "expert_map_ptr": call.expert_map}
    weights = {"w_ptr": gate_up.w, "bias_ptr": gate_up.bias}
    first({"x_ptr": call.hidden_states, "out_ptr": activated, **weights, **routes})
    weights = {"w_ptr": down.w, "bias_ptr": down.bias, "weights_ptr": call.topk_weights}
    second({"x_ptr": activated, "out_ptr": call.out, **weights, **routes})
    return launches


def _launches_for(call: MoeCall) -> tuple[Launch, Launch]:
    gate_up, down, (num_tokens, top_k) = call.gate_up, call.down, call.topk_ids.shape
    num_experts, hidden_size, intermediate_size = down.w.shape
    routes = {"num_mapped": num_mapped(call.expert_map), "NUM_EXPERTS": num_experts, "TOP_K": top_k}
    block_n, block_k = GATE_UP_TILE
    first = Launch(
        _gate_up_gemv_kernel,
        (num_tokens * top_k, triton.cdiv(intermediate_size, block_n)),
        {
            **strides("token", x=call.hidden_states),
            **strides("expert row", w=gate_up.w),
            "K": hidden_size,
            "N": intermediate_size,
            "ACTIVATION": call.activation,
            "INTERLEAVED": call.interleaved,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            **routes,
        },
        num_warps=4,
    )
    block_e = triton.next_power_of_2(top_k)
    block_n, block_k = down_tile(block_e)
    second = Launch(
        _down_gemv_kernel,
        (num_tokens, triton.cdiv(hidden_size, block_n)),
        {
            **strides("expert row", w=down.w),
            **strides("token", out=call.out),
            "K": intermediate_size,
            "N": hidden_size,
            "BLOCK_E": block_e,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            **routes,
        },
        num_warps=4,
    )
    return first, second


def down_tile(block_e: int) -> tuple[int, int]:
    """Return columns and depth of a step of the second product for block_e experts a token."""
    return max(_STEP_WEIGHTS // (block_e * _DOWN_DEPTH), 1), _DOWN_DEPTH
