"""Codes and scales of packed weights in the orders of a CPU's products, and back."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.nn import functional

from ...quantization.packing import E2M1_GROUPS
from ...quantization.weight import QuantizedWeight
from .. import products
from ..products import BLOCK

# Columns of int8 codes in blocks are padded to a multiple of this.
_BLOCK_COLUMNS = 64


def int8_blocks(codes: torch.Tensor) -> torch.Tensor:
    """Return codes in blocks of 64 rows. A block holds four columns of every row, then the next four."""
    padded = functional.pad(codes, (0, -codes.shape[1] % _BLOCK_COLUMNS))
    return padded.view(-1, BLOCK, padded.shape[1] // 4, 4).transpose(1, 2).flatten()


def int8_numbers(blocks: torch.Tensor, rows: slice, num_rows: int, columns: int) -> torch.Tensor:
    """Return the codes of some of the rows in `int8_blocks`, in full blocks."""
    width = len(blocks) // num_rows
    part = blocks[rows.start * width : rows.stop * width]
    return part.view(-1, width // 4, BLOCK, 4).transpose(1, 2).reshape(-1, width)[:, :columns]


def blocks_of_onednn(packed: torch.Tensor, codes: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of oneDNN's packed weights if it begins with `int8_blocks`; None if it has another order."""
    address = products.packed_address(packed)
    if len(codes) % BLOCK or address is None:
        return None
    expected = int8_blocks(codes)
    if packed.nbytes < expected.nbytes:
        return None
    memory: Any = (ctypes.c_int8 * expected.nbytes).from_address(address)
    memory.packed = packed  # keeps the memory alive
    weight_bytes = torch.frombuffer(memory, dtype=torch.int8)
    if not torch.equal(weight_bytes, expected):
        return None
    return weight_bytes


def code_blocks(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes [num_outputs, columns] in the order of `code_product`: blocks of 64 outputs.

    A block holds eight columns of every output, then the next eight. The first four columns are in the low bits.
    """
    quads = codes.view(-1, BLOCK, codes.shape[1] // 8, 2, 4)
    packed = quads[:, :, :, 0] | quads[:, :, :, 1] << 4
    return packed.transpose(1, 2).reshape(len(codes), -1)


def block_scales(weight: QuantizedWeight) -> list[torch.Tensor]:
    """Return scales and, if there are zero points, -1/8 of what they add to a weight: bfloat16 [groups, rows]."""
    sizes = weight.out_features, weight.in_features // (weight.group[1] or weight.in_features)
    scale = weight.scale
    if weight.format == "mxfp4":
        scale = torch.exp2(scale.view(torch.uint8).float() - 127)
    scale = _spread(scale, *sizes)
    if weight.format in E2M1_GROUPS:
        scale = scale / 2  # codes stand for twice the values of E2M1
    numbers = [scale]
    if weight.zero_point is not None:
        numbers.append((_spread(weight.zero_point, *sizes) / 8 - 1) * scale)
    return [number.T.bfloat16().contiguous() for number in numbers]


def int4_scales(weight: QuantizedWeight, size: int) -> torch.Tensor:
    """Return [groups, rows, 2] for ATen's product with groups of `size`: a weight is (code - 8) * scale + zero."""
    sizes = weight.out_features, weight.in_features // size
    scale = _spread(weight.scale, *sizes)
    zero = torch.zeros_like(scale)
    if weight.zero_point is not None:
        zero = (8 - _spread(weight.zero_point, *sizes)) * scale
    return torch.stack([scale.T, zero.T], -1).bfloat16().contiguous()


def int4_numbers(packed: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the weights of rows, from a whole block on, in ATen's order for this CPU, float32 [rows, columns].

    A block's columns come one after another. Each has the first half of its rows in the low bits and the second half in
    the high bits. Rows after the last whole block are stored in pairs.
    """
    block = products.INT4_BLOCKS[products.this_cpu().capability]
    num_full = len(packed) // block * block
    octets = packed[:num_full].reshape(-1, columns, block // 2)
    first = torch.cat([octets & 15, octets >> 4], -1).mT.reshape(num_full, columns)
    remainder = packed[num_full:].reshape(columns, -1)
    last = torch.stack([remainder & 15, remainder >> 4], -1).flatten(1).T
    w = torch.cat([first, last]).float().unflatten(1, (len(scales), -1))
    scale, zero = scales.float().permute(2, 1, 0).unsqueeze(-1)
    return w.sub_(8).mul_(scale).add_(zero).flatten(1)


def _spread(numbers: torch.Tensor, rows: int, num_groups: int) -> torch.Tensor:
    """Return the numbers [], [rows] or [rows, groups] for each of `num_groups` groups, float32 [rows, num_groups]."""
    numbers = numbers.float()
    if numbers.dim() == 0:
        numbers = numbers.expand(rows)
    if numbers.dim() == 1:
        numbers = numbers.view(rows, -1)
    return numbers.repeat_interleave(num_groups // numbers.shape[1], 1)
