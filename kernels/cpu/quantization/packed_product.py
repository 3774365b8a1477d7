"""The product of rows with packed weights on a CPU, and the weights in the product's order."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch

from ...core.device import backend, load_numba, takes_numba
from ...quantization import definition
from ...quantization.packing import E2M1_GROUPS, FP8_BLOCK, unpack_codes
from ...quantization.tiles import dequantized_tiles
from ...quantization.weight import QuantizedWeight
from .. import products
from ..products import ZERO, Cpu
from . import orders

_multiply_int4: Any = torch.ops.aten._weight_int4pack_mm_for_cpu.default
# Weights that are unpacked at once: 4 MB in float32, which stay in the cache.
_TILE = 1 << 20


def is_plain(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies plain weights and activations instead. dtype: dtype of activations."""
    if weight.quantizes_input or weight.input_order is not None:
        return False
    return _product_of(weight, _usable(products.this_cpu(), weight, dtype)) == "unpacked"


def _product_of(weight: QuantizedWeight, cpu: Cpu) -> str:
    sizes = weight.out_features, weight.in_features
    return products.choose_product(weight.format, weight.group, *sizes, weight.quantizes_input, cpu)


def _usable(cpu: Cpu, weight: QuantizedWeight, dtype: torch.dtype) -> Cpu:
    """Return the CPU, without the numba kernels of codes if the weights or the process must not use them."""
    is_rounded = weight.format in E2M1_GROUPS and dtype != torch.bfloat16
    if is_rounded or not load_numba():
        cpu = cpu._replace(multiplies_codes=False)
    return cpu


