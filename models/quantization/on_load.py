"""Quantise a loaded network's weights for a CPU."""

from __future__ import annotations

import torch

from paged.kernels.quantization.cpu_product import CpuProduct
from paged.kernels.quantization.quantize import quantize
from paged.models.quantization.packed_weights import CpuProducts

FORMATS = ("int4", "int8")
# Columns that share a scale in int4: the first that divides a row.
_GROUPS = (128, 64, 32)


def as_products(weight: torch.Tensor, form: str) -> CpuProducts | None:
    """Round weights [rows, columns], or of experts [num_experts, rows, columns], to the nearest codes.

    int8 has a scale for each row and rounds activations for each token; int4 has one for 128, 64 or 32 columns. None
    where a row is no whole number of groups.
    """
    group = next((size for size in _GROUPS if weight.shape[-1] % size == 0), None) if form == "int4" else -1
    if group is None:
        return None
    matrices = weight if weight.dim() == 3 else weight.unsqueeze(0)
    products = [CpuProduct(quantize(matrix, form, group_size=group), weight.dtype) for matrix in matrices]
    return CpuProducts(products, weight.numel())
