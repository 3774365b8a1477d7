"""Convert quantised checkpoints to `QuantizedWeight`: codes are unpacked once and repacked.

Published e4m3 and int8 weights need no converter: `QuantizedWeight(weight, scale, in_features)`. `scale` is
`weight_scale_inv`, `weight_scale` or one scale for all weights. Scales for each row are flattened.
"""

from __future__ import annotations

import torch

from ..core.checks import FLOAT_DTYPES, check_dtype, check_shape, check_tensor
from ..core.errors import InvalidInputError, UnsupportedError
from .packing import E8M0, MXFP4_GROUP, NVFP4_GROUP, pack_codes, unpack_pairs
from .weight import QuantizedWeight

# The column, of eight, that each nibble of an AWQ word holds, from the lowest nibble on (Lin et al., 2024).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    in_features: int,
    *,
    num_bits: int = 4,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Convert compressed-tensors' "pack-quantized" weights of 4 or 8 bits.

        weight[n, k] = (code(n, k) - zero(n, g)) * weight_scale[n, g]
        code(n, k) = weight_packed[n, k // p] >> (b * (k % p)) & (2^b - 1)
        zero(n, g) = weight_zero_point[n // p, g] >> (b * (n % p)) & (2^b - 1), or 2^(b - 1) without zero points

    with b = num_bits, p = 32 / b and g = weight_g_idx[k], or k // group_size without weight_g_idx.

    Args:
        weight_packed: int32 [out_features, ceil(in_features / p)].
        weight_scale: float32, float16 or bfloat16 [out_features, groups].
        in_features: the second number of `weight_shape`.
        num_bits: 4 or 8.
        weight_zero_point: int32 [ceil(out_features / p), groups], or None.
        weight_g_idx: int32 [in_features], the group of each column, or None.

    Raises:
        InvalidInputError: a shape or dtype does not fit.
        UnsupportedError: num_bits is another number, or `QuantizedWeight` does not take groups of this size.
    """
    per_word = _codes_a_word(num_bits)
    device = weight_packed.device
    check_tensor("weight_packed", weight_packed, ("out_features", -(-in_features // per_word)), (torch.int32,))
    rows = len(weight_packed)
    check_tensor("weight_scale", weight_scale, (rows, "groups"), FLOAT_DTYPES, device)
    codes = _unpack(weight_packed, num_bits)[:, :in_features]
    zeros = None
    if weight_zero_point is not None:
        expected = (-(-rows // per_word), weight_scale.shape[1])
        check_tensor("weight_zero_point", weight_zero_point, expected, (torch.int32,), device)
        zeros = _unpack(weight_zero_point.T, num_bits).T[:rows]
    return _from_codes(codes, weight_scale, zeros, weight_g_idx, num_bits)


def from_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    g_idx: torch.Tensor | None = None,
    *,
    num_bits: int = 4,
    format_version: int = 1,
) -> QuantizedWeight:
    """Convert GPTQ weights (Frantar et al., 2023) of 4 or 8 bits.

        weight[n, k] = (code(n, k) - zero(n, g)) * scales[g, n]
        code(n, k) = qweight[k // p, n] >> (b * (k % p)) & (2^b - 1)
        zero(n, g) = qzeros[g, n // p] >> (b * (n % p)) & (2^b - 1), or 2^(b - 1) without qzeros

    with b = num_bits, p = 32 / b and g = g_idx[k], or k // group_size without g_idx. Version 1 of the format stores
    each zero point minus 1. Whole words are subtracted, as in GPTQModel, so a zero point of 0 borrows from its
    neighbour.

    Args:
        qweight: int32 [in_features / p, out_features].
        scales: float32, float16 or bfloat16 [groups, out_features].
        qzeros: int32 [groups, out_features / p]; None for symmetric quantisation.
        g_idx: int32 [in_features] or None. If groups are not in order (desc_act), columns are sorted by group.
        num_bits: 4 or 8.
        format_version: 1 or 2.

    Raises:
        InvalidInputError: a shape or dtype does not fit, or the version is another number.
        UnsupportedError: num_bits is another number, or `QuantizedWeight` does not take groups of this size.
    """
    per_word = _codes_a_word(num_bits)
    if format_version not in (1, 2):
        raise InvalidInputError(f"format_version: {format_version}, expected 1 or 2")
    check_tensor("qweight", qweight, ("packed_rows", "out_features"), (torch.int32,))
    rows = qweight.shape[1]
    check_tensor("scales", scales, ("groups", rows), FLOAT_DTYPES, qweight.device)
    zeros = None
    if qzeros is not None:
        expected = (scales.shape[0], -(-rows // per_word))
        check_tensor("qzeros", qzeros, expected, (torch.int32,), qweight.device)
        ones = 0x11111111 if num_bits == 4 else 0x01010101
        zeros = _unpack(qzeros + (2 - format_version) * ones, num_bits)[:, :rows].T
    return _from_codes(_unpack(qweight.T, num_bits), scales.T, zeros, g_idx, num_bits)


def from_awq(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> QuantizedWeight:
    """Convert AWQ weights in the "gemm" layout, 4 bits.

        weight[n, k] = (code(qweight[k], n) - code(qzeros[g], n)) * scales[g, n], with g = k // group_size
        code(words, n) = words[n // 8] >> (4 * place(n % 8)) & 15

    Places 0 to 7 hold columns 0, 2, 4, 6, 1, 3, 5, 7.

    Args:
        qweight: int32 [in_features, out_features / 8].
        scales: float32, float16 or bfloat16 [groups, out_features].
        qzeros: int32 [groups, out_features / 8].

    Raises:
        InvalidInputError: a shape or dtype does not fit.
        UnsupportedError: `QuantizedWeight` does not take groups of this size.
    """
    check_tensor("qweight", qweight, ("in_features", "out_features / 8"), (torch.int32,))
    words = qweight.shape[1]
    check_tensor("scales", scales, ("groups", 8 * words), FLOAT_DTYPES, qweight.device)
    check_tensor("qzeros", qzeros, (scales.shape[0], words), (torch.int32,), qweight.device)
    places = [_AWQ_ORDER.index(column) for column in range(8)]
    codes, zeros = (_unpack(words, 4).unflatten(-1, (-1, 8))[..., places].flatten(-2) for words in (qweight, qzeros))
    return _from_codes(codes.T, scales.T, zeros.T, None, 4)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, *, shifts: bool = True) -> QuantizedWeight:
    """Convert MXFP4 weights of gpt-oss or compressed-tensors.

        weight[n, k] = E2M1(code(n, k)) * 2^(scales[n, k // 32] - 127)
        code(n, k) = bytes[n, k // 2] >> (4 * (k % 2)) & 15, with bytes the blocks of a row one after the other

    Args:
        blocks: uint8 [out_features, in_features / 32, 16] (`*_blocks`) or [out_features, in_features / 2]
            (`weight_packed`).
        scales: uint8 or float8_e8m0fnu [out_features, in_features / 32].
        shifts: whether scales are divided by the largest, which `quantized_linear` then multiplies sums by. False
            keeps them, as `fused_moe` takes them.

    Raises:
        InvalidInputError: a shape or dtype does not fit, or a scale is 255, which is NaN.
    """
    check_dtype("scales", scales, *E8M0)
    codes, columns = _e2m1_codes("blocks", blocks)
    check_tensor("scales", scales, (len(codes), columns // MXFP4_GROUP), E8M0, codes.device)
    exponents = scales.view(torch.uint8).int()
    largest = exponents.max()
    if largest == 255:
        raise InvalidInputError("scales: 255, which is NaN, expected 254 at most")
    if not shifts:
        return QuantizedWeight(pack_codes(codes), _columns_together(scales.view(torch.uint8)), columns)
    # Move powers of two from scales to the tensor scale, so that products of codes and scales stay in the range of
    # float16. Scales 2^127 times smaller than the largest are rounded up.
    shifted = (exponents - largest + 127).clamp(min=0).to(torch.uint8)
    tensor_scale = torch.exp2(largest.float() - 127)
    return QuantizedWeight(pack_codes(codes), _columns_together(shifted), columns, tensor_scale=tensor_scale)


def from_nvfp4(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    weight_global_scale: torch.Tensor | None = None,
    weight_scale_2: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Convert NVFP4 weights of ModelOpt or compressed-tensors.

        weight[n, k] = E2M1(code(n, k)) * weight_scale[n, k // 16] * s, with code(n, k) as in `from_mxfp4`

    s is weight_scale_2 (ModelOpt) or 1 / weight_global_scale (compressed-tensors).

    Args:
        weight: uint8 [out_features, in_features / 2] (`weight` or `weight_packed`).
        weight_scale: float8_e4m3fn [out_features, in_features / 16], row by row (not swizzled).
        weight_global_scale, weight_scale_2: one float32 value; exactly one of the two is given.

    Raises:
        InvalidInputError: a shape or dtype does not fit, or not exactly one of the two scales is given.
    """
    codes, columns = _e2m1_codes("weight", weight)
    expected = (len(codes), columns // NVFP4_GROUP)
    check_tensor("weight_scale", weight_scale, expected, (torch.float8_e4m3fn,), codes.device)
    global_scales = {"weight_global_scale": weight_global_scale, "weight_scale_2": weight_scale_2}
    scales = [(name, scale) for name, scale in global_scales.items() if scale is not None]
    if len(scales) != 1:
        raise InvalidInputError("weight_global_scale, weight_scale_2: expected one of them")
    ((name, scale),) = scales
    check_dtype(name, scale, torch.float32)
    if scale.numel() != 1:
        raise InvalidInputError(f"{name}: shape {list(scale.shape)}, expected one value")
    scale = scale.reshape(())
    if name == "weight_global_scale":
        scale = scale.reciprocal()
    return QuantizedWeight(pack_codes(codes), _columns_together(weight_scale), columns, tensor_scale=scale)


def _codes_a_word(num_bits: int) -> int:
    if num_bits not in (4, 8):
        raise UnsupportedError(f"num_bits: {num_bits}, expected 4 or 8")
    return 32 // num_bits


def _unpack(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return int32 codes [rows, columns] from int32 words that hold a row's columns in order, low bits first."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 2**num_bits - 1).flatten(-2)


def _e2m1_codes(name: str, packed: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return uint8 codes [rows, columns] from bytes with two codes each, low bits first, and the number of columns."""
    check_dtype(name, packed, torch.uint8)
    if packed.dim() == 3:
        check_shape(name, packed, ("out_features", "groups", MXFP4_GROUP // 2))
        packed = packed.flatten(1)
    check_shape(name, packed, ("out_features", "in_features / 2"))
    codes = unpack_pairs(packed)
    return codes, codes.shape[1]


def _columns_together(scale: torch.Tensor) -> torch.Tensor:
    """Return [rows] or [rows, groups] with the rows of a group side by side in memory, as a step reads them."""
    if scale.dim() == 2:
        return scale.T.contiguous().T
    return scale.contiguous()


def _from_codes(
    codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, g_idx: torch.Tensor | None, num_bits: int
) -> QuantizedWeight:
    """Return a weight from codes [rows, columns], scale and zeros [rows, groups], and the group of each column."""
    columns, num_groups = codes.shape[1], scale.shape[1]
    order = None
    if g_idx is not None:
        check_tensor("g_idx", g_idx, (columns,), (torch.int32,), codes.device)
        in_order = torch.arange(columns, device=codes.device) // max(columns // max(num_groups, 1), 1)
        if not torch.equal(g_idx, in_order.int()):
            order = g_idx.argsort(stable=True)
            if not torch.equal(g_idx[order], in_order.int()):
                raise InvalidInputError(
                    f"g_idx: expected each of {num_groups} groups for {columns} / {num_groups} columns"
                )
            codes, order = codes[:, order], order.int()
    if num_groups == 1:
        scale = scale[:, 0]
        if zeros is not None:
            zeros = zeros[:, 0]
    if num_bits == 4:
        values, first = pack_codes(codes.to(torch.uint8).contiguous()), 0
    else:
        values, first = (codes - 128).to(torch.int8).contiguous(), 128
    if zeros is not None:
        zeros = _columns_together((zeros - first).to(torch.int8))
    return QuantizedWeight(values, _columns_together(scale), columns, zeros, input_order=order)
