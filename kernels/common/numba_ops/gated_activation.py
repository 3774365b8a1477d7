"""Numba kernel of gated activations."""

from __future__ import annotations

import torch

from . import kernel as nb
from .launch import LoopLaunch
from .vectors import LANES, load_part, silu, store_part


@nb.device_function
def _activate(x, out, num_rows, size, stride):
    first, end = nb.share(num_rows)
    for row in range(first, end):
        gate, up, to = row * stride, row * stride + size, row * size
        for i in range(0, size, LANES):
            activated = silu(load_part(x, gate + i, size - i), load_part(x, up + i, size - i))
            store_part(out, to + i, activated, size - i)


@nb.Kernel
def _silu_and_mul(arguments):
    _, is_bf16, x, out, num_rows, size, stride = nb.unpack(arguments, 7)
    if is_bf16:
        _activate(nb.bfloats(x), nb.bfloats(out), num_rows, size, stride)
    else:
        _activate(nb.floats(x), nb.floats(out), num_rows, size, stride)


def prepare(rows: torch.Tensor) -> LoopLaunch:
    """Return a launch of gated SiLU for tensors like `rows` [num_rows, 2 * size], with a contiguous result."""
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    arguments = rows.dtype == torch.bfloat16, "x_ptr", "out_ptr", num_rows, size, rows.stride(0)
    return LoopLaunch(_silu_and_mul.address, rows.numel() * 4, arguments)
