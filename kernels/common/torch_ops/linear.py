"""Products with weights; on a CPU by oneDNN, which PyTorch itself takes for 16-bit types alone."""

from __future__ import annotations

import torch
from torch.nn import functional

# PyTorch gives float32 to MKL, which on one core of an AMD EPYC with AVX-512 multiplies 60 to 87 GFLOP/s, where oneDNN
# comes to 110 to 180, for 32 to 2,048 rows, and with packed weights to 135 to 200.
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# Rows that the packing is made for. On two cores 32 rows take 0.5 to 0.65 of the time in float32 and in bfloat16, for
# weights of 288 x 1536 and of 768 x 4608, 1 row 0.6 to 0.9, 2,048 rows the same; made for 256 rows it does not differ.
_PACKED_ROWS = 32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy of [out_features, in_features] in the order in which a CPU multiplies it, opaque to all but `linear`; the
    weight itself where there is none: on other devices, and for types that the processor does not multiply."""
    if weight.device.type != "cpu" or weight.is_mkldnn or not _HAS_ONEDNN:
        return weight
    is_wide = weight.dtype == torch.float32
    if not (is_wide or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, without gradients: x [..., in_features], weight [out_features, in_features].

    Packed weights are for eager calls alone: a compiler cannot look into them.
    """
    is_wide = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and _HAS_ONEDNN
    if torch.compiler.is_dynamo_compiling() or not (is_wide or weight.is_mkldnn):
        return functional.linear(x, weight, bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
