"""Linear layers with packed weights in float64, slow and obviously right: what tests, benchmarks and self-checks use.

Written from the formulas of the formats, never sharing code with the kernels or their PyTorch implementations. All
functions return new float64 tensors on the CPU and change nothing.
"""

from __future__ import annotations

import torch

from paged.kernels.common.reference import E2M1, codes, f64, to_float8
from paged.kernels.quantization.weight import QuantizedWeight


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """(code - zero point) * scale * tensor scale, [out_features, in_features]."""
    rows, columns = weight.out_features, weight.in_features
    if weight.values.dtype != torch.int32:
        values = f64(weight.values)
        middle = 0
    else:
        code = codes(weight.values, columns)
        is_e2m1 = weight.scale.dtype in (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)
        values = torch.tensor(E2M1, dtype=torch.float64)[code] if is_e2m1 else code.double()
        middle = 0 if is_e2m1 else 8
    scale = weight.scale.cpu()
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scale = 2.0 ** (scale.view(torch.uint8).double() - 127)
    height, width = 1, columns
    if scale.dim() == 2:
        if weight.values.dtype == torch.float8_e4m3fn:
            height = width = 128
        else:
            width = {torch.uint8: 32, torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}.get(
                weight.scale.dtype, columns // scale.shape[1]
            )
    i, j = torch.arange(rows) // height, torch.arange(columns) // width

    def of_each(given: torch.Tensor) -> torch.Tensor:
        given = f64(given)
        return given if given.dim() == 0 else given[:, None] if given.dim() == 1 else given[i][:, j]

    zero = middle if weight.zero_point is None else of_each(weight.zero_point)
    total = 1.0 if weight.tensor_scale is None else f64(weight.tensor_scale)
    return (values - zero) * of_each(scale) * total


def quantize_rows(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x with every row, or every 128 values of one beside blocks of weights, rounded to e4m3 or int8 times a scale.

    Where none is given, the scale makes the largest value of the row or group 448 or 127.
    """
    x = f64(x)
    largest = 127.0 if weight.values.dtype == torch.int8 else 448.0
    size = 128 if weight.scale.dim() == 2 else x.shape[1]
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            values = x[row, start : start + size]
            scale = float(values.abs().max()) / largest or 1.0
            if weight.input_scale is not None:
                scale = float(weight.input_scale)
            scaled = values / scale
            if weight.values.dtype == torch.int8:
                rounded = scaled.round().clamp(-128, 127)
            else:
                rounded = f64(to_float8(scaled.clamp(-largest, largest), torch.float8_e4m3fn))
            out[row, start : start + size] = rounded * scale if values.isfinite().all() else torch.nan
    return out


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight^T + bias, with the columns of x in the weights' order, and rounded where the weight says so."""
    x = f64(x)
    if weight.input_order is not None:
        x = x[:, weight.input_order.cpu().long()]
    if weight.quantizes_input:
        x = quantize_rows(x, weight)
    out = x @ dequantize(weight).T
    return out if bias is None else out + f64(bias)
