"""References: operations in float64, slow and obviously right, for tests, benchmarks and self-checks.

Each family has its own in `reference.py`; this file holds what several share. They are Python loops over the formula's
indices and share no code with the Triton kernels or the PyTorch implementations. They take the operation's arguments,
or fewer, change nothing, and return new float64 (or integer) tensors on the CPU.
"""

from __future__ import annotations

import math

import torch

from .errors import InvalidInputError

# The value of each E2M1 code: sign, 2 bits of exponent, 1 of mantissa (Open Compute Project, 2023).
E2M1 = [sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def f64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float64)


# Number of codes without sign and NaN, bits of the mantissa, bias of the exponent. The last code of e4m3fn, which would
# be 480, is NaN; behind 57344 of e5m2 lie infinity and NaN (Micikevicius et al., 2022).
_FLOATS = {torch.float8_e4m3fn: (127, 3, 7), torch.float8_e5m2: (124, 2, 15)}


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the nearest values of an 8-bit float dtype, ties to the even code; NaN stays, larger numbers saturate.

    A code holds a sign, an exponent e and a mantissa m of M bits: 2^(1 - bias) m / 2^M where e = 0, else 2^(e - bias)
    (1 + m / 2^M).
    """
    num_codes, bits, bias = _FLOATS[dtype]
    codes, steps = torch.arange(num_codes), 2**bits
    exponent, mantissa = codes.double() // steps, codes.double() % steps / steps
    values = torch.where(exponent == 0, 2.0 ** (1 - bias) * mantissa, 2.0 ** (exponent - bias) * (1 + mantissa))
    x = f64(x)
    distances = (x.abs().clamp(max=values[-1]).unsqueeze(-1) - values).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    size = torch.where(x.isnan(), 127, (is_nearest * (2 - codes % 2)).argmax(-1))
    return (size + 128 * x.signbit()).to(torch.uint8).view(dtype)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up for "silu", "gelu" and "gelu_tanh".

    "swiglu_oai" is min(gate, 7) sigmoid(1.702 min(gate, 7)) (1 + up), with up clamped to [-7, 7].
    """
    gate, up = f64(gate), f64(up)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
    if activation == "gelu_tanh":
        return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate / (1 + torch.exp(-1.702 * gate)) * (1 + up)
    raise InvalidInputError(f"activation={activation!r}: expected 'silu', 'gelu', 'gelu_tanh' or 'swiglu_oai'")


def codes(words: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the code of each column, nibble i of half h of word r of unit u as in `packed.packing`."""
    columns = torch.arange(num_columns)
    unit, inside = columns // 128, columns % 128
    i, r, half = inside // 32, inside % 32 // 2, inside % 2
    return (words.cpu().long()[:, unit * 16 + r] >> (4 * i + 16 * half)) % 16


def dequantize(
    w: torch.Tensor,
    scale: torch.Tensor | None,
    zeros: torch.Tensor | None = None,
    tensor_scale: torch.Tensor | None = None,
    *,
    num_columns: int = 0,
) -> torch.Tensor:
    """Return the weights [rows, columns] of a layer or of one expert: (code - zero) * scale * tensor_scale.

    Zeros and scales are one for all, one for each row, or one for each group of rows and columns: 128 x 128 for e4m3,
    32 columns for MXFP4, 16 for NVFP4, some columns of a row for others. Bytes hold two 4-bit codes, low bits first;
    int32 words hold codes of num_columns columns as in `packing`. Without zeros a 4-bit code stands for 8 less; beside
    scales that are no plain numbers it is E2M1.
    """
    if scale is None:
        return f64(w)
    is_e8m0 = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    is_e2m1 = w.dtype == torch.int32 and (is_e8m0 or scale.dtype == torch.float8_e4m3fn)
    middle: torch.Tensor | float = 8.0
    if w.dtype == torch.int32:
        code = codes(w, num_columns)
    elif w.dtype == torch.uint8:
        code = torch.stack([w.cpu() % 16, w.cpu() // 16], -1).flatten(1)
    else:
        code, middle = w, 0.0
    values = f64(code)
    if is_e2m1:
        values, middle = torch.tensor(E2M1, dtype=torch.float64)[code], 0.0
    if is_e8m0:
        factors = 2.0 ** (scale.cpu().view(torch.uint8).double() - 127)
    else:
        factors = f64(scale)

    def of_each(factors: torch.Tensor) -> torch.Tensor:
        if factors.dim() < 2:
            return factors.reshape(-1, 1)
        height, width = 1, values.shape[1] // factors.shape[1]
        if w.dtype == torch.float8_e4m3fn:
            height, width = 128, 128
        elif is_e2m1:
            width = 32 if is_e8m0 else 16
        rows, columns = torch.arange(values.shape[0]) // height, torch.arange(values.shape[1]) // width
        return factors[rows][:, columns]

    if zeros is not None:
        middle = of_each(f64(zeros))
    numbers = (values - middle) * of_each(factors)
    if tensor_scale is not None:
        numbers = numbers * f64(tensor_scale)
    return numbers


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, size: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Round every `size` values of a row of x to e4m3 or int8 times a scale, and return the values.

    The scale is given, or makes the largest of them 448 or 127. If one is not finite, they become NaN.
    """
    x = f64(x)
    largest = 127.0 if dtype == torch.int8 else 448.0
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            values = x[row, start : start + size]
            if scale is None:
                factor = float(values.abs().max()) / largest or 1.0
            else:
                factor = float(scale)
            if dtype == torch.int8:
                rounded = (values / factor).round().clamp(-128, 127)
            else:
                rounded = f64(to_float8((values / factor).clamp(-largest, largest), dtype))
            out[row, start : start + size] = rounded * factor
            if not values.isfinite().all():
                out[row, start : start + size] = torch.nan
    return out
