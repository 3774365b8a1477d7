"""A linear layer over packed weights: 8-bit products, or 16-bit products with weights unpacked in registers."""

from __future__ import annotations

import torch

from ..core.checks import (
    FLOAT_DTYPES,
    check_contiguous,
    check_is_tensor,
    check_last_dim_contiguous,
    check_strided_out,
    check_tensor,
    refuse_gradients,
)
from ..core.custom_ops import in_fields
from ..core.device import use_triton
from ..core.errors import InvalidInputError, shown
from ..core.operation import Run, operation
from ..layers.linear import linear
from .definition import input_of
from .gemm import quantized_gemm
from .quantize_rows import quantize_rows
from .tiles import dequantized_tiles
from .weight import QuantizedWeight


@operation(lambda x, values, **_: x.new_empty(x.shape[0], values.shape[0]), **in_fields(weight=QuantizedWeight))
def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Run[torch.Tensor]:
    """Return x @ weight^T + bias for packed weights.

    Sums are float32 (integers if int8 is multiplied by int8) and are rounded once. Weights are unpacked in registers,
    never in memory. If the scales of 4-bit weights span fewer than 128 columns, code times scale is rounded to the
    dtype of x. Nothing else is rounded, except what the format rounds. Results have the same bits in every run.

    Args:
        x: [num_rows, in_features], float32, float16 or bfloat16, last dimension contiguous.
        weight: the packed weights. If its quantizes_input is set, x is first rounded to e4m3 or int8, each token or
            each 128 values of a token separately. A row with infinity or NaN then gives NaN.
        bias: [out_features], dtype of x or float32, contiguous; None for none.
        out: [num_rows, out_features], dtype of x, last dimension contiguous; None makes one.

    Raises:
        InvalidInputError: a shape, dtype, device or stride does not fit.
        UnsupportedError: an argument requires a gradient.
    """
    if not isinstance(weight, QuantizedWeight):
        raise InvalidInputError(f"weight: {shown(weight)}, expected a QuantizedWeight")
    refuse_gradients("quantized_linear", weight.scale, weight.tensor_scale, weight.input_scale)
    check_is_tensor("x", x)
    device = weight.values.device
    check_tensor("x", x, ("num_rows", weight.in_features), FLOAT_DTYPES, device)
    check_last_dim_contiguous("x", x)
    shape = (len(x), weight.out_features)
    if bias is not None:
        check_tensor("bias", bias, shape[1:], (x.dtype, torch.float32), device)
        check_contiguous("bias", bias)
    check_strided_out(out, shape, x)
    return _run


def _run(
    x: torch.Tensor,
    weight: QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty((len(x), weight.out_features), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if not use_triton(x):
        _multiply_by_torch(x, weight, bias, out)
        return out
    if weight.input_order is not None:
        x = x.index_select(1, weight.input_order)
    x_scale = None
    if weight.quantizes_input:
        x, x_scale = quantize_rows(x, weight.values.dtype, in_groups=weight.scale.dim() == 2)(x, weight.input_scale)
    quantized_gemm(x, x_scale, weight, bias, out)
    return out


def _multiply_by_torch(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute the definition in float32, a tile of weights at a time."""
    wide = input_of(x, weight, compute=torch.float32)
    codes = weight.values, weight.scale, weight.zero_point, weight.tensor_scale
    for rows, w in dequantized_tiles(*codes, weight.in_features):
        bias_of_rows = None
        if bias is not None:
            bias_of_rows = bias[rows].float()
        out[:, rows] = linear(wide, w, bias_of_rows)
