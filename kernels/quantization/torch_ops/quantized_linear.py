"""Linear layers with packed weights in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional

from paged.kernels.common.quantized.torch_ops.dequantize import dequantize
from paged.kernels.common.torch_ops.linear import linear
from paged.kernels.quantization.weight import FP8_BLOCK, QuantizedWeight

# Weights that are unpacked at once: 4 MB in float32, which stay in a core's cache until they are multiplied.
_TILE = 1 << 20


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """`kernels.quantization.quantized_linear` of x in the order of the weights: some rows of weights at a time,
    in multiples of the blocks that share a scale."""
    wide = _quantized(x.float(), weight) if weight.quantizes_input else x.float()
    rows = max(_TILE // weight.in_features // FP8_BLOCK, 1) * FP8_BLOCK
    for start in range(0, weight.out_features, rows):
        end = min(start + rows, weight.out_features)
        part = None if bias is None else bias[start:end].float()
        w = dequantize(
            weight.values,
            weight.scale,
            weight.format,
            weight.group,
            weight.in_features,
            rows=slice(start, end),
            zero_point=weight.zero_point,
            tensor_scale=weight.tensor_scale,
        )
        out[:, start:end] = linear(wide, w, part)
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
    scaled = (groups / scale).clamp(-largest, largest)
    rounded = scaled.round() if weight.format == "int8" else scaled.to(torch.float8_e4m3fn).float()
    not_finite = (groups * 0).sum(-1, keepdim=True)
    return (rounded * scale + not_finite).flatten(-2)[:, :size]
