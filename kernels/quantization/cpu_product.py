"""Products of rows with packed weights on a CPU: the choice of the product, and weights in its order."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..common.device import LOOP_DTYPES, backend, has_numba, load_numba, loops_of
from ..common.packed.packing import E2M1, E2M1_GROUPS, FP8_BLOCK, unpack_codes
from ..common.packed.torch_ops import product as torch_op
from ..common.packed.torch_ops.product import rounded_groups, unpack
from ..common.torch_ops.linear import MULTIPLIES_BF16, linear, pack, packed_address, padded_rows
from .weight import QuantizedWeight

# Columns that share a scale in ATen's product of int4, and the multiple of its rows.
_INT4_GROUPS, _INT4_ROWS = (256, 128, 64, 32), 16
# Rows that ATen keeps together, by the instructions it uses; it has no such order for others.
_INT4_BLOCKS = {"AVX512": 64, "AVX2": 32}
# Rows from which unpacking a tile at a time and a dense product take less time: of 8192 x 1024 on two cores of a Xeon
# 158 us a row in place of 89, and about 20 ms for the unpacking; on an EPYC that multiplies bfloat16, 99 and 43.
MANY_ROWS = 512
# Activations are multiplied as unsigned bytes, which is what VNNI takes: signed ones take oneDNN 200 ms in place of 0.5
# for 8192 x 1024.
_ZERO = 128
# The packing is made for this number of rows: 32 take 0.41 ms in place of 0.47 with 1, and 1 row as long.
_PREPACKED_ROWS = 32
# Outputs of a block that numba kernels multiply, and the multiple of columns of int8 ones. Their int8 product with 8192
# x 1024 takes 0.66, 0.85 and 1.15 of oneDNN's time for 4, 32 and 128 rows. AMX, which only oneDNN uses, multiplies 16
# rows at once.
_BLOCK, _BLOCK_COLUMNS = 64, 64
_MOST_INT8_ROWS, _MOST_INT8_ROWS_BESIDE_AMX = 64, 8
# What numba kernels subtract from the bytes of each format's codes.
_CODE_OFFSETS = {"int4": 8, "mxfp4": 12, "nvfp4": 12}
_E2M1_VALUES = (*E2M1, *(-value for value in E2M1))
_HAS_INT8 = hasattr(torch.ops.onednn, "qlinear_pointwise")
_multiply_int8: Any = torch.ops.onednn.qlinear_pointwise.default if _HAS_INT8 else None
_multiply_int4: Any = torch.ops.aten._weight_int4pack_mm_for_cpu.default


class Cpu(NamedTuple):
    """What the choice depends on.

    capability: the instructions that ATen uses, as PyTorch names them. multiplies_int8: whether the CPU has int8
    products (VNNI or AMX), and oneDNN's sums of them are exact. multiplies_bf16: whether it has products of bfloat16.
    has_amx: whether it has AMX for int8. multiplies_codes: whether numba kernels multiply int8 and 4-bit codes (AVX2).
    """

    capability: str
    multiplies_int8: bool
    multiplies_bf16: bool
    has_amx: bool = False
    multiplies_codes: bool = False


@cache
def this_cpu() -> Cpu:
    """Return what PyTorch and oneDNN use of this CPU.

    oneDNN may be told to use older instructions (ONEDNN_MAX_CPU_ISA), whose sums of two products saturate at 16 bits:
    so one product of the largest codes is compared.
    """
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    names = {name for name, value in capabilities.items() if value is True}
    has_int8 = not names.isdisjoint(("avx512_vnni", "avx_vnni", "amx_int8")) and _HAS_INT8 and _is_int8_exact()
    has_bf16 = not names.isdisjoint(("avx512_bf16", "amx_bf16")) and MULTIPLIES_BF16
    capability = torch.backends.cpu.get_cpu_capability()
    return Cpu(capability, has_int8, has_bf16, "amx_int8" in names, has_numba() and "int4" in _block_kernels())


def _block_kernels() -> Mapping[str, object]:
    from ..common.packed.numba_ops.block_product import KERNELS

    return KERNELS


def _is_int8_exact() -> bool:
    codes = torch.tensor([127, -128], dtype=torch.int8)[:, None].expand(2, 64).contiguous()
    ones = torch.ones(2)
    packed = torch.ops.onednn.qlinear_prepack(codes, [2, 64])
    zeros = torch.zeros(2, dtype=torch.int32)
    out = _product_of_bytes((codes.int() + _ZERO).to(torch.uint8), packed, ones, zeros)
    return bool(torch.equal(out, codes.float() @ codes.float().T))


def _product_of_bytes(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return (x - 128) @ (packed * scale)^T in float32, [num_rows, out_features]."""
    numbers = x, 1.0, _ZERO, packed, scale, zeros, None, 1.0, 0
    out: torch.Tensor = _multiply_int8(*numbers, torch.float32, "none", [], "")
    return out


