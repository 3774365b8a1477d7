"""The grouped GEMM of the fused MoE: one launch with a matrix product for each expert that any token chose.

An entry is one token with one of its experts. `moe_align_block_size` sorts entries by expert and pads each expert's
entries to whole blocks of BLOCK_M, so a block needs the weights of a single expert. A program multiplies one block by
BLOCK_N columns of the expert's weights. It gathers the rows of x that the entries name, loops along K in steps of
BLOCK_K, accumulates in float32, and stores each row at its entry's row of the output. A launch has a program for every
possible block (`max_num_blocks`) and every BLOCK_N columns. Programs beyond the blocks in use return at once.

`fused_moe` calls `expert_gemm` twice. The first product computes gate and up columns in one program and applies the
activation in registers. The second multiplies each row by its routing weight, and `moe_sum` adds up a token's rows. A
few tokens take `gemv.py` instead.

Tiles come from `config.py`. For quantised weights a step is no deeper than the columns that share a scale. 16-bit
weights are read through a tensor descriptor if the tile asks for Hopper's copy engine and their strides allow it. All
other weights are read by pointers. For e4m3 weights x is rounded first (`quantization/quantize_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.compat import dot, locate_block, tl, triton
from ..core.device import device_of
from ..core.dtypes import as_kernel_argument
from ..core.launch import Box, Launch, strides, wait_for_inputs
from ..layers.activation import gated_activation
from ..quantization.packing import E2M1_GROUPS, FP8_BLOCK
from ..quantization.product import InputRows, WeightRows, as_zero, decode_bytes, load_zero, quantized_product
from ..quantization.quantize_rows import quantize_rows
from .config import MoeTile, quantized_tile
from .moe_align_block_size import MoeAlignment
from .weights import ExpertLinear

BoundGemm = tuple[Launch, Callable[..., tuple[torch.Tensor, torch.Tensor]] | None]
"""The launch of a product, and the function that rounds its input if the weights are e4m3."""

# Strides of scales and zero points, 0 for dimensions that a tensor lacks.
_SCALE_STRIDES = tuple(f"stride_{tensor}_{axis}" for tensor in ("scale", "zeros") for axis in ("row", "group"))


@triton.jit
def _byte_product(
    inputs,  # InputRows, with scales of groups of X_GROUP columns
    weights,  # WeightRows; scales and zero points are read here if GROUP_K > 0
    w_desc,  # descriptor of all weights, in place of weights.ptrs, or None
    expert,
    first_column,
    K,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    X_GROUP: tl.constexpr,
    GROUP_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
):
    """x @ w^T [BLOCK_M, WIDTH] in float32, with plain weights or codes in bytes.

    A step's product of codes is multiplied by its scales in float32 before it is added. Loading scales a step ahead, as
    in `quantized_product`, would spill 44 registers with 128 rows on sm_90. Scales that span K (GROUP_K 0) are left to
    the caller.
    """
    M: tl.constexpr = inputs.ptrs.shape[0]
    dtype: tl.constexpr = inputs.ptrs.dtype.element_ty
    VALUES: tl.constexpr = 2 if FORMAT == "int4" else 1
    offs_k = tl.arange(0, BLOCK_K)
    offs_w = tl.arange(0, BLOCK_K // VALUES)
    x_ptrs = inputs.ptrs[:, None] + offs_k[None, :]
    if w_desc is None:
        w_ptrs = weights.ptrs[:, None] + offs_w[None, :]
    zero = load_zero(None if GROUP_K > 0 else weights.zero_ptrs, FORMAT, False, dtype)
    # With few rows, reading the weights takes the bandwidth, so empty rows are masked. With many, an empty row reads
    # row 0.
    FEW_ROWS: tl.constexpr = M <= 32
    acc = tl.zeros((WIDTH, M) if SWAP_AB else (M, WIDTH), tl.float32)
    for start in range(0, K, BLOCK_K):
        in_row = offs_k[None, :] < K - start
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=inputs.is_row[:, None], other=0.0) if FEW_ROWS else tl.load(x_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=(inputs.is_row[:, None] & in_row) if FEW_ROWS else in_row, other=0.0)
        if w_desc is not None:
            w = w_desc.load([expert.to(tl.int32), 0, first_column, start]).reshape(WIDTH, BLOCK_K)
        elif EVEN_K:
            w = tl.load(w_ptrs + start // VALUES)
        else:
            w = tl.load(w_ptrs + start // VALUES, mask=offs_w[None, :] * VALUES < K - start, other=0.0)
        if GROUP_K > 0 and weights.zero_ptrs is not None:
            zeros = tl.load(weights.zero_ptrs + start // GROUP_K * weights.stride_zero_group)
            w = decode_bytes(w, as_zero(zeros, FORMAT, False, dtype), FORMAT, dtype)
        elif w.dtype != dtype:
            w = decode_bytes(w, zero, FORMAT, dtype)
        if inputs.scale_ptrs is not None or GROUP_K > 0:
            part = tl.zeros_like(acc)
            part = dot(w, x.T, part) if SWAP_AB else dot(x, w.T, part)
            if inputs.scale_ptrs is not None:
                x_scale = tl.load(inputs.scale_ptrs + start // X_GROUP)
                part *= x_scale[None, :] if SWAP_AB else x_scale[:, None]
            if GROUP_K > 0:
                scale = tl.load(weights.scale_ptrs + start // GROUP_K * weights.stride_scale_group).to(tl.float32)
                part *= scale[:, None] if SWAP_AB else scale[None, :]
            acc += part
        else:
            acc = dot(w, x.T, acc) if SWAP_AB else dot(x, w.T, acc)
    if SWAP_AB:
        acc = acc.T
    return acc


@triton.jit(do_not_specialize=["num_entries"])
def _expert_gemm_kernel(
    x_ptr,  # [num_entries / ENTRIES_PER_ROW, K]
    x_scale_ptr,  # [num_entries / ENTRIES_PER_ROW, K / X_GROUP] float32, or None
    w_ptr,  # [num_experts, w_rows, K], w_rows is 2 * N if gated, else N; K / 2 bytes or K / 8 words of codes; or None
    w_desc,  # a tensor descriptor of w, [num_experts, 2 if gated else 1, N, K], or None
    scale_ptr,  # [num_experts, w_rows / GROUP_N, K / GROUP_K], or None
    zeros_ptr,  # int8 in the shape of scale_ptr, or None
    tensor_scale_ptr,  # [num_experts] float32, or None
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
    stride_scale_expert,
    stride_scale_row,
    stride_scale_group,
    stride_zeros_expert,
    stride_zeros_row,
    stride_zeros_group,
    stride_tensor_scale,
    K,
    N: tl.constexpr,
    EVEN_K: tl.constexpr,
    ENTRIES_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
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

    ACTIVATION: applied to the gate and up products in registers; "" for none. INTERLEAVED: gate and up rows alternate
    in w, else all gate rows come first. entry_weights: each entry's row is multiplied by its weight before it is
    rounded. SWAP_AB: the weights are the operand whose rows come in 64s.

    FORMAT, SCALE, GROUP_K: format of quantised weights, see `quantized_product`, which runs the loop for weights in
    words. Scales that span K (GROUP_K 0) are applied at the end. GROUP_N: rows of w that share a scale.
    """
    wait_for_inputs()
    program = tl.program_id(0)
    num_blocks_m = tl.load(num_tokens_post_padded_ptr) // BLOCK_M
    num_blocks_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if program >= num_blocks_m * num_blocks_n:
        return
    block_m, block_n = locate_block(program, num_blocks_m, num_blocks_n, GROUP_M)

    entries = tl.load(sorted_token_ids_ptr + block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(expert_ids_ptr + block_m).to(tl.int64)
    is_entry = entries < num_entries
    rows = tl.where(is_entry, entries // ENTRIES_PER_ROW, 0).to(tl.int64)
    GATED: tl.constexpr = ACTIVATION != ""
    PACKED: tl.constexpr = scale_ptr is not None and w_ptr.dtype.element_ty == tl.int32
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    lanes = tl.arange(0, WIDTH)
    # Take gate rows, then up rows, so that gate and up of a column are in registers of one thread. Columns beyond N
    # read column 0.
    columns = block_n * BLOCK_N + lanes % BLOCK_N
    w_rows = tl.where(columns < N, columns, 0)
    if GATED:
        w_rows = w_rows * 2 + lanes // BLOCK_N if INTERLEAVED else w_rows + lanes // BLOCK_N * N
    inputs = InputRows(
        ptrs=x_ptr + rows * stride_x_row,
        is_row=is_entry,
        scale_ptrs=None if x_scale_ptr is None else x_scale_ptr + rows * ((K + X_GROUP - 1) // X_GROUP),
    )
    w_row_ptrs = None
    if w_desc is None:
        w_row_ptrs = w_ptr + expert * stride_w_expert + w_rows.to(tl.int64) * stride_w_row
    scale_ptrs = None
    zero_ptrs = None
    if scale_ptr is not None:
        groups_n = (w_rows // GROUP_N).to(tl.int64)
        scale_ptrs = scale_ptr + expert * stride_scale_expert + groups_n * stride_scale_row
        if zeros_ptr is not None:
            zero_ptrs = zeros_ptr + expert * stride_zeros_expert + groups_n * stride_zeros_row
    weights = WeightRows(
        ptrs=w_row_ptrs,
        scale_ptrs=scale_ptrs,
        zero_ptrs=zero_ptrs,
        stride_scale_group=stride_scale_group,
        stride_zero_group=stride_zeros_group,
    )
    if PACKED:
        num_steps = (K + BLOCK_K - 1) // BLOCK_K
        acc = quantized_product(inputs, weights, K, 0, num_steps, FORMAT, SCALE, GROUP_K, 0, EVEN_K, BLOCK_K, SWAP_AB)
    else:
        acc = _byte_product(
            inputs, weights, w_desc, expert, block_n * BLOCK_N, K, WIDTH, FORMAT, X_GROUP, GROUP_K, EVEN_K, BLOCK_K,
            SWAP_AB,
        )  # fmt: skip
    if scale_ptr is not None and GROUP_K == 0:
        acc *= tl.load(scale_ptrs).to(tl.float32)[None, :]
    if tensor_scale_ptr is not None:
        acc *= tl.load(tensor_scale_ptr + expert * stride_tensor_scale)
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
    bound: BoundGemm | None = None,
) -> BoundGemm:
    """Fill the rows of `out` [num_entries, num_columns] whose entries are in a block of `aligned`; see the kernel.

    With e4m3 weights x is rounded to e4m3 too, with a scale for every 128 values of a row.
    bound: result of an earlier call with tensors of the same layouts and the same other arguments.
    """
    w, scale, x_scale = linear.w, linear.scale, None
    launch, quantize = bound or (None, None)
    if scale is not None and linear.format == "e4m3":
        quantize = quantize or quantize_rows(x, w.dtype, in_groups=True)
        x, x_scale = quantize(x, None)
        if x.dtype != w.dtype:
            w = as_kernel_argument(w)
    if launch is None:
        numbers = {"ACTIVATION": activation, "INTERLEAVED": interleaved, "ENTRIES_PER_ROW": entries_per_row}
        launch = _launch_for(x, w, linear, out, aligned.expert_ids.numel(), tile, numbers)
    if scale is not None and scale.element_size() == 1:
        scale = scale.view(torch.uint8)
    launch(
        {
            "x_ptr": x,
            "x_scale_ptr": x_scale,
            "w_desc" if launch.boxes else "w_ptr": w,
            "scale_ptr": scale,
            "zeros_ptr": linear.zeros,
            "tensor_scale_ptr": linear.tensor_scale,
            "bias_ptr": linear.bias,
            "entry_weights_ptr": entry_weights,
            "out_ptr": out,
            **aligned.pointers(),
        }
    )
    return launch, quantize


def _launch_for(
    x: torch.Tensor,
    w: torch.Tensor,
    linear: ExpertLinear,
    out: torch.Tensor,
    max_num_blocks: int,
    tile: MoeTile,
    numbers: dict[str, Any],
) -> Launch:
    (num_entries, num_columns), depth = out.shape, x.shape[1]
    group_n, group_k = 1, 0
    if linear.format:
        group_n, group_k = linear.group(depth)
        if not linear.is_packed:
            step = group_k or depth
            if linear.format == "e4m3":
                step = FP8_BLOCK
            arch, is_native = device_of(x.device).arch, x.dtype == linear.w.dtype
            tile = quantized_tile(tile, step, arch, gated=bool(numbers["ACTIVATION"]), is_native=is_native)
        if group_k == depth and linear.format not in E2M1_GROUPS:
            group_k = 0
    # Use pointers if the last step of K is not full, because vLLM reports wrong products of descriptors there.
    is_even = depth % tile.block_k == 0
    uses_tma = tile.tma and not linear.format and is_even and _fits_tma(w)
    boxes = {}
    if uses_tma:
        boxes["w_desc"] = _box(w, num_columns, numbers["INTERLEAVED"], tile)
    return Launch(
        _expert_gemm_kernel,
        (max_num_blocks * triton.cdiv(num_columns, tile.block_n),),
        {
            "w_ptr": None,
            "w_desc": None,
            "num_entries": num_entries,
            **strides("row", x=x),
            **strides("expert row", w=w),
            **dict.fromkeys(_SCALE_STRIDES, 0),
            **strides("expert row group", scale=linear.scale, zeros=linear.zeros),
            "stride_tensor_scale": 0 if linear.tensor_scale is None else linear.tensor_scale.stride(0),
            "K": depth,
            "N": num_columns,
            "EVEN_K": is_even,
            "FORMAT": "e2m1" if linear.format in E2M1_GROUPS else linear.format,
            "SCALE": {"mxfp4": "e8m0", "nvfp4": "e4m3"}.get(linear.format, ""),
            "X_GROUP": FP8_BLOCK,
            "GROUP_N": group_n or linear.w.shape[1],
            "GROUP_K": group_k,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
            "SWAP_AB": tile.swap_ab,
            **numbers,
        },
        boxes=boxes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _fits_tma(w: torch.Tensor) -> bool:
    """Return whether the copy engine can read w: address and strides are multiples of 16 bytes (CUDA driver API)."""
    return all(step * w.element_size() % 16 == 0 for step in w.stride()[:2]) and w.data_ptr() % 16 == 0


def _box(w: torch.Tensor, num_columns: int, interleaved: bool, tile: MoeTile) -> Box:
    """Return boxes of block_n columns by block_k; with a gate, a box holds gate and up."""
    num_experts, num_rows, depth = w.shape
    parts = num_rows // num_columns
    row = w.stride(1)
    strides = (w.stride(0), num_columns * row, row, 1)
    if interleaved:
        strides = (w.stride(0), row, parts * row, 1)
    return Box((num_experts, parts, num_columns, depth), strides, (1, parts, tile.block_n, tile.block_k))
