"""Products with weights; on a CPU by oneDNN, which PyTorch itself takes for 16-bit types alone."""

from __future__ import annotations

import torch
from torch.nn import functional

# PyTorch gives float32 to MKL, which on one core of an AMD EPYC with AVX-512 multiplies 60 to 87 GFLOP/s, where oneDNN
# comes to 110 to 180, for 32 to 2,048 rows. Packed weights would gain a fifth more for 32 rows, and take the memory of
# the model a second time.
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, without gradients: x [..., in_features], weight [out_features, in_features]."""
    is_plain = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and _HAS_ONEDNN
    if not is_plain or torch.compiler.is_dynamo_compiling():
        return functional.linear(x, weight, bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