def choose_product(form: str, group: tuple[int, int], rows: int, columns: int, rounds_input: bool, cpu: Cpu) -> str:
    """Return the product for weights [rows, columns] on a CPU: "int8", "int4", "blocks" or "unpacked".

    "int8" keeps int8 weights, if activations are rounded to int8; oneDNN or numba kernels multiply them. "blocks" are
    4-bit weights of any format for numba kernels, "int4" is ATen's product. "unpacked" weights are in the model's
    dtype: ATen's int8 product with plain activations takes 0.6 of the time of bfloat16 for 1 row, 1.4 for 32.
    Microseconds of 8192 x 1024 on two cores of a Xeon with AVX-512 and VNNI, without AMX, for 1, 4, 32 and 256 rows:

    | float32 | 1,477 | 1,600 | 3,323 | 22,839 |
    | bfloat16 | 1,032 | 2,335 | 9,969 | 72,244 |
    | int8 (oneDNN) | 523 | 508 | 928 | 4,573 |
    | int4, groups of 128 (ATen) | 256 | 559 | 4,346 | 40,371 |
    """
    if form == "int8" and rounds_input:
        has_blocks = cpu.multiplies_codes and rows % _BLOCK == 0
        return "int8" if cpu.multiplies_int8 or has_blocks else "unpacked"
    if _fits_blocks(form, rows, columns, cpu):
        return "blocks"
    has_int4 = form == "int4" and cpu.capability in _INT4_BLOCKS and rows % _INT4_ROWS == 0
    return "int4" if has_int4 and _int4_group(group, columns) else "unpacked"


def _fits_blocks(form: str, rows: int, columns: int, cpu: Cpu) -> bool:
    """Return whether numba kernels take 4-bit weights: of full blocks, and of full groups of columns."""
    if not cpu.multiplies_codes or form not in _CODE_OFFSETS:
        return False
    return rows % _BLOCK == 0 and columns % E2M1_GROUPS.get(form, 32) == 0


def _product_of(weight: QuantizedWeight, cpu: Cpu) -> str:
    sizes = weight.out_features, weight.in_features
    return choose_product(weight.format, weight.group, *sizes, weight.quantizes_input, cpu)


