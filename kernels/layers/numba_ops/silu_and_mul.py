"""Gated activations by numba."""

from __future__ import annotations

import numpy as np
import torch

from paged.kernels.common.numba_ops.kernel import (
    Kernel,
    bfloats,
    device_function,
    exp2,
    floats,
    load,
    share,
    store,
    unpack,
)
from paged.kernels.common.numba_ops.launch import LoopLaunch
from paged.kernels.common.numba_ops.vectors import LOG2_E

_LOG2_E = np.float32(LOG2_E)


@device_function
def _activate(x, out, num_rows, size, stride):
    first, end = share(num_rows)
    for row in range(first, end):
        gate, up, to = row * stride, row * stride + size, row * size
        for i in range(size):
            value = load(x, gate + i)
            store(out, to + i, value / (np.float32(1) + exp2(-_LOG2_E * value)) * load(x, up + i))


@Kernel
def _silu_and_mul(arguments):
    _, is_bf16, x, out, num_rows, size, stride = unpack(arguments, 7)
    if is_bf16:
        _activate(bfloats(x), bfloats(out), num_rows, size, stride)
    else:
        _activate(floats(x), floats(out), num_rows, size, stride)


def prepare(rows: torch.Tensor) -> LoopLaunch:
    """A launch of SiLU for tensors like `rows` [num_rows, 2 * size], the result contiguous."""
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    arguments = rows.dtype == torch.bfloat16, "x_ptr", "out_ptr", num_rows, size, rows.stride(0)
    return LoopLaunch(_silu_and_mul.address, rows.numel() * 4, arguments)
