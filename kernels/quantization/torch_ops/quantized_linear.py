"""Linear layers with packed weights in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from paged.kernels.common.packed.torch_ops.product import quantized_product
from paged.kernels.quantization.weight import FP8_BLOCK, QuantizedWeight


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """`kernels.quantization.quantized_linear` of x in the order of the weights: a tile of them at a time."""
    wide = _quantized(x.float(), weight) if weight.quantizes_input else x.float()
    quantized_product(
        wide,
        weight.values,
        weight.scale,
        weight.format,
        weight.group,
        out,
        zero_point=weight.zero_point,
        tensor_scale=weight.tensor_scale,
        bias=bias,
    )
    return out


def _quantized(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Each group of a row rounded to the type of the weights, multiplied out."""
    size = x.shape[1]
    group = FP8_BLOCK if weight.scale.dim() == 2 else size
    groups = functional.pad(x, (0, -size % group)).unflatten(-1, (-1, group))
    largest = 127.0 if weight.format == "int8" else 448.0
    if weight.input_scale is not None:
        scale = weight.input_scale
    else:
        scale = groups.abs().nan_to_num(0.0, posinf=torch.inf).amax(-1, keepdim=True) / largest
        scale = torch.where(scale > 0, scale, 1.0)
    scaled = groups / scale
    if weight.format == "int8":
        rounded = scaled.round().clamp(-128.0, 127.0)
    else:
        rounded = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
    not_finite = (groups * 0).sum(-1, keepdim=True)
    return (rounded * scale + not_finite).flatten(-2)[:, :size]