def is_plain(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether the product on this CPU is that of plain weights and activations. dtype: of activations."""
    if weight.quantizes_input or weight.input_order is not None:
        return False
    return _product_of(weight, _usable(this_cpu(), weight, dtype)) == "unpacked"


def cpu_of_experts(out_features: int, dtype: torch.dtype) -> Cpu:
    """Return this CPU without oneDNN's products of int8 if numba kernels multiply all experts at once.

    AMX, which only oneDNN uses, is faster for many rows.
    """
    cpu = this_cpu()
    has_loops = cpu.multiplies_codes and not cpu.has_amx and dtype in LOOP_DTYPES and load_numba()
    if has_loops and out_features % _BLOCK == 0:
        cpu = cpu._replace(multiplies_int8=False)
    return cpu


def _usable(cpu: Cpu, weight: QuantizedWeight, dtype: torch.dtype) -> Cpu:
    """Return the CPU without the numba kernels of codes, if they are not to be used."""
    is_rounded = weight.format in E2M1_GROUPS and dtype != torch.bfloat16
    if is_rounded or not load_numba():
        cpu = cpu._replace(multiplies_codes=False)
    return cpu


def unpacked(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [out_features, in_features], rounded once."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype)
    tiles = unpack(
        weight.values,
        weight.scale,
        weight.format,
        weight.group,
        weight.in_features,
        zero_point=weight.zero_point,
        tensor_scale=weight.tensor_scale,
    )
    for rows, w in tiles:
        out[rows] = w
    return out


class CpuProduct:
    """x @ weight^T + bias, with a copy of the weights in the order of the product chosen for this CPU.

    `tensors` is what it holds. kind: the result of `choose_product`. is_in_blocks: whether 4-bit codes are in the order
    of numba kernels, which round activations to int8. by_onednn: whether oneDNN multiplies int8 codes. onednn_blocks:
    oneDNN's int8 codes as numba kernels read them; None if they are in another order. factor: of 4-bit weights in
    blocks, or None.
    """

    by_onednn = False
    onednn_blocks: torch.Tensor | None = None
    factor: torch.Tensor | None = None

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype, cpu: Cpu | None = None) -> None:
        """dtype: that of activations and results."""
        cpu = _usable(cpu or this_cpu(), weight, dtype)
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
            start = weight.values.sum(1, dtype=torch.int32).mul_(-_ZERO)
            self.by_onednn = cpu.multiplies_int8
            if self.by_onednn:
                packed = torch.ops.onednn.qlinear_prepack(weight.values, [_PREPACKED_ROWS, weight.in_features])
                self.onednn_blocks = _blocks_of_onednn(packed, weight.values)
            else:
                packed = _int8_blocks(weight.values)
            self.tensors = packed, scale, torch.zeros_like(start), start
        elif self.is_in_blocks:
            from ..common.packed.numba_ops.block_product import code_blocks

            codes = code_blocks(unpack_codes(weight.values, weight.in_features))
            self.tensors = codes, *_block_scales(weight)
            self.factor = weight.tensor_scale
        elif self.kind == "int4":
            self.group = 1, _int4_group(weight.group, weight.in_features)
            codes = unpack_codes(weight.values, weight.in_features).int()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            self.tensors = packed, _scales_and_zeros(weight, self.group[1])
        else:
            self.tensors = (pack(unpacked(weight, dtype)),)

    @property
    def has_blocks(self) -> bool:
        """Whether numba kernels multiply by `tensors`, for few rows or always."""
        return self.is_in_blocks or (self.kind == "int8" and not self.by_onednn)

    @property
    def has_invariant_rows(self) -> bool:
        """Whether no row's bits depend on the rows beside it, in an invariant forward (see `Backend`).

        That holds for numba kernels, whatever the number of rows, and for `linear` with codes as numbers.
        """
        if self.kind == "unpacked":
            return True
        has_blocks = self.has_blocks or self.onednn_blocks is not None
        return has_blocks and self.form in _block_kernels()

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
        from ..common.packed.numba_ops import block_product

        if self.is_in_blocks:
            codes, scale, *zeros = self.tensors
            numbers = scale, zeros[0] if zeros else None, self.factor, bias
            return block_product.code_product(x, self.form, codes, *numbers, ends, rows)
        blocks, scale, _, start = self.tensors
        if self.onednn_blocks is not None:
            blocks = self.onednn_blocks
        return block_product.int8_product(x, self.input_scale, blocks, start, scale, bias, ends, rows)

    @staticmethod
    def stack(products: Sequence[CpuProduct]) -> CpuProduct:
        """Return products of experts as one for `multiply`; their own tensors become views of the stacked ones.

        All have blocks, the same sizes and the same format.
        """
        stacked = copy.copy(products[0])
        stacked.tensors = [torch.stack(tensors) for tensors in zip(*(p.tensors for p in products), strict=True)]
        for expert, product in enumerate(products):
            product.tensors = [tensor[expert] for tensor in stacked.tensors]
        if stacked.factor is not None:
            stacked.factor = torch.stack([product.factor for product in products if product.factor is not None])
        return stacked

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._takes_loops(x):
            if bias is not None:
                bias = bias.float()
            return self.multiply(x, bias)
        if self.is_in_blocks or (self.kind == "int4" and len(x) >= MANY_ROWS):
            return _with_bias(self._by_tiles(x), bias, x.dtype)
        if self.kind == "int4":
            return _with_bias(self._int4(x), bias, x.dtype)
        if not self.rounds_input:
            return linear(x, self.tensors[0], bias)
        if self.kind == "unpacked" and self.group[1]:
            return linear(rounded_groups(x, FP8_BLOCK, self.form).to(x.dtype), self.tensors[0], bias)
        return self._rounded(x, bias)

    def _takes_loops(self, x: torch.Tensor) -> bool:
        """Return whether numba kernels multiply these rows by blocks, which is then faster."""
        has_amx = this_cpu().has_amx
        if backend().is_invariant:
            is_few = self.has_blocks or self.onednn_blocks is not None
        elif self.is_in_blocks:
            is_few = len(x) < MANY_ROWS or not has_amx
        elif not self.by_onednn:
            is_few = self.has_blocks and len(x) < MANY_ROWS
        else:
            max_rows = _MOST_INT8_ROWS_BESIDE_AMX if has_amx else _MOST_INT8_ROWS
            is_few = self.onednn_blocks is not None and len(x) <= max_rows
        if not is_few or x.stride(1) != 1 or loops_of("common.packed.numba_ops.product", x) is None:
            return False
        return self.form in _block_kernels()

    def _rounded(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Codes are exact in 16 bits; their scale is applied to the product."""
        is_int8 = self.by_onednn
        loops: Any = None
        if x.stride(1) == 1 and (is_int8 or self.form == "e4m3"):
            loops = loops_of("common.packed.numba_ops.product", x, weights=[bias])
        if loops is not None:
            codes, scales = loops.round_rows(x, self.form, self.input_scale)
        else:
            codes, scales = torch_op.round_rows(x, self.form, self.input_scale)
            if is_int8:
                codes = codes.add_(_ZERO).to(torch.uint8)
            else:
                codes = codes.to(x.dtype)
        if is_int8:
            product = self._int8(codes)
        elif self.kind == "int8":
            product = self._by_tiles(codes)
        else:
            product = linear(codes, self.tensors[0])
        if loops is not None:
            scaled: torch.Tensor = loops.scale_rows(product, scales, bias, x.dtype)
            return scaled
        return _with_bias(product.float().mul_(scales), bias, x.dtype)

    def _int8(self, codes: torch.Tensor) -> torch.Tensor:
        packed, scale, zeros, _ = self.tensors
        return _product_of_bytes(padded_rows(codes), packed, scale, zeros)[: len(codes)]

    def _int4(self, x: torch.Tensor) -> torch.Tensor:
        # In one thread 1 row of 2048 x 1024 takes 0.11 ms in bfloat16, 7 in float32 and 13 in float16.
        packed, scales = self.tensors
        product: torch.Tensor = _multiply_int4(x.bfloat16().contiguous(), packed, self.group[1], scales)
        return product.to(x.dtype)

    def _by_tiles(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack a tile of weights at a time and multiply plain ones."""
        is_int8 = self.kind == "int8"
        wide = x.float()
        if this_cpu().multiplies_bf16 and not is_int8:
            wide = x.bfloat16()
        out = torch.empty(len(x), self.rows, dtype=torch.float32 if is_int8 else x.dtype)
        step = max((1 << 20) // self.columns // 64, 1) * 64  # 4 MB in float32, which stay in the cache
        for start in range(0, self.rows, step):
            rows = slice(start, start + step)
            if self.is_in_blocks:
                w = self._block_rows(rows)
            elif is_int8:
                packed = self.tensors[0]
                width = len(packed) // self.rows
                w = _codes_of_int8_blocks(packed[start * width : (start + step) * width], width)[:, : self.columns]
            else:
                packed, scales = self.tensors
                w = _int4_rows(packed[rows], self.columns).float().unflatten(1, (-1, self.group[1]))
                scale, zero = scales[:, rows].float().permute(2, 1, 0).unsqueeze(-1)
                w = w.sub_(8).mul_(scale).add_(zero).flatten(1)
            out[:, rows] = linear(wide, w.to(wide.dtype))
        if is_int8:
            out *= self.tensors[1]
        return out

    def _block_rows(self, rows: slice) -> torch.Tensor:
        """Return weights of full blocks, float32."""
        from ..common.packed.numba_ops.block_product import codes_of_blocks

        packed, *scales = self.tensors
        codes = codes_of_blocks(packed[rows])
        offset = _CODE_OFFSETS[self.form]
        if self.form == "int4":
            w = codes.float() - offset
        else:
            w = 2 * torch.tensor(_E2M1_VALUES)[codes.long()]
        w = w.unflatten(1, (len(scales[0]), -1))
        scale, *zeros = (numbers[:, rows].float().T.unsqueeze(-1) for numbers in scales)
        w *= scale
        for zero in zeros:
            w -= offset * zero
        if self.factor is not None:
            w *= self.factor
        return w.flatten(1)


def _with_bias(out: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return out + bias in `dtype`; out changes."""
    if bias is not None:
        out += bias
    return out.to(dtype)


def _int8_blocks(codes: torch.Tensor) -> torch.Tensor:
    """Return codes in blocks of 64 rows, in each four columns of every row before the next four."""
    padded = functional.pad(codes, (0, -codes.shape[1] % _BLOCK_COLUMNS))
    return padded.view(-1, _BLOCK, padded.shape[1] // 4, 4).transpose(1, 2).flatten()


def _codes_of_int8_blocks(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """Return the codes of blocks of `_int8_blocks`, [rows, width], padding included."""
    return blocks.view(-1, width // 4, _BLOCK, 4).transpose(1, 2).reshape(-1, width)


def _blocks_of_onednn(packed: torch.Tensor, codes: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of oneDNN's packed weights if it begins with `_int8_blocks`; None if it has another order."""
    address = packed_address(packed)
    if len(codes) % _BLOCK or address is None:
        return None
    expected = _int8_blocks(codes)
    if packed.nbytes < expected.nbytes:
        return None
    memory: Any = (ctypes.c_int8 * expected.nbytes).from_address(address)
    memory.packed = packed  # whose memory this is
    weight_bytes = torch.frombuffer(memory, dtype=torch.int8)
    if not torch.equal(weight_bytes, expected):
        return None
    return weight_bytes


def _int4_group(group: tuple[int, int], columns: int) -> int:
    """Return the largest group of the int4 product of which the weight's groups are multiples, 0 for none."""
    width = group[1] or columns
    return next((size for size in _INT4_GROUPS if width % size == 0), 0)


def _spread(numbers: torch.Tensor, rows: int, num_groups: int) -> torch.Tensor:
    """Return the numbers [], [rows] or [rows, groups] of each of `num_groups` groups, float32 [rows, num_groups]."""
    numbers = numbers.float()
    if numbers.dim() == 0:
        numbers = numbers.expand(rows)
    if numbers.dim() == 1:
        numbers = numbers.view(rows, -1)
    return numbers.repeat_interleave(num_groups // numbers.shape[1], 1)


def _scales_and_zeros(weight: QuantizedWeight, size: int) -> torch.Tensor:
    """Return [groups, rows, 2]: a weight is (code - 8) * scale + zero."""
    sizes = weight.out_features, weight.in_features // size
    scale = _spread(weight.scale, *sizes)
    zero = torch.zeros_like(scale)
    if weight.zero_point is not None:
        zero = (8 - _spread(weight.zero_point, *sizes)) * scale
    return torch.stack([scale.T, zero.T], -1).bfloat16().contiguous()


def _block_scales(weight: QuantizedWeight) -> list[torch.Tensor]:
    """Return scales and, if there are zero points, -1/8 of what they add to weights: bfloat16 [groups, rows]."""
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


def _int4_rows(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the codes [rows, columns] of whole blocks of rows in ATen's order for this CPU.

    A block's columns follow each other, each with the first half of its rows in the low bits and the second half in the
    high bits. The rows after the last whole block stand in pairs.
    """
    block = _INT4_BLOCKS[this_cpu().capability]
    num_full = len(packed) // block * block
    octets = packed[:num_full].reshape(-1, columns, block // 2)
    first = torch.cat([octets & 15, octets >> 4], -1).mT.reshape(num_full, columns)
    remainder = packed[num_full:].reshape(columns, -1)
    last = torch.stack([remainder & 15, remainder >> 4], -1).flatten(1).T
    return torch.cat([first, last])
