"""The grouped GEMM of the fused MoE: many matrix products at once, one for each expert that any token chose.

An entry is one token with one of its experts. `moe_align_block_size` sorts entries by expert and pads each expert's to
whole blocks of BLOCK_M, so a block needs the weights of a single expert. A program multiplies one block by BLOCK_N
columns of that expert's weights: it gathers the rows of x that the block's entries name, walks along K in steps of
BLOCK_K, accumulates in float32, and stores each row at its entry's row of the output. Sizes of the launch are upper
bounds known to the host; programs beyond the blocks in use return at once.

The first product of `fused_moe` computes gate and up columns in one program and applies the activation in registers;
the second multiplies each row by its routing weight, and `sum.py` adds up a token's rows. Tiles come from `config.py`;
`gemv.py` is the way for a few tokens, `quantize_token_groups.py` what e4m3 weights need of x.
"""

from __future__ import annotations

from typing import Any

import torch

from paged.kernels.common.compat import tl, triton
from paged.kernels.common.device import device_of
from paged.kernels.common.dot import dot
from paged.kernels.common.fp8 import as_kernel_argument, decode_e4m3
from paged.kernels.common.gated_activation import gated_activation
from paged.kernels.common.launch import Box, Launch, strides
from paged.kernels.moe.alignment import MoeAlignment
from paged.kernels.moe.config import MoeTile, quantized_tile
from paged.kernels.moe.quantize_token_groups import quantize_token_groups
from paged.kernels.moe.weights import FP8_GROUP, ExpertLinear


