"""Linear layers with packed weights in float64; see `kernels.common.reference` for what references are."""

from __future__ import annotations

import torch

from ..common import reference
from ..common.reference import f64
from .weight import QuantizedWeight


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Return (code - zero point) * scale * tensor scale, [out_features, in_features]."""
    scales = weight.scale, weight.zero_point, weight.tensor_scale
    return reference.dequantize(weight.values, *scales, num_columns=weight.in_features)


def quantize_rows(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return x as quantised for the weight: per row or, with blocks of weights, per 128 values of a row."""
    size = 128 if weight.scale.dim() == 2 else x.shape[1]
    return reference.quantize_rows(x, weight.values.dtype, size, weight.input_scale)


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight^T + bias, with columns of x in the weights' order and rounded as the weight requires."""
    x = f64(x)
    if weight.input_order is not None:
        x = x[:, weight.input_order.cpu().long()]
    if weight.quantizes_input:
        x = quantize_rows(x, weight)
    out = x @ dequantize(weight).T
    if bias is not None:
        out = out + f64(bias)
    return out
