"""Launch of the grouped GEMM of the fused MoE; `gemm_kernel.py` describes the algorithm.

`fused_moe.py` calls `expert_gemm` twice: for the gate and up projections, and for the down projection. A launch has a
program for every possible block of entries (`max_num_blocks`) and every block_n columns. The tile comes from
`config.py`; for quantised weights it is no deeper than the columns that share a scale. 16-bit weights are read through
a tensor descriptor if the tile asks for Hopper's copy engine and their strides allow it, all others by pointers. For
e4m3 weights x is rounded first (`packed/quantize_rows.py`). `_prepare` computes once what depends on no address; the
caller keeps it as a `Launch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paged.kernels.common.compat import triton
from paged.kernels.common.device import device_of
from paged.kernels.common.fp8 import as_kernel_argument
from paged.kernels.common.launch import Box, Launch, strides
from paged.kernels.common.packed.packing import E2M1_GROUPS, FP8_BLOCK
from paged.kernels.common.packed.quantize_rows import quantize_rows
from paged.kernels.moe.config import MoeTile, quantized_tile
from paged.kernels.moe.gemm_kernel import _expert_gemm_kernel
from paged.kernels.moe.moe_align_block_size import MoeAlignment
from paged.kernels.moe.weights import ExpertLinear

BoundGemm = tuple[Launch, Callable[..., tuple[torch.Tensor, torch.Tensor]] | None]
"""The launch of a product, and where its weights are e4m3 what rounds its input."""

# 0 where scales have fewer dimensions.
_SCALE_STRIDES = tuple(f"stride_{tensor}_{axis}" for tensor in ("scale", "zeros") for axis in ("row", "group"))


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

    With e4m3 weights x is rounded to e4m3, too, with a scale for every 128 values of a row. bound: result of an earlier
    call with tensors of the same layouts and the same other arguments.
    """
    w, scale, x_scale = linear.w, linear.scale, None
    launch, quantize = bound or (None, None)
    if scale is not None and linear.format == "e4m3":
        quantize = quantize or quantize_rows(x, w.dtype, in_groups=True)
        x, x_scale = quantize(x, None)
        w = w if x.dtype == w.dtype else as_kernel_argument(w)
    if launch is None:
        numbers = {"ACTIVATION": activation, "INTERLEAVED": interleaved, "ENTRIES_PER_ROW": entries_per_row}
        launch = _prepare(x, w, linear, out, aligned.expert_ids.numel(), tile, numbers)
    launch(
        {
            "x_ptr": x,
            "x_scale_ptr": x_scale,
            "w_desc" if launch.boxes else "w_ptr": w,
            "scale_ptr": scale.view(torch.uint8) if scale is not None and scale.element_size() == 1 else scale,
            "zeros_ptr": linear.zeros,
            "tensor_scale_ptr": linear.tensor_scale,
            "bias_ptr": linear.bias,
            "entry_weights_ptr": entry_weights,
            "out_ptr": out,
            **aligned.pointers(),
        }
    )
    return launch, quantize


def _prepare(
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
            step = FP8_BLOCK if linear.format == "e4m3" else group_k or depth
            arch, is_native = device_of(x.device).arch, x.dtype == linear.w.dtype
            tile = quantized_tile(tile, step, arch, gated=bool(numbers["ACTIVATION"]), is_native=is_native)
        group_k = 0 if group_k == depth and linear.format not in E2M1_GROUPS else group_k
    # vLLM reports wrong products from descriptors whose last step is not a whole one: those sizes go by pointers.
    is_even = depth % tile.block_k == 0
    uses_tma = tile.tma and not linear.format and is_even and _fits_tma(w)
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
        boxes={"w_desc": _box(w, num_columns, numbers["INTERLEAVED"], tile)} if uses_tma else {},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _fits_tma(w: torch.Tensor) -> bool:
    """Return whether the copy engine can read it: address and strides are multiples of 16 bytes (CUDA driver API)."""
    return all(step * w.element_size() % 16 == 0 for step in w.stride()[:2]) and w.data_ptr() % 16 == 0


def _box(w: torch.Tensor, num_columns: int, interleaved: bool, tile: MoeTile) -> Box:
    """Return boxes of block_n columns by block_k, of gate and up at once if there are both."""
    num_experts, num_rows, depth = w.shape
    parts = num_rows // num_columns
    row = w.stride(1)
    strides = (w.stride(0), row, parts * row, 1) if interleaved else (w.stride(0), num_columns * row, row, 1)
    return Box((num_experts, parts, num_columns, depth), strides, (1, parts, tile.block_n, tile.block_k))
