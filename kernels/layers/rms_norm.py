"""RMS normalisation, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch

from ..core.checks import FLOAT_DTYPES, check_dtype, check_eps, check_out, check_tensor
from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.errors import InvalidInputError
from ..core.launch import Compute, Launch, nothing, num_warps, rows_of, wait_for_inputs
from ..core.operation import Run, like_the_first, operation
from . import definition


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, HIDDEN_SIZE]
    residual_ptr,  # [num_rows, HIDDEN_SIZE], or None
    weight_ptr,  # [HIDDEN_SIZE]
    out_ptr,  # [num_rows, HIDDEN_SIZE]
    eps,
    stride_x_row,
    stride_residual_row,
    stride_out_row,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Normalise one row a program. With a residual, first add x to it, rounded to its dtype; normalise the sum."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = offs < HIDDEN_SIZE
    x = tl.load(x_ptr + row * stride_x_row + offs, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + row * stride_residual_row + offs
        total = x + tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, rounded, mask=mask)
        x = rounded.to(tl.float32)
    variance = tl.sum(x * x, axis=0) / HIDDEN_SIZE
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    normed = x / tl.sqrt(variance + eps) * weight
    tl.store(out_ptr + row * stride_out_row + offs, normed.to(out_ptr.dtype.element_ty), mask=mask)


@operation(like_the_first)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> Run[torch.Tensor]:
    """Return weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, 2019).

    The result is computed in float32 and rounded once.

    Args:
        x: [..., hidden_size], float32, float16 or bfloat16, any strides.
        weight: [hidden_size], any of the dtypes of x.
        eps: added to the mean square; at least 0.
        out: like x, contiguous; None makes one.

    Raises:
        InvalidInputError: a shape, dtype or device does not fit, or eps is below 0.
        UnsupportedError: an argument requires a gradient.
    """
    eps = check_eps(eps)
    _check(x, weight)
    check_out(out, x.shape, x)
    launch = _launch(x, weight, eps)

    def run(
        x: torch.Tensor, weight: torch.Tensor, *_: object, out: torch.Tensor | None = None, **__: object
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if launch is None:
            return out.copy_(definition.rms_norm(x, weight, eps, compute=torch.float32))
        launch({"x_ptr": rows_of(x), "residual_ptr": None, "weight_ptr": weight.contiguous(), "out_ptr": out})
        return out

    return run


@operation(mutates=("x", "residual"), finish=lambda arguments, _: (arguments["x"], arguments["residual"]))
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> Run[tuple[torch.Tensor, torch.Tensor]]:
    """Add x to residual and normalise the sum, in place: residual becomes residual + x, x becomes rms_norm(residual).

    This takes one pass over memory instead of two. The sum is rounded to the dtype of residual before it is normalised.

    Args:
        x, residual: [..., hidden_size], both float32, float16 or bfloat16, contiguous, not overlapping.
        weight, eps: as in `rms_norm`.

    Returns:
        (x, residual).

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit, or eps is below 0.
        UnsupportedError: an argument requires a gradient.
    """
    eps = check_eps(eps)
    _check(x, weight)
    check_tensor("residual", residual, x.shape, (x.dtype,), x.device)
    if not (x.is_contiguous() and residual.is_contiguous()):
        strides = f"{x.stride()}, {residual.stride()}"
        raise InvalidInputError(f"x, residual: strides {strides}, expected contiguous tensors")
    launch = _launch(x, weight, eps, has_residual=True)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if launch is None:
            x.copy_(definition.rms_norm(residual.add_(x), weight, eps, compute=torch.float32))
            return x, residual
        launch({"x_ptr": x, "residual_ptr": residual, "weight_ptr": weight.contiguous(), "out_ptr": x})
        return x, residual

    return run


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_dtype("x", x, *FLOAT_DTYPES)
    if x.dim() == 0:
        raise InvalidInputError("x: a scalar, expected [..., hidden_size]")
    check_tensor("weight", weight, (x.shape[-1],), FLOAT_DTYPES, x.device)


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, *, has_residual: bool = False) -> Compute | None:
    """Return the launch of a Triton or numba kernel; None if PyTorch computes."""
    rows, by_triton = rows_of(x), use_triton(x)
    if x.numel() == 0:
        return nothing
    if not by_triton:
        if not takes_numba(x, weights=[weight]):
            return None
        from ..cpu.layers import rms_norm as numba_norm

        return numba_norm.launch_for(rows, weight, eps, has_residual=has_residual)
    num_rows, hidden_size = rows.shape
    block_size = triton.next_power_of_2(hidden_size)
    return Launch(
        _rms_norm_kernel,
        (num_rows,),
        {
            "eps": eps,
            "stride_x_row": rows.stride(0),
            "stride_residual_row": hidden_size,
            "stride_out_row": hidden_size,
            "HIDDEN_SIZE": hidden_size,
            "BLOCK_SIZE": block_size,
        },
        num_warps=num_warps(block_size),
    )
