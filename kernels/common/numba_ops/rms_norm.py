"""RMS normalisation by numba."""

from __future__ import annotations

import numpy as np
import torch

from paged.kernels.common.numba_ops.kernel import (
    Kernel,
    as_float,
    bfloats,
    bits,
    device_function,
    floats,
    load,
    share,
    store,
    unpack,
)
from paged.kernels.common.numba_ops.launch import LoopLaunch


@device_function
def inverse_rms(x, start, size, eps):
    """1 / sqrt(mean(x^2) + eps) of `size` elements from `start` on."""
    total = np.float32(0)
    for i in range(start, start + size):
        value = load(x, i)
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(size) + eps)


@device_function
def _normalise(x, residual, weight, out, has_residual, num_rows, size, stride, eps):
    """out = norm(x), or with a residual: residual += x, out = norm(residual)."""
    first, end = share(num_rows)
    for row in range(first, end):
        to, start, values = row * size, row * stride, x
        if has_residual:
            for i in range(size):
                store(residual, to + i, load(residual, to + i) + load(x, start + i))
            start, values = to, residual
        inverse = inverse_rms(values, start, size, eps)
        for i in range(size):
            store(out, to + i, load(values, start + i) * inverse * load(weight, i))


@Kernel
def _rms_norm(arguments):
    _, is_bf16, has_bf16_weight, x, residual, weight, out, num_rows, size, stride, eps_bits = unpack(arguments, 11)
    sizes = residual != 0, num_rows, size, stride, as_float(eps_bits)
    if not is_bf16:
        _normalise(floats(x), floats(residual), floats(weight), floats(out), *sizes)
    elif has_bf16_weight:
        _normalise(bfloats(x), bfloats(residual), bfloats(weight), bfloats(out), *sizes)
    else:
        _normalise(bfloats(x), bfloats(residual), floats(weight), bfloats(out), *sizes)


def prepare(rows: torch.Tensor, weight: torch.Tensor, eps: float, *, has_residual: bool) -> LoopLaunch:
    """A launch for tensors like `rows` [num_rows, size], the residual and the result contiguous."""
    num_rows, size = rows.shape
    is_bf16, has_bf16_weight = rows.dtype == torch.bfloat16, weight.dtype == torch.bfloat16
    residual = "residual_ptr" if has_residual else 0
    tensors = "x_ptr", residual, "weight_ptr", "out_ptr"
    arguments = is_bf16, has_bf16_weight, *tensors, num_rows, size, rows.stride(0), bits(eps)
    return LoopLaunch(_rms_norm.address, num_rows * size, arguments)
