"""Products with packed weights as formulas; see `kernels.layers.definition` for what a definition is."""

from __future__ import annotations

import torch
from torch.nn import functional

from .packing import E2M1, FP8_BLOCK, format_of, group_of, unpack_codes, unpack_pairs
from .weight import QuantizedWeight

# The largest value of each type that activations are rounded to.
_LARGEST = {"int8": 127.0, "e4m3": 448.0}
# The smallest scale, which rows of zeros get: the smallest normal number of float32.
_SMALLEST_SCALE = 2.0**-126
_SAME_SIZE = {torch.float32: torch.int32, torch.float64: torch.int64}


def quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    *,
    bias: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return x @ weight^T + bias, [num_rows, out_features], for `input_of` x and the weights of `dequantize`."""
    out = input_of(x, weight, compute=compute) @ dequantize(weight, compute=compute).T
    if bias is not None:
        out += bias
    return out


def input_of(x: torch.Tensor, weight: QuantizedWeight, *, compute: torch.dtype = torch.float64) -> torch.Tensor:
    """Return x [num_rows, in_features] as the weights multiply it: in the order of their columns, and rounded.

    Activations are rounded if the weight quantises its input, each row, or with blocks of weights each 128 values.
    """
    x = x.to(compute)
    if weight.input_order is not None:
        x = x.index_select(1, weight.input_order)
    if not weight.quantizes_input:
        return x
    group = x.shape[1]
    if weight.scale.dim() == 2:
        group = FP8_BLOCK
    return rounded_groups(x, weight.format, group, weight.input_scale, compute=compute)


def dequantize(weight: QuantizedWeight, *, compute: torch.dtype = torch.float64) -> torch.Tensor:
    """Return (code - zero point) * scale * tensor scale, [out_features, in_features]."""
    scales = weight.scale, weight.zero_point, weight.tensor_scale
    return dequantize_codes(weight.values, *scales, num_columns=weight.in_features, compute=compute)


def dequantize_codes(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
    *,
    num_columns: int,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return (code - zero point) * scale * tensor scale, [rows, num_columns].

    Arguments are the fields of `QuantizedWeight`, or one expert's; 4-bit codes of an expert may lie in pairs a byte.
    """
    form = format_of(values, scale)
    height, width = group_of(form, scale.shape, num_columns)
    width = width or num_columns
    if values.dtype == torch.int32:
        codes = unpack_codes(values, num_columns)
    elif form == "int4":
        codes = unpack_pairs(values)
    elif form == "e4m3":
        codes = values.view(torch.uint8)
    else:
        codes = values
    codes = functional.pad(codes, (0, -num_columns % width))
    groups = _numbers(codes, form, compute).unflatten(1, (-1, width))  # [rows, groups, width]

    def of_groups(numbers: torch.Tensor) -> torch.Tensor:
        """Return the number of each row's groups, [rows, groups, 1]."""
        if numbers.dim() == 0:
            return numbers
        return numbers.reshape(len(numbers), -1).repeat_interleave(height, 0)[: len(groups), :, None]

    if zero_point is not None:
        groups -= of_groups(zero_point.to(compute))
    elif form == "int4":
        groups -= 8
    if form == "mxfp4":
        groups *= of_groups(torch.exp2(scale.view(torch.uint8).to(compute) - 127))
    else:
        groups *= of_groups(scale.to(compute))
    if tensor_scale is not None:
        groups *= tensor_scale
    return groups.flatten(1)[:, :num_columns]


def _numbers(codes: torch.Tensor, form: str, compute: torch.dtype) -> torch.Tensor:
    """Return the number that each code means, in new memory."""
    if form in ("int8", "int4"):
        return codes.to(compute)
    if form == "e4m3":
        meant = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    else:
        meant = torch.tensor([*E2M1, *(-value for value in E2M1)])
    # A look-up by index_select takes a third of the time of a conversion from e4m3, see limits.md.
    return meant.to(codes.device, compute).index_select(0, codes.int().flatten()).view(codes.shape)


def rounded_groups(
    x: torch.Tensor,
    form: str,
    group: int,
    scale: torch.Tensor | None = None,
    *,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return x [..., columns] with every `group` columns rounded by `round_rows`. The last group may be shorter."""
    num_columns = x.shape[-1]
    groups = functional.pad(x.to(compute), (0, -num_columns % group)).unflatten(-1, (-1, group))
    codes, scale = round_rows(groups, form, scale, compute=compute)  # [..., groups, group], [..., groups, 1]
    return (codes * scale).flatten(-2)[..., :num_columns]


def round_rows(
    x: torch.Tensor, form: str, scale: torch.Tensor | None = None, *, compute: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x / scale to "int8" or "e4m3", ties to even; return the numbers of the codes, and scale [..., 1].

    Without a given scale, the largest magnitude of each row becomes 127 or 448. Numbers beyond the range become the
    nearest of the range. A row with a value that is not finite has scale NaN.
    """
    x = x.to(compute)
    largest = x.abs().amax(-1, keepdim=True)
    if scale is None:
        scale = (largest / _LARGEST[form]).clamp_(min=_SMALLEST_SCALE)
    numbers = x / scale
    if form == "int8":
        numbers = numbers.round_().clamp_(-128, 127)
    else:
        numbers = _nearest_e4m3(numbers.clamp_(-_LARGEST[form], _LARGEST[form]))
    return numbers, scale + largest * 0


def _nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest e4m3 numbers, ties to even: multiples of 1/8 of the power of two below, at least 2^-9.

    PyTorch's conversion from float64 rounds twice, by way of float32.
    """
    integer = _SAME_SIZE[x.dtype]
    exponent_bits = torch.tensor(torch.inf, dtype=x.dtype, device=x.device).view(integer)
    power = (x.view(integer) & exponent_bits).view(x.dtype)  # 2^floor(log2 |x|)
    step = power.clamp_(min=2.0**-6).mul_(1 / 8)
    return (x / step).round_().mul_(step)
