"""Numba kernel of RMS normalisation."""

from __future__ import annotations

import torch

from .. import kernel as nb
from ..launch import NumbaLaunch


@nb.device_function
def _normalise(x, residual, weight, out, has_residual, num_rows, size, stride, eps):
    """Compute out = norm(x), or with a residual: residual += x, out = norm(residual)."""
    first, end = nb.share(num_rows)
    for row in range(first, end):
        to, start, values = row * size, row * stride, x
        if has_residual:
            for i in range(size):
                nb.store(residual, to + i, nb.load(residual, to + i) + nb.load(x, start + i))
            start, values = to, residual
        inverse = nb.inverse_rms(values, start, size, eps)
        for i in range(size):
            nb.store(out, to + i, nb.load(values, start + i) * inverse * nb.load(weight, i))


@nb.Kernel
def _rms_norm(arguments):
    _, is_bf16, has_bf16_weight, x, residual, weight, out, num_rows, size, stride, eps_bits = nb.unpack(arguments, 11)
    sizes = residual != 0, num_rows, size, stride, nb.as_float(eps_bits)
    if not is_bf16:
        _normalise(nb.floats(x), nb.floats(residual), nb.floats(weight), nb.floats(out), *sizes)
    elif has_bf16_weight:
        _normalise(nb.bfloats(x), nb.bfloats(residual), nb.bfloats(weight), nb.bfloats(out), *sizes)
    else:
        _normalise(nb.bfloats(x), nb.bfloats(residual), nb.floats(weight), nb.bfloats(out), *sizes)


def launch_for(rows: torch.Tensor, weight: torch.Tensor, eps: float, *, has_residual: bool) -> NumbaLaunch:
    """Return a launch for tensors like `rows` [num_rows, size]; the residual and the result are contiguous."""
    num_rows, size = rows.shape
    is_bf16, has_bf16_weight = rows.dtype == torch.bfloat16, weight.dtype == torch.bfloat16
    residual = "residual_ptr" if has_residual else 0
    tensors = "x_ptr", residual, "weight_ptr", "out_ptr"
    arguments = is_bf16, has_bf16_weight, *tensors, num_rows, size, rows.stride(0), nb.bits(eps)
    return NumbaLaunch(_rms_norm.address, num_rows * size, arguments)
