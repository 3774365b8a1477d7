"""Weights of 8 bits one by one: e4m3 and int8, beside scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.quantization.weight import QuantizedWeight
from paged.models.quantization.layout import Layout, Stored, Tensors


@dataclass(frozen=True, kw_only=True)
class EightBit(Layout):
    """`weight` in its own type, and scales: weight = code * scale.

    one_scale: a scale for all weights; otherwise one a row, or of e4m3 one a block where group_size is 128.
    scale_name: the end of the scales' name.
    """

    one_scale: bool = False
    scale_name: str = "weight_scale"

    def stored(self, rows: int, columns: int) -> dict[str, Stored]:
        code = torch.int8 if self.form == "int8" else torch.float8_e4m3fn
        if self.one_scale:
            scale = Stored((), torch.float32)
        elif self.in_blocks:
            scale = Stored((self.scale_rows(rows), self.num_groups(columns)), torch.float32, 0, self.group_size)
        else:
            scale = Stored((rows,), torch.float32, 0)
        found = {"weight": Stored((rows, columns), code, 0), self.scale_name: scale}
        return found | ({"input_scale": Stored((), torch.float32)} if self.has_input_scale else {})

    def pack(self, tensors: Tensors, columns: int) -> QuantizedWeight:
        weight, scale = tensors["weight"], tensors[self.scale_name].float()
        return QuantizedWeight(
            weight,
            scale.expand(len(weight)) if self.one_scale else scale,
            columns,
            quantizes_input=self.quantizes_input,
            input_scale=tensors["input_scale"].float() if self.has_input_scale else None,
        )