@triton.jit(do_not_specialize=["num_entries"])
def _expert_gemm_kernel(
    x_ptr,  # [num_entries / ENTRIES_PER_ROW, K]
    x_scale_ptr,  # [num_entries / ENTRIES_PER_ROW, K / X_GROUP] float32, or None
    w_ptr,  # [num_experts, 2 * N where gated, else N, K, or K / 2 bytes], or None
    w_desc,  # the same as a tensor descriptor [num_experts, 2 where gated, else 1, N, K], or None
    w_scale_ptr,  # [num_experts, w's rows / GROUP_N, K / GROUP_K] float32, or None
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
    FORMAT: tl.constexpr,
    X_GROUP: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
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

    FORMAT: of quantised weights. A step's product of quantised values is multiplied by its scales in float32 before it
    is added; scales that span K (GROUP_K 0) wait for the end.
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
    # Gate rows, then up rows: both of a column end in one thread's registers. Columns beyond N are column 0.
    columns = block_n * BLOCK_N + lanes % BLOCK_N
    w_rows = tl.where(columns < N, columns, 0)
    if GATED:
        w_rows = w_rows * 2 + lanes // BLOCK_N if INTERLEAVED else w_rows + lanes // BLOCK_N * N
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_K // 2) if FORMAT == "int4" else offs_k
    VALUES: tl.constexpr = 2 if FORMAT == "int4" else 1
    x_ptrs = x_ptr + rows[:, None] * stride_x_row + offs_k[None, :]
    if w_desc is None:
        w_ptrs = w_ptr + expert * stride_w_expert + w_rows[:, None].to(tl.int64) * stride_w_row + offs_w[None, :]
    if w_scale_ptr is not None:
        num_row_groups: tl.constexpr = (N * WIDTH // BLOCK_N + GROUP_N - 1) // GROUP_N
        num_groups = (K + GROUP_K - 1) // GROUP_K if GROUP_K > 0 else 1
        w_scale_ptrs = w_scale_ptr + (expert * num_row_groups + w_rows // GROUP_N) * num_groups
    # Few rows: an empty one is not read, as the weights take all the bandwidth. Many: it reads row 0, without a mask.
    FEW_ROWS: tl.constexpr = BLOCK_M <= 32
    acc = tl.zeros((WIDTH, BLOCK_M) if SWAP_AB else (BLOCK_M, WIDTH), tl.float32)
    for start in range(0, K, BLOCK_K):
        in_row = offs_k[None, :] < K - start
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=is_entry[:, None], other=0.0) if FEW_ROWS else tl.load(x_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=(is_entry[:, None] & in_row) if FEW_ROWS else in_row, other=0.0)
        if w_desc is not None:
            w = w_desc.load([expert.to(tl.int32), 0, block_n * BLOCK_N, start]).reshape(WIDTH, BLOCK_K)
        elif EVEN_K:
            w = tl.load(w_ptrs + start // VALUES)
        else:
            w = tl.load(w_ptrs + start // VALUES, mask=offs_w[None, :] * VALUES < K - start, other=0)
        w = _decoded(w, x.dtype, FORMAT)
        if x_scale_ptr is not None or GROUP_K > 0:
            part = tl.zeros_like(acc)
            part = dot(w, x.T, part) if SWAP_AB else dot(x, w.T, part)
            if x_scale_ptr is not None:
                x_scale = tl.load(x_scale_ptr + rows * ((K + X_GROUP - 1) // X_GROUP) + start // X_GROUP)
                part *= x_scale[None, :] if SWAP_AB else x_scale[:, None]
            if GROUP_K > 0:
                w_scale = tl.load(w_scale_ptrs + start // GROUP_K)
                part *= w_scale[:, None] if SWAP_AB else w_scale[None, :]
            acc += part
        else:
            acc = dot(w, x.T, acc) if SWAP_AB else dot(x, w.T, acc)
    if SWAP_AB:
        acc = acc.T
    if w_scale_ptr is not None and GROUP_K == 0:
        acc *= tl.load(w_scale_ptrs)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * (N * WIDTH // BLOCK_N) + w_rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        acc = gated_activation(gate, up, ACTIVATION)
        columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if entry_weights_ptr is not None:
        acc *= tl.load(entry_weights_ptr + entries, mask=is_entry, other=0.0)[:, None]
    out_ptrs = out_ptr + entries[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_entry[:, None] & (columns[None, :] < N))


@triton.jit
def _decoded(w, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """A tile of weights as numbers of the other operand's dtype, all of which hold the quantised ones exactly."""
    if FORMAT == "int4":  # the first of two values in the low bits, 8 above what it is
        w = w.to(tl.int8, bitcast=True)
        w = tl.join(w & 15, (w >> 4) & 15).reshape(w.shape[0], 2 * w.shape[1]) - 8
    if FORMAT == "e4m3" and w.dtype == tl.uint8:
        w = decode_e4m3(w)
    return w.to(dtype)


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
    launch: Launch | None = None,
) -> Launch:
    """Fill the rows of `out` [num_entries, num_columns] whose entries are in a block of `aligned`; see the kernel.

    With e4m3 weights x is rounded to e4m3, too, with a scale for every 128 values of a row. launch: what an earlier
    call returned whose tensors had the same signatures, and all else was the same.
    """
    w, x_scale = linear.w, None
    if linear.format == "e4m3":
        x, x_scale = quantize_token_groups(x)
        w = w if x.dtype == w.dtype else as_kernel_argument(w)
    if launch is None:
        numbers = {"ACTIVATION": activation, "INTERLEAVED": interleaved, "ENTRIES_PER_ROW": entries_per_row}
        launch = _prepare(x, w, linear, out, aligned.expert_ids.numel(), tile, numbers)
    launch(
        {
            "x_ptr": x,
            "x_scale_ptr": x_scale,
            "w_desc" if launch.boxes else "w_ptr": w,
            "w_scale_ptr": linear.scale,
            "bias_ptr": linear.bias,
            "entry_weights_ptr": entry_weights,
            "out_ptr": out,
            **aligned.pointers(),
        }
    )
    return launch


def _prepare(
    x: torch.Tensor,
    w: torch.Tensor,
    linear: ExpertLinear,
    out: torch.Tensor,
    max_num_blocks: int,
    tile: MoeTile,
    numbers: dict[str, Any],
) -> Launch:
    num_entries, num_columns = out.shape
    group_n, group_k = 1, 0
    if linear.scale is not None:
        group_n, group_k = linear.group
        step = FP8_GROUP if linear.format == "e4m3" else group_k
        arch, is_native = device_of(x.device).arch, x.dtype == linear.w.dtype
        tile = quantized_tile(tile, step, arch, gated=bool(numbers["ACTIVATION"]), is_native=is_native)
        group_k = 0 if group_k == linear.in_features else group_k
    # vLLM reports wrong products from descriptors whose last step is not a whole one: those sizes go by pointers.
    is_even = x.shape[1] % tile.block_k == 0
    uses_tma = tile.tma and linear.scale is None and is_even and _fits_tma(w)
    return Launch(
        _expert_gemm_kernel,
        (max_num_blocks * triton.cdiv(num_columns, tile.block_n),),
        {
            "w_ptr": None,
            "w_desc": None,
            "num_entries": num_entries,
            **strides("row", x=x),
            **strides("expert row", w=w),
            "K": x.shape[1],
            "N": num_columns,
            "EVEN_K": is_even,
            "FORMAT": linear.format,
            "X_GROUP": FP8_GROUP,
            "GROUP_N": group_n,
            "GROUP_K": group_k,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
            "SWAP_AB": tile.swap_ab,
            **numbers,
        },
        boxes={"w_desc": _box(w, num_columns, numbers["INTERLEAVED"], tile)} if uses_tma else {},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _fits_tma(w: torch.Tensor) -> bool:
    """Whether the copy engine reads it: its address and strides are multiples of 16 bytes (CUDA driver API)."""
    return all(step * w.element_size() % 16 == 0 for step in w.stride()[:2]) and w.data_ptr() % 16 == 0


def _box(w: torch.Tensor, num_columns: int, interleaved: bool, tile: MoeTile) -> Box:
    """Blocks of block_n columns by block_k, of gate and up at once where there are both."""
    num_experts, num_rows, depth = w.shape
    parts = num_rows // num_columns
    row = w.stride(1)
    strides = (w.stride(0), row, parts * row, 1) if interleaved else (w.stride(0), num_columns * row, row, 1)
    return Box((num_experts, parts, num_columns, depth), strides, (1, parts, tile.block_n, tile.block_k))
