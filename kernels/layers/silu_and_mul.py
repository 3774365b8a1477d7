"""Gated SiLU between the two projections of an MLP, and other gated activations."""

from __future__ import annotations

import torch

from ..core.checks import FLOAT_DTYPES, check_dtype, check_out
from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.errors import InvalidInputError
from ..core.launch import Compute, Launch, nothing, num_warps, rows_of, tile, wait_for_inputs
from ..core.operation import Run, operation
from . import definition
from .activation import ACTIVATIONS, check_activation, gated_activation


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
    """Compute one tile of the output a program."""
    wait_for_inputs()
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    mask = (rows < num_rows) & (columns < SIZE)
    gate_ptrs = x_ptr + rows * stride_x_row + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    out = gated_activation(gate, up, ACTIVATION)
    tl.store(out_ptr + rows * stride_out_row + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def _new(x: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


@operation(_new)
def silu_and_mul(x: torch.Tensor, *, activation: str = "silu", out: torch.Tensor | None = None) -> Run[torch.Tensor]:
    """Return silu(gate) * up, with silu(z) = z / (1 + exp(-z)) (Shazeer, 2020).

    The result is computed in float32 and rounded once.

    Args:
        x: [..., 2 * size], gate then up, float32, float16 or bfloat16, any strides.
        activation: "silu", "gelu", "gelu_tanh", "swiglu_oai", "situ" or "silu_10", as in `fused_moe`.
        out: [..., size], dtype of x, contiguous; None makes one.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit.
        UnsupportedError: the activation is unknown, or an argument requires a gradient.
    """
    check_dtype("x", x, *FLOAT_DTYPES)
    check_activation(activation, ACTIVATIONS)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise InvalidInputError(f"x: shape {list(x.shape)}, expected [..., 2 * size]")
    check_out(out, (*x.shape[:-1], x.shape[-1] // 2), x)
    launch = _launch(x, activation)

    def run(x: torch.Tensor, *, out: torch.Tensor | None = None, **_: object) -> torch.Tensor:
        if out is None:
            out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        if launch is None:
            return out.copy_(definition.silu_and_mul(x, activation, compute=torch.float32))
        launch({"x_ptr": rows_of(x), "out_ptr": out})
        return out

    return run


def _launch(x: torch.Tensor, activation: str) -> Compute | None:
    """Return the launch of a Triton or numba kernel; None if PyTorch computes."""
    rows, by_triton = rows_of(x), use_triton(x)
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    if x.numel() == 0:
        return nothing
    if not by_triton:
        if activation != "silu" or not takes_numba(x):
            return None
        from ..cpu.layers import gated_activation as numba_activation

        return numba_activation.launch_for(rows)
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
