"""Packed weights a few rows at a time, for products in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .definition import dequantize_codes
from .packing import FP8_BLOCK

# Weights that are unpacked at once: 4 MB in float32, which stay in a core's cache until they are multiplied.
_TILE = 1 << 20


def dequantized_tiles(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    num_columns: int,
    *,
    compute: torch.dtype = torch.float32,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield tiles of `dequantize_codes` in `compute`, with their rows."""
    height = 1
    if values.dtype == torch.float8_e4m3fn and scale.dim() == 2:
        height = FP8_BLOCK
    num_rows = max(_TILE // num_columns // FP8_BLOCK, 1) * FP8_BLOCK

    def of_tile(numbers: torch.Tensor, start: int) -> torch.Tensor:
        if numbers.dim() == 0:
            return numbers
        return numbers[start // height : -(-(start + num_rows) // height)]

    for start in range(0, len(values), num_rows):
        rows = slice(start, min(start + num_rows, len(values)))
        zeros = zero_point
        if zeros is not None:
            zeros = of_tile(zeros, start)
        scales = of_tile(scale, start), zeros, tensor_scale
        yield rows, dequantize_codes(values[rows], *scales, num_columns=num_columns, compute=compute)
