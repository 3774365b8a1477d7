"""Quantised expert weights in every format that `fused_moe` takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged.kernels.moe.weights import ExpertLinear
from paged.kernels.quantization.packing import unpack_codes
from paged.kernels.quantization.quantize import quantize as quantize_linear


class Format(NamedTuple):
    """A weight format, and the numbers of rows and columns that share a scale; 0 for all.

    zeros: whether integer groups have zero points. in_words: whether a word holds eight 4-bit integers, as always with
    E2M1; otherwise a byte holds two.
    """

    kind: str
    group_n: int
    group_k: int
    zeros: bool = False
    in_words: bool = False

    def __str__(self) -> str:
        """How the field calls the rows and columns that share a scale: "tensor", "channel" or their numbers."""
        words = [self.kind]
        if self.in_words:
            words.append("words")
        if self.group_k:
            words.append(f"{self.group_n}x{self.group_k}")
        elif self.group_n:
            words.append("channel")
        else:
            words.append("tensor")
        if self.zeros:
            words.append("zeros")
        return "-".join(words)


MXFP4, NVFP4 = Format("mxfp4", 1, 32), Format("nvfp4", 1, 16)
FORMATS = {
    "e4m3 tensor": Format("e4m3", 0, 0),
    "e4m3 channel": Format("e4m3", 1, 0),
    "e4m3 block": Format("e4m3", 128, 128),
    "int8 channel": Format("int8", 1, 0),
    "int8 group": Format("int8", 1, 32),
    "int8 group zeros": Format("int8", 1, 32, zeros=True),
    "int4 channel": Format("int4", 1, 0),
    "int4 group": Format("int4", 1, 96),
    "int4 group zeros": Format("int4", 1, 96, zeros=True),
    "int4 words channel zeros": Format("int4", 1, 0, zeros=True, in_words=True),
    "int4 words": Format("int4", 1, 96, in_words=True),
    "int4 words zeros": Format("int4", 1, 32, zeros=True, in_words=True),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}


def quantize(w: torch.Tensor, form: Format) -> ExpertLinear:
    """Quantise weights; each group's largest gets the format's largest code. Scales of words have adjacent rows."""
    group_size = form.group_k
    if not group_size and form.group_n:
        group_size = -1
    linears = []
    for expert in w:
        linears.append(quantize_linear(expert.float(), form.kind, group_size=group_size, symmetric=not form.zeros))

    def stacked(field: str) -> torch.Tensor | None:
        if getattr(linears[0], field) is None:
            return None
        return torch.stack([getattr(linear, field) for linear in linears])

    values, scale, zeros = stacked("values"), stacked("scale"), stacked("zero_point")
    assert values is not None
    assert scale is not None
    if form.kind == "int4" and not form.in_words:
        codes = torch.stack([unpack_codes(words, w.shape[2]) for words in values])
        values = codes[..., 0::2] | codes[..., 1::2] << 4
    elif scale.dim() == 3 and form.kind != "e4m3":
        scale = scale.mT.contiguous().mT
        if zeros is not None:
            zeros = zeros.mT.contiguous().mT
    return ExpertLinear(values, None, scale, zeros, stacked("tensor_scale"))
