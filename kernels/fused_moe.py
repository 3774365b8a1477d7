"""Mixture of experts: two grouped GEMMs over tokens sorted by expert, and the sum over each token's experts."""

from __future__ import annotations

import torch

from paged.kernels.backend import use_triton
from paged.kernels.checks import FLOAT_DTYPES, check_last_dim_contiguous, check_tensor
from paged.kernels.compat import tl, triton
from paged.kernels.custom_ops import ops
from paged.kernels.device import device_of
from paged.kernels.dot import dot
from paged.kernels.errors import InvalidInputError, UnsupportedError
from paged.kernels.moe_align_block_size import moe_align_block_size
from paged.kernels.moe_config import MoeTile, down_tile, gate_up_tile
from paged.kernels.torch_ops import fused_moe as torch_op

ACTIVATIONS = ("silu",)


@triton.jit
def _expert_gemm_kernel(
    x_ptr,  # [num_entries / ENTRIES_PER_ROW, K]
    w_ptr,  # [num_experts, 2 * N if GATED else N, K]
    entry_weights_ptr,  # [num_entries] float32, or None
    out_ptr,  # [num_entries, N], contiguous
    sorted_token_ids_ptr,  # [max_num_blocks * BLOCK_M]
    expert_ids_ptr,  # [max_num_blocks]
    num_tokens_post_padded_ptr,  # [1]
    num_entries,
    stride_x_row,
    stride_w_expert,
    stride_w_row,
    K,
    N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ENTRIES_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out[entry] = w[expert] @ x[entry // ENTRIES_PER_ROW], for one block of one expert's entries and BLOCK_N columns.

    GATED: silu(gate) * up, of w's first N rows and its last N, in the registers that accumulated them. entry_weights:
    each entry's row is multiplied by its weight before it is rounded.
    """
    program = tl.program_id(0)
    num_blocks_m = tl.load(num_tokens_post_padded_ptr) // BLOCK_M
    num_blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if program >= num_blocks_m * num_blocks_n:
        return
    first_m = program // (GROUP_M * num_blocks_n) * GROUP_M
    group_size = min(num_blocks_m - first_m, GROUP_M)
    in_group = program % (GROUP_M * num_blocks_n)
    block_m = first_m + in_group % group_size
    block_n = in_group // group_size

    entries = tl.load(sorted_token_ids_ptr + block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(expert_ids_ptr + block_m).to(tl.int64)
    is_entry = entries < num_entries
    # Places without an entry compute row 0 and store nothing: no mask on the loads of the inner loop.
    rows = tl.where(is_entry, entries // ENTRIES_PER_ROW, 0).to(tl.int64)
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    lanes = tl.arange(0, WIDTH)
    # Gate and up rows alternate, so that both of a column end in one thread's registers. Columns beyond N are column 0.
    columns = block_n * BLOCK_N + (lanes // 2 if GATED else lanes)
    w_rows = tl.where(columns < N, columns, 0) + (lanes % 2 * N if GATED else 0)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_x_row + offs_k[None, :]
    w_ptrs = w_ptr + expert * stride_w_expert + w_rows[None, :].to(tl.int64) * stride_w_row + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=offs_k[None, :] < K - start, other=0.0)
            w = tl.load(w_ptrs + start, mask=offs_k[:, None] < K - start, other=0.0)
        acc = dot(x, w, acc)
    if GATED:
        gate, up = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
        acc = gate / (1.0 + tl.exp(-gate)) * up
        columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if entry_weights_ptr is not None:
        acc *= tl.load(entry_weights_ptr + entries, mask=is_entry, other=0.0)[:, None]
    out_ptrs = out_ptr + entries[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_entry[:, None] & (columns[None, :] < N))


@triton.jit
def _sum_experts_kernel(
    parts_ptr,  # [num_tokens, TOP_K, HIDDEN_SIZE], contiguous
    topk_weights_ptr,  # [num_tokens, TOP_K] float32
    local_ids_ptr,  # [num_tokens, TOP_K] int32
    out_ptr,  # [num_tokens, HIDDEN_SIZE]
    num_experts,
    stride_out_token,
    HIDDEN_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One token's sum over its experts, always in the same order. Parts of experts that live elsewhere were never
    written and are not read; a NaN weight makes the row NaN even where it names no expert."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < HIDDEN_SIZE
    total = tl.zeros((BLOCK_SIZE,), tl.float32)
    for k in range(TOP_K):
        entry = token * TOP_K + k
        local_id = tl.load(local_ids_ptr + entry)
        weight = tl.load(topk_weights_ptr + entry)
        is_local = (local_id >= 0) & (local_id < num_experts)
        part = tl.load(parts_ptr + entry * HIDDEN_SIZE + offs, mask=mask & is_local, other=0.0)
        total += tl.where(weight == weight, part.to(tl.float32), weight)
    tl.store(out_ptr + token * stride_out_token + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum over a token's experts of weight * w2[e] @ (silu(w1[e, :I] @ x) * (w1[e, I:] @ x)), accumulated in float32.

    Between the two products the activation, and before the sum each weighted part, is rounded to the dtype of
    hidden_states. The result is the same in every run.

    Args:
        hidden_states: [num_tokens, hidden_size], float32, float16 or bfloat16; last dimension contiguous.
        w1: [num_experts, 2 * intermediate_size, hidden_size], gate rows then up rows; last dimension contiguous.
        w2: [num_experts, hidden_size, intermediate_size]; last dimension contiguous.
        topk_weights: float32 [num_tokens, top_k], contiguous. A NaN makes its token's row NaN, and no other.
        topk_ids: int32 [num_tokens, top_k], contiguous; ids that name no expert contribute nothing.
        activation: "silu".
        expert_map: int32 [num_global_experts], the row of each expert in w1 and w2, or -1 where it lives elsewhere: it
            costs nothing here and contributes nothing, so the parts of all ranks add up to the whole. Not given: ids
            are rows.
        out: like hidden_states, written in place; made when not given.

    Raises:
        InvalidInputError: shapes, dtypes, devices or strides do not fit.
        UnsupportedError: the activation is another one.
    """
    if torch.compiler.is_dynamo_compiling():
        if out is None:
            return ops.fused_moe(hidden_states, w1, w2, topk_weights, topk_ids, activation, expert_map)
        ops.fused_moe_out(hidden_states, w1, w2, topk_weights, topk_ids, out, activation, expert_map)
        return out
    _check(hidden_states, w1, w2, topk_weights, topk_ids, expert_map)
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"activation: {activation!r}, known are {', '.join(map(repr, ACTIVATIONS))}")
    if out is None:
        out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    check_tensor("out", out, hidden_states.shape, (hidden_states.dtype,), hidden_states.device)
    check_last_dim_contiguous("out", out)
    local_ids = topk_ids if expert_map is None else _local_expert_ids(topk_ids, expert_map)
    if not use_triton(hidden_states):
        return torch_op.fused_moe(hidden_states, w1, w2, topk_weights, local_ids, out=out)
    if hidden_states.numel() == 0:
        return out
    num_tokens, top_k = topk_ids.shape
    num_experts, hidden_size, intermediate_size = w2.shape
    num_entries, element_size = topk_ids.numel(), hidden_states.element_size()
    # The entries spread over all experts, of which a rank holds a part.
    num_routed_experts = num_experts if expert_map is None else expert_map.numel()
    arch = device_of(hidden_states.device).arch
    first = gate_up_tile(num_entries, num_routed_experts, element_size, arch)
    second = down_tile(num_entries, num_routed_experts, element_size, arch)
    aligned = moe_align_block_size(local_ids, first.block_m, num_experts)
    activated = hidden_states.new_empty((num_entries, intermediate_size))
    _launch_gemm(hidden_states, w1, None, activated, aligned, first, entries_per_row=top_k, gated=True)
    parts = hidden_states.new_empty((num_entries, hidden_size))
    _launch_gemm(activated, w2, topk_weights, parts, aligned, second, entries_per_row=1, gated=False)
    block_size = min(triton.next_power_of_2(hidden_size), 2048)
    _sum_experts_kernel[(num_tokens, triton.cdiv(hidden_size, block_size))](
        parts_ptr=parts,
        topk_weights_ptr=topk_weights,
        local_ids_ptr=local_ids,
        out_ptr=out,
        num_experts=num_experts,
        stride_out_token=out.stride(0),
        HIDDEN_SIZE=hidden_size,
        TOP_K=top_k,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )
    return out


def _check(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    device, dtype = hidden_states.device, hidden_states.dtype
    check_tensor("hidden_states", hidden_states, ("num_tokens", "hidden_size"), FLOAT_DTYPES, device)
    check_tensor("w2", w2, ("num_experts", hidden_states.shape[1], "intermediate_size"), (dtype,), device)
    num_experts, hidden_size, intermediate_size = w2.shape
    check_tensor("w1", w1, (num_experts, 2 * intermediate_size, hidden_size), (dtype,), device)
    check_tensor("topk_ids", topk_ids, (hidden_states.shape[0], "top_k"), (torch.int32,), device)
    check_tensor("topk_weights", topk_weights, topk_ids.shape, (torch.float32,), device)
    for name, tensor in (("hidden_states", hidden_states), ("w1", w1), ("w2", w2)):
        check_last_dim_contiguous(name, tensor)
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if not tensor.is_contiguous():
            raise InvalidInputError(f"{name}: strides {tensor.stride()}, expected a contiguous tensor")
    if expert_map is not None:
        check_tensor("expert_map", expert_map, ("num_global_experts",), (torch.int32,), device)


def _local_expert_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Rows of w1 and w2 for global expert ids; -1 for ids outside the map."""
    last = expert_map.shape[0] - 1
    is_known = (topk_ids >= 0) & (topk_ids <= last)
    return torch.where(is_known, expert_map[topk_ids.clamp(0, last)], -1)


def _launch_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    entry_weights: torch.Tensor | None,
    out: torch.Tensor,
    aligned: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tile: MoeTile,
    *,
    entries_per_row: int,
    gated: bool,
) -> None:
    sorted_token_ids, expert_ids, num_tokens_post_padded = aligned
    num_entries, num_columns = out.shape
    _expert_gemm_kernel[(expert_ids.numel() * triton.cdiv(num_columns, tile.block_n),)](
        x_ptr=x,
        w_ptr=w,
        entry_weights_ptr=entry_weights,
        out_ptr=out,
        sorted_token_ids_ptr=sorted_token_ids,
        expert_ids_ptr=expert_ids,
        num_tokens_post_padded_ptr=num_tokens_post_padded,
        num_entries=num_entries,
        stride_x_row=x.stride(0),
        stride_w_expert=w.stride(0),
        stride_w_row=w.stride(1),
        K=x.shape[1],
        N=num_columns,
        EVEN_K=x.shape[1] % tile.block_k == 0,
        ENTRIES_PER_ROW=entries_per_row,
        GATED=gated,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
