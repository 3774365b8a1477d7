"""Layers with packed weights, and the check that all tests of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paged import QuantizedWeight, quantized_linear
from paged.kernels.quantization import reference
from paged.kernels.quantization.quantize import quantize
from tests.tolerance import assert_close

# Name -> arguments of `quantize`: every form, with every number of columns a group.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "e4m3 tensor": ("e4m3", {"group_size": 0}),
    "e4m3 channel": ("e4m3", {}),
    "e4m3 block": ("e4m3", {"group_size": 128}),
    "e4m3 weights alone": ("e4m3", {"quantizes_input": False}),
    "e4m3 blocks of weights alone": ("e4m3", {"group_size": 128, "quantizes_input": False}),
    "int8 tensor": ("int8", {"group_size": 0}),
    "int8 channel": ("int8", {}),
    "int8 weights alone": ("int8", {"quantizes_input": False}),
    "int8 channel zeros": ("int8", {"symmetric": False}),
    "int8 g32": ("int8", {"group_size": 32}),
    "int8 g64 zeros": ("int8", {"group_size": 64, "symmetric": False}),
    "int8 g128": ("int8", {"group_size": 128}),
    "int4 tensor": ("int4", {"group_size": 0}),
    "int4 channel": ("int4", {}),
    "int4 channel zeros": ("int4", {"symmetric": False}),
    "int4 g32": ("int4", {"group_size": 32}),
    "int4 g32 zeros": ("int4", {"group_size": 32, "symmetric": False}),
    "int4 g64": ("int4", {"group_size": 64}),
    "int4 g96 zeros": ("int4", {"group_size": 96, "symmetric": False}),
    "int4 g128": ("int4", {"group_size": 128}),
    "int4 g128 zeros": ("int4", {"group_size": 128, "symmetric": False}),
    "mxfp4": ("mxfp4", {}),
    "nvfp4": ("nvfp4", {}),
}


@dataclass(frozen=True)
class Problem:
    """Rows and a layer. Rows and columns of weights differ in size by up to 4, so that no scale is another's.

    Of activations that are quantised none is so near to the middle of two codes that float32 may take the other one.
    """

    x: torch.Tensor
    weight: QuantizedWeight
    bias: torch.Tensor | None = None

    @staticmethod
    def make(
        device: torch.device,
        name: str,
        *,
        num_rows: int = 5,
        size: tuple[int, int] = (72, 384),
        dtype: torch.dtype = torch.float32,
        biased: bool = False,
        **options: Any,
    ) -> Problem:
        form, arguments = FORMATS[name]
        rows, columns = size
        plain = (
            torch.randn(rows, columns)
            * torch.exp2(2 * torch.rand(-(-rows // 8), -(-columns // 16)))
            .repeat_interleave(8, 0)[:rows]
            .repeat_interleave(16, 1)[:, :columns]
        )
        weight = quantize(plain.to(device) / columns**0.5, form, **(arguments | options))
        x = torch.randn(num_rows, columns, device=device).to(dtype)
        if weight.quantizes_input:
            x[near_ties(x, weight)] = 0
        return Problem(x, weight, torch.randn(rows, device=device).to(dtype) if biased else None)

    def check(self) -> None:
        """The result is the reference's up to the rounding of the result, and of code times scale where that is in 16
        bits."""
        want = reference.quantized_linear(self.x, self.weight, bias=self.bias)
        got = quantized_linear(self.x, self.weight, bias=self.bias)
        assert got.dtype == self.x.dtype
        assert_close(got, want, rounded=self.rounded())

    def rounded(self) -> torch.Tensor | None:
        """The definition with code times scale in the dtype of x, for those whose groups are shorter than a step."""
        group_k = self.weight.group[1]
        if self.x.dtype == torch.float32 or self.weight.format != "int4" or group_k == 0 or group_k % 128 == 0:
            return None
        w = reference.dequantize(self.weight).to(self.x.dtype).double()
        x = self.x.cpu().double()
        if self.weight.input_order is not None:
            x = x[:, self.weight.input_order.cpu().long()]
        return x @ w.T + (0 if self.bias is None else self.bias.cpu().double())


def near_ties(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Which values are rounded to another code when they, but not the largest of their group, change by 1e-5."""
    size = 128 if weight.scale.dim() == 2 else x.shape[1]
    wide = x.cpu().double()
    groups = torch.nn.functional.pad(wide, (0, -x.shape[1] % size)).unflatten(1, (-1, size)).abs()
    is_largest = (groups == groups.amax(-1, keepdim=True)).flatten(1)[:, : x.shape[1]]
    up, down = (reference.quantize_rows(wide.where(is_largest, wide * (1 + side * 1e-5)), weight) for side in (1, -1))
    return (up != down).to(x.device)
