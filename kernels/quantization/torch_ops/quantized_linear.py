"""Linear layers with packed weights in PyTorch."""

from __future__ import annotations

import torch

from paged.kernels.common.packed.packing import FP8_BLOCK
from paged.kernels.common.packed.torch_ops.product import quantized_product, rounded_groups
from paged.kernels.quantization.weight import QuantizedWeight


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """`kernels.quantization.quantized_linear` of x in the order of the weights: a tile of them at a time."""
    wide = x.float()
    if weight.quantizes_input:
        group = FP8_BLOCK if weight.scale.dim() == 2 else x.shape[1]
        wide = rounded_groups(wide, group, weight.format, weight.input_scale)
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
