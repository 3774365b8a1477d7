"""Activations in e4m3 with a scale for every 128 values of a token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paged.kernels.common.compat import tl, triton
from paged.kernels.common.fp8 import as_kernel_argument, decode_e4m3, encode_e4m3, has_native_e4m3
from paged.kernels.common.launch import Launch
from paged.kernels.moe.weights import FP8_GROUP


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_token_groups_kernel(
    x_ptr,  # [num_rows, SIZE]
    q_ptr,  # [num_rows, SIZE], contiguous; uint8 holds codes, other types their values
    scale_ptr,  # [num_rows, num_groups] float32
    num_rows,
    stride_x_row,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One group of BLOCK_ROWS rows a program: its largest magnitude becomes 448, the largest e4m3."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    codes = encode_e4m3(x / scale[:, None], NATIVE)
    q_ptrs = q_ptr + rows[:, None] * SIZE + columns[None, :]
    if q_ptr.dtype.element_ty == tl.uint8:
        tl.store(q_ptrs, codes, mask=mask)
    else:
        tl.store(q_ptrs, decode_e4m3(codes, NATIVE).to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + rows * tl.num_programs(1) + tl.program_id(1), scale, mask=rows < num_rows)


def quantize_token_groups(x: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Bind, for tensors like x, a function of x [num_rows, size] that gives (q, scale): q * scale is x rounded to e4m3
    in groups of 128, scale float32 [num_rows, groups].

    q is float8_e4m3fn where x has 16 bits and the chip multiplies e4m3, else the same values in the dtype of x: sums of
    Hopper's 8-bit products keep about 14 bits (DeepSeek-V3, 2024), too few for float32.
    """
    num_rows, size = x.shape
    native = has_native_e4m3(x.device)
    dtype = torch.float8_e4m3fn if native and x.element_size() == 2 else x.dtype
    num_groups = triton.cdiv(size, FP8_GROUP)
    launch = Launch(
        _quantize_token_groups_kernel,
        (triton.cdiv(num_rows, 8), num_groups),
        {
            "num_rows": num_rows,
            "stride_x_row": x.stride(0),
            "SIZE": size,
            "GROUP": FP8_GROUP,
            "BLOCK_ROWS": 8,
            "NATIVE": native,
        },
        num_warps=4,
    )

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.empty(x.shape, dtype=dtype, device=x.device)
        scale = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
        launch({"x_ptr": x, "q_ptr": as_kernel_argument(q), "scale_ptr": scale})
        return q, scale

    return run
