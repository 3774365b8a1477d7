"""First-order errors of products with weights. docs/bounds.md derives them."""

from __future__ import annotations

import torch

from paged.bench.bounds.first_order import ELEMENTARY, Defined, U, gamma, independent, rounding, unit
from paged.bench.problems.arguments import Arguments, Tensors
from paged.kernels.quantization import definition as quantization
from paged.kernels.quantization.packing import FP8_BLOCK, format_of, group_of
from paged.kernels.quantization.weight import QuantizedWeight


def product_error(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the float32 error of x @ w^T."""
    return (gamma(x.shape[-1]) + ELEMENTARY) * (x.abs() @ w.abs().T)


def spread_error(errors: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the error of x @ w^T for independent errors of x."""
    return independent(errors @ w.abs().T, errors.square() @ w.square().T)


def lora(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, weights, batch = arguments["x"].double(), arguments["weights"], arguments["batch"]
    error = rounding(want["out"], arguments["out"].dtype) + ELEMENTARY * want["out"].abs()
    u = unit(weights.b.dtype)
    for block, adapter in enumerate(batch.slots.tolist()):
        rows = batch.rows[block]
        rows = rows[rows >= 0].long()
        end = 0
        for part, size in enumerate(weights.part_sizes):
            start, end = end, end + size
            rank = int(weights.ranks[adapter, part])
            if adapter < 0 or rank == 0:
                continue
            a = weights.a[adapter, part, :rank].double()  # [rank, K]
            b = weights.b[adapter, :rank, start:end].double().T  # [size, rank]
            shrunk = x[rows] @ a.T  # [rows, rank]
            inner = product_error(x[rows], a)
            change = spread_error(inner + u * shrunk.abs(), b) + product_error(shrunk, b)
            error[rows, start:end] += weights.scales[adapter, part].double().abs() * change
    return {"out": error}


def quantized_linear(card: Defined, arguments: Arguments, want: Tensors) -> Tensors:
    x, weight = arguments["x"], arguments["weight"]
    w, rows = quantization.dequantize(weight), quantization.input_of(x, weight)
    error = rounding(want["out"], x.dtype) + product_error(rows, w)
    if arguments.get("bias") is not None:
        error += U * arguments["bias"].double().abs()
    if is_short_int4(weight.values, weight.scale, weight.in_features):
        error += 2 * unit(x.dtype) * independent(rows.abs() @ w.abs().T, rows.square() @ w.square().T)
    if weight.quantizes_input:
        error += _input_steps(x, weight) @ w.abs().T
    return {"out": error}


def is_short_int4(values: torch.Tensor, scale: torch.Tensor, num_columns: int) -> bool:
    """Return whether scale, and code times scale, are rounded to the dtype of rows. E2M1 codes times scales are exact.

    Codes in pairs are int4 whose scales multiply sums.
    """
    if values.dtype != torch.int32 or format_of(values, scale) != "int4":
        return False
    _, width = group_of("int4", scale.shape, num_columns)
    return width > 0 and width % 128 != 0


def _input_steps(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Return how far a rounded activation moves if float32 takes the other side of a tie."""
    numbers = x.double()
    if weight.input_order is not None:
        numbers = numbers.index_select(1, weight.input_order)
    group = numbers.shape[1]
    if weight.scale.dim() == 2:
        group = FP8_BLOCK
    return step_error(numbers, ELEMENTARY * numbers.abs(), weight.format, group, weight.input_scale)


def step_error(
    x: torch.Tensor, error: torch.Tensor, form: str, group: int, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return how far rounded groups of x move if x moves by `error`, with the scale of their largest number."""
    padding = (0, -x.shape[-1] % group)
    groups, errors = (torch.nn.functional.pad(t, padding).unflatten(-1, (-1, group)) for t in (x, error))
    codes, scales = quantization.round_rows(groups, form, scale)
    moved = ELEMENTARY * codes.abs() * scales
    if scale is None:
        largest = groups.abs().amax(-1, keepdim=True)
        is_largest = groups.abs() == largest
        of_largest = (errors * is_largest).amax(-1, keepdim=True)
        # A larger scale moves the sum by its own share, and every other number relative to the codes.
        moved = moved + of_largest / largest.clamp(min=1e-300) * codes.abs() * scales
        errors = torch.where(is_largest, 0.0, errors + of_largest / largest.clamp(min=1e-300) * groups.abs())
    high, _ = quantization.round_rows(groups + errors, form, scales)
    low, _ = quantization.round_rows(groups - errors, form, scales)
    moved = moved + (high - low).abs() * scales
    return moved.flatten(-2)[..., : x.shape[-1]]