def unpacked(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [out_features, in_features], rounded once."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype)
    codes = weight.values, weight.scale, weight.zero_point, weight.tensor_scale
    for rows, w in dequantized_tiles(*codes, weight.in_features):
        out[rows] = w
    return out


class CpuProduct:
    """x @ weight^T + bias, with a copy of the weights in the order of the product chosen for this CPU.

    kind: the result of `choose_product`.
    tensors: the copy.
    is_in_blocks: whether 4-bit codes are in the order of numba kernels, which round activations to int8.
    by_onednn: whether oneDNN multiplies int8 codes.
    onednn_blocks: oneDNN's int8 codes as numba kernels read them; None if they are in another order.
    factor: a factor of 4-bit weights in blocks, or None.
    """

    by_onednn = False
    most_rows: float | None = None  # most rows that numba kernels multiply, if `measure` was called
    onednn_blocks: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, cpu: Cpu | None = None) -> None:
        """Reorder the weights. dtype: dtype of activations and results."""
        cpu = _usable(cpu or products.this_cpu(), weight, dtype)
        self.kind = _product_of(weight, cpu)
        self.order, self.form = weight.input_order, weight.format
        self.rounds_input, self.input_scale = weight.quantizes_input, weight.input_scale
        self.group, self.rows, self.columns = weight.group, weight.out_features, weight.in_features
        self.is_in_blocks = self.kind == "blocks"
        self.tensors: Sequence[torch.Tensor]
        if self.kind == "int8":
            scale = weight.scale.float().expand(weight.out_features).contiguous()
            if weight.tensor_scale is not None:
                scale = scale * weight.tensor_scale
            start = weight.values.sum(1, dtype=torch.int32).mul_(-ZERO)
            self.by_onednn = cpu.multiplies_int8
            if self.by_onednn:
                packed = torch.ops.onednn.qlinear_prepack(weight.values, [products.PACKED_ROWS, weight.in_features])
                self.onednn_blocks = orders.blocks_of_onednn(packed, weight.values)
            else:
                packed = orders.int8_blocks(weight.values)
            self.tensors = packed, scale, torch.zeros_like(start), start
        elif self.is_in_blocks:
            codes = orders.code_blocks(unpack_codes(weight.values, weight.in_features))
            self.tensors = codes, *orders.block_scales(weight)
            self.factor = weight.tensor_scale
        elif self.kind == "int4":
            self.group = 1, products.int4_group(weight.group, weight.in_features)
            codes = unpack_codes(weight.values, weight.in_features).int()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            self.tensors = packed, orders.int4_scales(weight, self.group[1])
        else:
            self.tensors = (products.pack(unpacked(weight, dtype)),)

    @property
    def has_blocks(self) -> bool:
        """Whether numba kernels multiply by `tensors`, for few rows or always."""
        return self.is_in_blocks or (self.kind == "int8" and not self.by_onednn)

    @property
    def has_invariant_rows(self) -> bool:
        """Whether a row's bits do not depend on other rows in an invariant forward (see `Backend`).

        This holds for numba kernels, with any number of rows, and for `linear` with codes as numbers.
        """
        if self.kind == "unpacked":
            return True
        has_blocks = self.has_blocks or self.onednn_blocks is not None
        return has_blocks and self.form in products.code_kernels()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product of x [num_rows, in_features], in its dtype."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.is_in_blocks and x.dtype == torch.float16:
            return self._product(x.float(), bias).half()
        return self._product(x, bias)

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        ends: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product by numba kernels, if the weights are in blocks.

        bias: float32. ends, rows: as in `code_product`, for weights of `stack`.
        """
        from . import block_product

        if self.is_in_blocks:
            codes, scale, *zeros = self.tensors
            numbers = scale, zeros[0] if zeros else None, self.factor, bias
            return block_product.code_product(x, self.form, codes, *numbers, ends, rows)
        blocks, scale, _, start = self.tensors
        if self.onednn_blocks is not None:
            blocks = self.onednn_blocks
        return block_product.int8_product(x, self.input_scale, blocks, start, scale, bias, ends, rows)

    @staticmethod
    def stack(experts: Sequence[CpuProduct]) -> CpuProduct:
        """Return the products of experts as one for `multiply`; their own tensors become views of the stacked ones.

        All products have blocks, the same sizes and the same format.
        """
        stacked = copy.copy(experts[0])
        stacked.tensors = [torch.stack(tensors) for tensors in zip(*(e.tensors for e in experts), strict=True)]
        for index, expert in enumerate(experts):
            expert.tensors = [tensor[index] for tensor in stacked.tensors]
        if stacked.factor is not None:
            stacked.factor = torch.stack([expert.factor for expert in experts if expert.factor is not None])
        return stacked

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._takes_numba(x):
            if bias is not None:
                bias = bias.float()
            return self.multiply(x, bias)
        if self.is_in_blocks or (self.kind == "int4" and len(x) >= products.MANY_ROWS):
            return _with_bias(self._by_tiles(x), bias, x.dtype)
        if self.kind == "int4":
            return _with_bias(self._int4(x), bias, x.dtype)
        if not self.rounds_input:
            return products.multiply(x, self.tensors[0], bias)
        if self.kind == "unpacked" and self.group[1]:
            rounded = definition.rounded_groups(x, self.form, FP8_BLOCK, compute=torch.float32)
            return products.multiply(rounded.to(x.dtype), self.tensors[0], bias)
        return self._rounded(x, bias)

    def _takes_numba(self, x: torch.Tensor) -> bool:
        """Return whether numba kernels multiply these rows by blocks, which is then faster."""
        if not (self.has_blocks or self.onednn_blocks is not None):
            return False
        most_rows = products.most_code_rows(self.kind, by_onednn=self.by_onednn)
        if self.most_rows is not None and not backend().is_invariant:
            most_rows = self.most_rows
        if len(x) > most_rows:
            return False
        return x.stride(1) == 1 and takes_numba(x) and self.form in products.code_kernels()

    def measure(self, dtype: torch.dtype, limits: dict[Hashable, float]) -> None:
        """Measure up to how many rows numba kernels are faster than the other product, and use the result.

        dtype: dtype of activations.
        limits: results for products that differ only in their weights; a new result is added.
        """
        if not (self.is_in_blocks or self.onednn_blocks is not None):
            return
        key = self.kind, self.form, self.rows, self.columns, self.group, dtype
        if key not in limits:
            limits[key] = products.faster_rows(
                partial(self._timed, math.inf), partial(self._timed, 0), self.columns, dtype
            )
        self.most_rows = limits[key]

    def _timed(self, most_rows: float, x: torch.Tensor) -> torch.Tensor:
        self.most_rows = most_rows
        return self._product(x, None)

    def _rounded(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply by the codes, which are exact in 16 bits, and then by their scale."""
        is_int8 = self.by_onednn
        by_numba = x.stride(1) == 1 and (is_int8 or self.form == "e4m3") and takes_numba(x, weights=[bias])
        if by_numba:
            from .product import round_rows, scale_rows

            codes, scales = round_rows(x, self.form, self.input_scale)
        else:
            codes, scales = definition.round_rows(x, self.form, self.input_scale, compute=torch.float32)
            if is_int8:
                codes = codes.add_(ZERO).to(torch.uint8)
            else:
                codes = codes.to(x.dtype)
        if is_int8:
            product = self._int8(codes)
        elif self.kind == "int8":
            product = self._by_tiles(codes)
        else:
            product = products.multiply(codes, self.tensors[0])
        if by_numba:
            return scale_rows(product, scales, bias, x.dtype)
        return _with_bias(product.float().mul_(scales), bias, x.dtype)

    def _int8(self, codes: torch.Tensor) -> torch.Tensor:
        packed, scale, zeros, _ = self.tensors
        return products.multiply_bytes(products.padded_rows(codes), packed, scale, zeros)[: len(codes)]

    def _int4(self, x: torch.Tensor) -> torch.Tensor:
        # In float32, ATen's product takes 60 times as long as in bfloat16.
        packed, scales = self.tensors
        product: torch.Tensor = _multiply_int4(x.bfloat16().contiguous(), packed, self.group[1], scales)
        return product.to(x.dtype)

    def _by_tiles(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack a tile of weights at a time and multiply plain ones."""
        is_int8 = self.kind == "int8"
        wide = x.float()
        if products.this_cpu().multiplies_bf16 and not is_int8:
            wide = x.bfloat16()
        out = torch.empty(len(x), self.rows, dtype=torch.float32 if is_int8 else x.dtype)
        step = max(_TILE // self.columns // 64, 1) * 64
        for start in range(0, self.rows, step):
            rows = slice(start, min(start + step, self.rows))
            out[:, rows] = products.multiply(wide, self._unpack(rows, wide.dtype))
        if is_int8:
            out *= self.tensors[1]
        return out

    def _unpack(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return some rows of the weights; int8 rows without their scale."""
        packed, scale, *table_scale = self.tensors
        if self.kind == "int8":
            return orders.int8_numbers(packed, rows, self.rows, self.columns).to(dtype)
        if self.kind == "int4":
            return orders.int4_numbers(packed[rows], scale[:, rows], self.columns).to(dtype)
        from .unpack import unpack_rows

        return unpack_rows(self.form, packed, scale, table_scale[0] if table_scale else None, self.factor, rows, dtype)


def _with_bias(out: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return out + bias in `dtype`; `out` changes."""
    if bias is not None:
        out += bias
    return out.to(dtype)
