"""The gated SiLU between the two projections of an MLP, and other gated activations."""

from __future__ import annotations

import torch

from paged.kernels.common.checks import FLOAT_DTYPES, check_dtype, output, refuse_gradients
from paged.kernels.common.compat import tl, triton
from paged.kernels.common.device import loops_of, use_triton
from paged.kernels.common.errors import InvalidInputError
from paged.kernels.common.gated_activation import check_activation, gated_activation
from paged.kernels.common.launch import Launch, call_key, keep, known, num_warps, rows_of, tile
from paged.kernels.layers.ops import ops
from paged.kernels.layers.torch_ops import silu_and_mul as torch_op


@triton.jit(do_not_specialize=["num_rows"])
def _silu_and_mul_kernel(
    x_ptr,  # [num_rows, 2 * SIZE], gate then up
    out_ptr,  # [num_rows, SIZE]
    num_rows,
    stride_x_row,
    stride_out_row,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program a tile of the output."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    mask = (rows < num_rows) & (columns < SIZE)
    gate_ptrs = x_ptr + rows * stride_x_row + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    out = gated_activation(gate, up, ACTIVATION)
    tl.store(out_ptr + rows * stride_out_row + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor, *, activation: str = "silu", out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up with silu(z) = z / (1 + exp(-z)) (Shazeer, 2020), in float32, rounded once.

    Args:
        x: [..., 2 * size], the gate then up, float32, float16 or bfloat16, any strides.
        activation: another one than SiLU, as in `fused_moe`.
        out: [..., size], dtype of x, contiguous; made when not given.

    Raises:
        InvalidInputError: shapes, dtypes, devices or strides do not fit.
        UnsupportedError: the activation is another one, or a gradient is asked for.
    """
    refuse_gradients("silu_and_mul", x, out)
    if torch.compiler.is_dynamo_compiling():
        if out is None:
            return ops.silu_and_mul(x, activation)
        ops.silu_and_mul_out(x, out, activation)
        return out
    key = call_key("silu_and_mul", (x, out), activation)
    launch = known(key)
    if launch is None:
        check_activation(activation)
        check_dtype("x", x, *FLOAT_DTYPES)
        if x.dim() == 0 or x.shape[-1] % 2:
            raise InvalidInputError(f"x: shape {list(x.shape)}, expected [..., 2 * size]")
        out = output(out, (*x.shape[:-1], x.shape[-1] // 2), x)
        by_triton = use_triton(x)
        if out.numel() == 0:
            return out
        if by_triton:
            launch = keep(key, _prepare(rows_of(x), activation))
        elif activation == "silu" and (loops := loops_of(torch_op, x)):
            launch = keep(key, loops.prepare(rows_of(x)))
        else:
            return torch_op.silu_and_mul(x, activation, out=out)
    elif out is None:
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    launch({"x_ptr": rows_of(x), "out_ptr": out})
    return out


def _prepare(rows: torch.Tensor, activation: str) -> Launch:
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    block_rows, block_columns = tile(num_rows, size)
    return Launch(
        _silu_and_mul_kernel,
        (triton.cdiv(num_rows, block_rows), triton.cdiv(size, block_columns)),
        {
            "num_rows": num_rows,
            "stride_x_row": rows.stride(0),
            "stride_out_row": size,
            "SIZE": size,
            "ACTIVATION": activation,
            "BLOCK_ROWS": block_rows,
            "BLOCK_COLUMNS": block_columns,
        },
        num_warps=num_warps(2 * block_rows * block_columns),
    )
