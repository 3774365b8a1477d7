"""Numba kernel of gated activations."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import kernel as nb
from ..launch import NumbaLaunch
from ..vectors import LANES, load_part, silu, store_part


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
    _, is_bf16, is_rounded, x, out, num_rows, size, stride = nb.unpack(arguments, 8)
    if is_bf16:
        _activate(nb.bfloats(x), nb.bfloats(out), num_rows, size, stride)
    elif is_rounded:
        _activate(nb.floats(x), nb.bfloats(out), num_rows, size, stride)
    else:
        _activate(nb.floats(x), nb.floats(out), num_rows, size, stride)


def launch_for(rows: torch.Tensor, dtype: torch.dtype | None = None) -> NumbaLaunch:
    """Return a launch of gated SiLU for tensors like `rows` [num_rows, 2 * size], with a contiguous result.

    dtype: dtype of the result, bfloat16 or the dtype of `rows`, which None means too.
    """
    num_rows, width = rows.shape
    return _launch(rows.dtype == torch.bfloat16, dtype == torch.bfloat16, num_rows, width // 2, rows.stride(0))


def silu_and_mul(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return gated SiLU of rows [num_rows, 2 * size]; dtype: as in `launch_for`."""
    out = torch.empty(len(rows), rows.shape[1] // 2, dtype=dtype)
    launch_for(rows, dtype)({"x_ptr": rows, "out_ptr": out})
    return out


@lru_cache(maxsize=1024)
def _launch(is_bf16: bool, is_rounded: bool, *sizes: int) -> NumbaLaunch:
    num_rows, size, _ = sizes
    return NumbaLaunch(_silu_and_mul.address, num_rows * size * 8, (is_bf16, is_rounded, "x_ptr", "out_ptr", *sizes))
