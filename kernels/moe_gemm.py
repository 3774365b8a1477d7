"""The grouped GEMM of the fused MoE: blocks of one expert's entries by columns of that expert's weights."""

from __future__ import annotations

import torch

from paged.kernels.compat import tl, triton
from paged.kernels.dot import dot
from paged.kernels.moe_activation import gated_activation
from paged.kernels.moe_align_block_size import MoeAlignment
from paged.kernels.moe_config import MoeTile
from paged.kernels.moe_weights import ExpertLinear


@triton.jit
def _expert_gemm_kernel(
    x_ptr,  # [num_entries / ENTRIES_PER_ROW, K]
    w_ptr,  # [num_experts, 2 * N where gated, else N, K]
    bias_ptr,  # [num_experts, 2 * N or N], or None
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
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP_AB: tl.constexpr,
):
    """out[entry] = w[expert] @ x[entry // ENTRIES_PER_ROW] + bias, for a block of entries by BLOCK_N columns.

    ACTIVATION: of the products with w's gate and up rows, in the registers that accumulated them; "" for none.
    INTERLEAVED: gate and up rows alternate in w, else all gate rows come first. entry_weights: each entry's row is
    multiplied by its weight before it is rounded. SWAP_AB: the weights are the operand whose rows come in 64s.
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
    rows = tl.where(is_entry, entries // ENTRIES_PER_ROW, 0).to(tl.int64)
    GATED: tl.constexpr = ACTIVATION != ""
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    lanes = tl.arange(0, WIDTH)
    # Gate and up rows alternate, so that both of a column end in one thread's registers. Columns beyond N are column 0.
    columns = block_n * BLOCK_N + (lanes // 2 if GATED else lanes)
    w_rows = tl.where(columns < N, columns, 0)
    if GATED:
        w_rows = w_rows * 2 + lanes % 2 if INTERLEAVED else w_rows + lanes % 2 * N
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_x_row + offs_k[None, :]
    w_ptrs = w_ptr + expert * stride_w_expert + w_rows[:, None].to(tl.int64) * stride_w_row + offs_k[None, :]
    # Few rows: an empty one is not read, as the weights take all the bandwidth. Many: it reads row 0, without a mask.
    FEW_ROWS: tl.constexpr = BLOCK_M <= 32
    acc = tl.zeros((WIDTH, BLOCK_M) if SWAP_AB else (BLOCK_M, WIDTH), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=is_entry[:, None], other=0.0) if FEW_ROWS else tl.load(x_ptrs + start)
            w = tl.load(w_ptrs + start)
        else:
            in_row = offs_k[None, :] < K - start
            x = tl.load(x_ptrs + start, mask=(is_entry[:, None] & in_row) if FEW_ROWS else in_row, other=0.0)
            w = tl.load(w_ptrs + start, mask=in_row, other=0.0)
        acc = dot(w, x.T, acc) if SWAP_AB else dot(x, w.T, acc)
    if SWAP_AB:
        acc = acc.T
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * (N * WIDTH // BLOCK_N) + w_rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
        acc = gated_activation(gate, up, ACTIVATION)
        columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if entry_weights_ptr is not None:
        acc *= tl.load(entry_weights_ptr + entries, mask=is_entry, other=0.0)[:, None]
    out_ptrs = out_ptr + entries[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_entry[:, None] & (columns[None, :] < N))


def expert_gemm(
    x: torch.Tensor,
    linear: ExpertLinear,
    out: torch.Tensor,
    aligned: MoeAlignment,
    tile: MoeTile,
    *,
    activation: str = "",
    interleaved: bool = False,
    entry_weights: torch.Tensor | None = None,
    entries_per_row: int = 1,
) -> None:
    """Fill the rows of `out` [num_entries, num_columns] whose entries are in a block of `aligned`; see the kernel."""
    num_entries, num_columns = out.shape
    w = linear.w
    _expert_gemm_kernel[(aligned.expert_ids.numel() * triton.cdiv(num_columns, tile.block_n),)](
        x_ptr=x,
        w_ptr=w,
        bias_ptr=linear.bias,
        entry_weights_ptr=entry_weights,
        out_ptr=out,
        sorted_token_ids_ptr=aligned.sorted_token_ids,
        expert_ids_ptr=aligned.expert_ids,
        num_tokens_post_padded_ptr=aligned.num_tokens_post_padded,
        num_entries=num_entries,
        stride_x_row=x.stride(0),
        stride_w_expert=w.stride(0),
        stride_w_row=w.stride(1),
        K=x.shape[1],
        N=num_columns,
        EVEN_K=x.shape[1] % tile.block_k == 0,
        ENTRIES_PER_ROW=entries_per_row,
        ACTIVATION=activation,
        INTERLEAVED=interleaved,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        SWAP_AB=tile.swap_ab,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
