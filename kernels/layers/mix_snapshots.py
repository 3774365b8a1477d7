"""Attention to snapshots of the residual stream: a weighted sum of its rows, normalised."""

from __future__ import annotations

from typing import Any

import torch

from ..core.checks import FLOAT_DTYPES, check_eps, check_last_dim_contiguous, check_tensor
from ..core.compat import tl, triton
from ..core.device import takes_numba, use_triton
from ..core.errors import as_int
from ..core.launch import Compute, Launch, nothing, num_warps, strides, wait_for_inputs
from ..core.operation import Run, operation
from . import definition


@triton.jit
def _mix_snapshots_kernel(
    rows_ptr,  # [num_snapshots, num_tokens, SIZE]
    stream_ptr,  # [num_tokens, SIZE]
    output_ptr,  # [num_tokens, SIZE], or None
    score_norm_ptr,  # [SIZE]
    score_ptr,  # [SIZE]
    norm_ptr,  # [SIZE]
    x_ptr,  # [num_tokens, SIZE], contiguous
    num_snapshots,
    eps,
    norm_eps,
    stride_rows_row,
    stride_rows_token,
    stride_output_token,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Mix one token's rows, each read once: weights are a softmax on line, from the stream to the last snapshot."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_SIZE)
    mask = offs < SIZE
    stream_ptrs = stream_ptr + token * stride_rows_token + offs
    snapshot_ptrs = rows_ptr + token * stride_rows_token + offs
    row = tl.load(stream_ptrs, mask=mask, other=0.0).to(tl.float32)
    if output_ptr is not None:
        row += tl.load(output_ptr + token * stride_output_token + offs, mask=mask, other=0.0).to(tl.float32)
        rounded = row.to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptrs, rounded, mask=mask)
        row = rounded.to(tl.float32)
    query = tl.load(score_norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    query *= tl.load(score_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    largest = tl.sum(row * query, 0) / tl.sqrt(tl.sum(row * row, 0) / SIZE + eps)
    total, mixed = 1.0, row
    for _ in range(num_snapshots):
        row = tl.load(snapshot_ptrs, mask=mask, other=0.0).to(tl.float32)
        snapshot_ptrs += stride_rows_row
        score = tl.sum(row * query, 0) / tl.sqrt(tl.sum(row * row, 0) / SIZE + eps)
        new_largest = tl.maximum(largest, score)
        shrink, weight = tl.exp(largest - new_largest), tl.exp(score - new_largest)
        total = total * shrink + weight
        mixed = mixed * shrink + row * weight
        largest = new_largest
    mixed = mixed / total
    normed = mixed / tl.sqrt(tl.sum(mixed * mixed, 0) / SIZE + norm_eps)
    normed *= tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + token * SIZE + offs, normed.to(x_ptr.dtype.element_ty), mask=mask)


def _new(rows: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.empty(rows.shape[1:], dtype=rows.dtype, device=rows.device)


@operation(_new, mutates=("rows",))
def mix_snapshots(
    rows: torch.Tensor,
    output: torch.Tensor | None,
    score_norm_weight: torch.Tensor,
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    num_snapshots: int,
    *,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> Run[torch.Tensor]:
    """Add a part's output to the residual stream, and return the norm of a weighted sum of the stream and snapshots.

    The weights are a softmax over rows r of score_weight * (RMS norm of r) (attention residuals; Moonshot AI,
    "Kimi K3", 2026). All is float32. The new stream is rounded to its dtype first, the result once.

    Args:
        rows: [num_rows, num_tokens, size], float32, float16 or bfloat16, last dimension contiguous. The last row is the
            stream, which the call changes; the first `num_snapshots` rows are snapshots.
        output: [num_tokens, size], dtype of rows, last dimension contiguous; None adds nothing.
        score_norm_weight, score_weight: [size], any float dtype, contiguous: of the scores' norm, and of the scores.
        norm_weight: [size], any float dtype, contiguous: of the result's RMS norm.
        num_snapshots: 0 to num_rows - 1.
        eps, norm_eps: added to the mean squares of rows, and of their sum; at least 0.

    Returns:
        [num_tokens, size], contiguous.

    Raises:
        InvalidInputError: a shape, dtype, device or value does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    eps, norm_eps = check_eps(eps), check_eps(norm_eps)
    check_tensor("rows", rows, ("num_rows", "num_tokens", "size"), FLOAT_DTYPES)
    num_rows, num_tokens, size = rows.shape
    num_snapshots = as_int("num_snapshots", num_snapshots, 0, num_rows - 1)
    if output is not None:
        check_tensor("output", output, (num_tokens, size), (rows.dtype,), rows.device)
        check_last_dim_contiguous("output", output)
    check_last_dim_contiguous("rows", rows)
    weights = {"score_norm_weight": score_norm_weight, "score_weight": score_weight, "norm_weight": norm_weight}
    for name, weight in weights.items():
        check_tensor(name, weight, (size,), FLOAT_DTYPES, rows.device)
        check_last_dim_contiguous(name, weight)
    sizes: dict[str, Any] = {"num_snapshots": num_snapshots, "eps": eps, "norm_eps": norm_eps}
    launch: Compute | None = nothing
    if rows.numel():
        launch = _launch(rows, output, list(weights.values()), sizes)

    def run(
        rows: torch.Tensor,
        output: torch.Tensor | None,
        score_norm_weight: torch.Tensor,
        score_weight: torch.Tensor,
        norm_weight: torch.Tensor,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        x = _new(rows)
        if launch is None:
            mixed, stream = definition.mix_snapshots(
                rows, output, score_norm_weight, score_weight, norm_weight, **sizes, compute=torch.float32
            )
            rows[-1].copy_(stream)
            return x.copy_(mixed)
        tensors = {"score_norm_ptr": score_norm_weight, "score_ptr": score_weight, "norm_ptr": norm_weight}
        launch({**tensors, "rows_ptr": rows, "stream_ptr": rows[-1], "output_ptr": output, "x_ptr": x})
        return x

    return run


def _launch(
    rows: torch.Tensor, output: torch.Tensor | None, weights: list[torch.Tensor], sizes: dict[str, Any]
) -> Compute | None:
    """Return the launch of a Triton or numba kernel; None if PyTorch computes."""
    _, num_tokens, size = rows.shape
    steps = {**strides("row token", rows=rows), **strides("token", output=output)}
    if use_triton(rows):
        block_size = triton.next_power_of_2(size)
        arguments = {**sizes, **steps, "SIZE": size, "BLOCK_SIZE": block_size}
        return Launch(_mix_snapshots_kernel, (num_tokens,), arguments, num_warps=num_warps(block_size))
    same_dtype = len({weight.dtype for weight in weights}) == 1
    if not takes_numba(rows, output, weights=weights) or not same_dtype:
        return None
    from ..cpu.layers import mix_snapshots as numba_kernel

    return numba_kernel.launch_for(rows, weights[0].dtype, list(steps.values()), **sizes, has_output=output is not None)
