"""Round plain weights to the nearest codes, and hold the codes in the order of a CPU's products."""

from __future__ import annotations

import torch

from paged.kernels.cpu.quantization.packed_product import CpuProduct
from paged.kernels.quantization.packing import pack_codes
from paged.kernels.quantization.weight import QuantizedWeight
from paged.models.quantization.packed_weights import CpuExperts, CpuProducts

# Numbers of columns that share a scale in int4. The first that divides a row's columns is taken.
GROUPS = (128, 64, 32)
# The largest int4 code stands for one of these fractions of a group's largest weight. Each group takes the fraction
# with the smallest sum of squared errors, which lowers the error of normal weights by 15 % or more.
_SPANS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_LARGEST = {"int4": 7.0, "int8": 127.0, "fp8": 448.0}


def nearest_codes(weight: torch.Tensor, form: str, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes to weights [rows, columns], in float32, and their scales [rows, groups].

    Scales have the dtype of the weights and are rounded before codes are chosen. form: "int4", with a scale for
    `group_size` columns; "int8" or "fp8", with a scale for a row.
    """
    low = -_LARGEST[form]
    spans: tuple[float, ...] = (1.0,)
    if form == "int4":
        low, spans = -8.0, _SPANS
    else:
        group_size = weight.shape[1]
    groups = weight.float().unflatten(1, (-1, group_size))
    largest = groups.abs().amax(2, keepdim=True) / _LARGEST[form]
    best = scale = codes = torch.empty(0)
    for span in spans:
        scales = (largest * span).clamp_min(torch.finfo(weight.dtype).tiny).to(weight.dtype)
        rounded = (groups / scales.float()).clamp_(low, _LARGEST[form])
        if form == "fp8":
            rounded = rounded.to(torch.float8_e4m3fn).float()
        else:
            rounded.round_()
        error = (rounded * scales.float() - groups).square_().sum(2, keepdim=True)
        if span == 1.0:
            best, scale, codes = error, scales, rounded
        else:
            is_better = error < best
            best = torch.where(is_better, error, best)
            scale = torch.where(is_better, scales, scale)
            codes = torch.where(is_better, rounded, codes)
    return codes.flatten(1), scale.squeeze(2)


def as_products(weight: torch.Tensor, form: str) -> CpuProducts | None:
    """Round weights [rows, columns] to the nearest codes; return None if groups do not divide a row.

    int8 has a scale for each row, and rounds the activations of each token. int4 has a scale for 128, 64 or 32 columns.
    """
    group = _group_size(weight, form)
    if group is None:
        return None
    return CpuProducts([CpuProduct(_quantized(weight, form, group), weight.dtype)], weight.numel())


def as_experts(weight: torch.Tensor, form: str) -> CpuExperts | None:
    """Round weights of experts [num_experts, rows, columns] as `as_products` does."""
    group = _group_size(weight, form)
    if group is None:
        return None
    return CpuExperts((_quantized(matrix, form, group) for matrix in weight), weight.dtype)


def _group_size(weight: torch.Tensor, form: str) -> int | None:
    """Return the number of columns that share a scale, or None if no group size divides a row."""
    columns = weight.shape[-1]
    if form != "int4":
        return columns
    for size in GROUPS:
        if columns % size == 0:
            return size
    return None


def _quantized(weight: torch.Tensor, form: str, group: int) -> QuantizedWeight:
    codes, scale = nearest_codes(weight, form, group)
    if scale.shape[1] == 1:
        scale = scale.squeeze(1)
    if form == "int8":
        return QuantizedWeight(codes.to(torch.int8), scale, weight.shape[1], quantizes_input=True)
    return QuantizedWeight(pack_codes((codes + 8).to(torch.uint8)), scale, weight.shape[1])
