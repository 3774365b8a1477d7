"""Numba kernel of the gated RMS norm."""

from __future__ import annotations

import numpy as np
import torch

from .. import kernel as nb
from ..launch import NumbaLaunch
from ..vectors import LOG2_E


@nb.device_function
def _normalise(x, z, weight, out, sizes, eps, norm_first, has_silu):
    """Normalise this thread's groups. The weight's place in a group is contiguous."""
    num_groups, group, of_token, weight_size, x_stride, z_stride = sizes
    one_float = np.float32(1)
    first, end = nb.share(num_groups)
    for index in range(first, end):
        token, place = index // of_token, index % of_token * group
        x_at, z_at, w_at, to = token * x_stride + place, token * z_stride + place, place % weight_size, index * group
        total = np.float32(0)
        for i in range(group):
            value, gate = nb.load(x, x_at + i), nb.load(z, z_at + i)
            sigmoid = one_float / (one_float + nb.exp2(np.float32(-LOG2_E) * gate))
            gated = value * (gate * sigmoid if has_silu else sigmoid)
            value = value if norm_first else gated
            total += value * value
        inverse = one_float / np.sqrt(total / np.float32(group) + eps)
        for i in range(group):
            gate = nb.load(z, z_at + i)
            sigmoid = one_float / (one_float + nb.exp2(np.float32(-LOG2_E) * gate))
            factor = inverse * nb.load(weight, w_at + i) * (gate * sigmoid if has_silu else sigmoid)
            nb.store(out, to + i, nb.load(x, x_at + i) * factor)


@nb.Kernel
def _gated_rms_norm(arguments):
    values = nb.unpack(arguments, 16)
    is_bf16, has_bf16_weight, x, z, weight, out = values[1:7]
    options = values[7:13], nb.as_float(values[13]), values[14] != 0, values[15] != 0
    if not is_bf16:
        _normalise(nb.floats(x), nb.floats(z), nb.floats(weight), nb.floats(out), *options)
    elif has_bf16_weight:
        _normalise(nb.bfloats(x), nb.bfloats(z), nb.bfloats(weight), nb.bfloats(out), *options)
    else:
        _normalise(nb.bfloats(x), nb.bfloats(z), nb.floats(weight), nb.bfloats(out), *options)


def launch_for(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, group: int, eps: float, *, norm_first: bool, has_silu: bool
) -> NumbaLaunch | None:
    """Return a launch; None unless a token's elements are contiguous and groups do not divide the weight's rows."""
    num_tokens, heads, size = x.shape
    is_dense = all(tensor.stride(2) == 1 and tensor.stride(1) == size for tensor in (x, z))
    if not is_dense or weight.numel() % group:
        return None
    dtypes = x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16
    of_token = heads * size // group
    sizes = num_tokens * of_token, group, of_token, weight.numel(), x.stride(0), z.stride(0)
    tensors = "x_ptr", "z_ptr", "weight_ptr", "out_ptr"
    arguments = *dtypes, *tensors, *sizes, nb.bits(eps), norm_first, has_silu
    return NumbaLaunch(_gated_rms_norm.address, x.numel() * 16, arguments)
