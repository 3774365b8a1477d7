"""Activations in e4m3 or int8, with a given scale, or one for each token or for every 128 values of a token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.compat import tl, triton
from ..core.dtypes import as_kernel_argument, decode_e4m3, encode_e4m3, has_native_e4m3, round_to_int8
from ..core.launch import Launch, wait_for_inputs
from .packing import FP8_BLOCK


@triton.jit(do_not_specialize=["num_rows", "stride_x_row"])
def _quantize_rows_kernel(
    x_ptr,  # [num_rows, SIZE]
    given_scale_ptr,  # [] float32, or None
    q_ptr,  # [num_rows, SIZE], contiguous: int8, codes of e4m3 in uint8, or values of e4m3 in a float dtype
    scale_ptr,  # [num_rows, num_groups] float32
    num_rows,
    stride_x_row,  # in units of X_UNIT elements
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    X_UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantise one group of BLOCK_ROWS rows. Without a given scale its largest magnitude becomes LARGEST.

    Values that are not finite make the scale NaN, because int8 codes cannot express them.
    """
    wait_for_inputs()
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    columns = tl.program_id(1) * GROUP + tl.arange(0, BLOCK_K)
    end = tl.minimum(tl.program_id(1) * GROUP + GROUP, SIZE)
    x_ptrs = x_ptr + (rows * stride_x_row * X_UNIT)[:, None] + columns[None, :]
    q_ptrs = q_ptr + rows[:, None] * SIZE + columns[None, :]
    if given_scale_ptr is not None:
        scale = tl.zeros((BLOCK_ROWS,), tl.float32) + tl.load(given_scale_ptr)
    else:
        largest = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
        for start in range(0, GROUP, BLOCK_K):
            mask = is_row[:, None] & (columns + start < end)[None, :]
            x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        largest = tl.max(largest, axis=1)
        scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    not_finite = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    for start in range(0, GROUP, BLOCK_K):
        mask = is_row[:, None] & (columns + start < end)[None, :]
        x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        not_finite += x * 0.0
        x = x / scale[:, None]
        if q_ptr.dtype.element_ty == tl.int8:
            q = round_to_int8(x)
        else:
            q = encode_e4m3(x, NATIVE)
            if q_ptr.dtype.element_ty != tl.uint8:
                q = decode_e4m3(q, NATIVE).to(q_ptr.dtype.element_ty)
        tl.store(q_ptrs + start, q, mask=mask)
    scale_ptrs = scale_ptr + rows * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_ptrs, scale + tl.sum(not_finite, axis=1), mask=is_row)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, in_groups: bool
) -> Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that quantises rows like x, [num_rows, size]. It takes a scale, float32 [], or None.

    The function returns (q, scale): q * scale is x rounded to dtype, scale is float32 [num_rows, groups of 128 or 1].
    dtype is int8 or float8_e4m3fn. With float8_e4m3fn, q has codes only if the chip multiplies e4m3 and x has 16 bits;
    Hopper's sums of 8-bit products are too inexact for float32. Otherwise q has the rounded values in the dtype of x.
    """
    num_rows, size = x.shape
    native = has_native_e4m3(x.device)
    is_int8 = dtype == torch.int8
    q_dtype = dtype if is_int8 or (native and x.element_size() == 2) else x.dtype
    group = FP8_BLOCK if in_groups else size
    # A group of 128 is 8 elements for 16 threads. A whole row takes one program, in steps of 8 elements a thread.
    block_rows, block_k = (8, FP8_BLOCK) if in_groups else (1, 1024)
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(size, group))
    # The kernel multiplies by the unit, so that Triton sees that rows are aligned and loads 8 elements at once.
    unit = 8 if x.stride(0) % 8 == 0 else 1
    arguments = {
        "num_rows": num_rows,
        "stride_x_row": x.stride(0) // unit,
        "SIZE": size,
        "GROUP": group,
        "LARGEST": 127.0 if is_int8 else 448.0,
        "X_UNIT": unit,
        "NATIVE": native,
        "BLOCK_ROWS": block_rows,
        "BLOCK_K": block_k,
    }
    launch = Launch(_quantize_rows_kernel, grid, arguments, num_warps=4)

    def run(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.empty(x.shape, dtype=q_dtype, device=x.device)
        scales = torch.empty(num_rows, grid[1], dtype=torch.float32, device=x.device)
        launch({"x_ptr": x, "given_scale_ptr": scale, "q_ptr": as_kernel_argument(q), "scale_ptr": scales})
        return q, scales

    return run
