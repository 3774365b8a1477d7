"""Quantised expert weights in every format that `fused_moe` takes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """Weights and how many of their rows and columns share a scale; 0 for all of them."""

    kind: str
    group_n: int
    group_k: int

    def __str__(self) -> str:
        """The numbers of an expert that share a scale as the field calls them: "tensor", "channel" or their sizes."""
        sizes = f"{self.group_n}x{self.group_k}" if self.group_k else "channel" if self.group_n else "tensor"
        return f"{self.kind}-{sizes}"


FORMATS = {
    "e4m3 tensor": Format("e4m3", 0, 0),
    "e4m3 channel": Format("e4m3", 1, 0),
    "e4m3 block": Format("e4m3", 128, 128),
    "int8 channel": Format("int8", 1, 0),
    "int8 group": Format("int8", 1, 32),
    "int4 channel": Format("int4", 1, 0),
    "int4 group": Format("int4", 1, 96),
}


def quantize(w: torch.Tensor, kind: str, group_n: int, group_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of which every group's largest has the format's largest value, and their scales."""
    num_experts, num_rows, num_columns = w.shape
    group_n, group_k = group_n or num_rows, group_k or num_columns
    blocks = (-(-num_rows // group_n), -(-num_columns // group_k))
    padded = torch.zeros(num_experts, blocks[0] * group_n, blocks[1] * group_k, device=w.device)
    padded[:, :num_rows, :num_columns] = w
    groups = padded.view(num_experts, blocks[0], group_n, blocks[1], group_k)
    scale = groups.abs().amax((2, 4)) / {"e4m3": 448, "int8": 127, "int4": 7}[kind]
    values = (groups / scale[:, :, None, :, None]).reshape(padded.shape)[:, :num_rows, :num_columns]
    if group_k == num_columns:
        scale = scale[..., 0, 0] if group_n == num_rows else scale[..., 0]
    if kind == "e4m3":
        return values.to(torch.float8_e4m3fn).contiguous(), scale.contiguous()
    whole = values.round().to(torch.int8)
    if kind == "int4":
        nibbles = (whole + 8).to(torch.uint8)
        return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).contiguous(), scale
    return whole.contiguous(), scale
