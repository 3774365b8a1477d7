"""References: operations in float64, slow and obviously right, which tests, benchmarks and self-checks compare with.

Those of a family are in its own `reference.py`; here is what several of them share. They are written with Python loops
over the formula's own indices and share no code with the Triton kernels or the PyTorch implementations. Arguments are
those of the operation, or fewer. All functions return new float64 (or integer) tensors on the CPU and change nothing.
"""

from __future__ import annotations

import math

import torch

from paged.kernels.common.errors import InvalidInputError

# The value of each E2M1 code: sign, 2 bits of exponent, 1 of mantissa (Open Compute Project, 2023).
E2M1 = [sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def f64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float64)


# Number of codes without sign and NaN, bits of the mantissa, bias of the exponent. The last code of e4m3fn, which would
# be 480, is NaN; behind 57344 of e5m2 lie infinity and NaN (Micikevicius et al., 2022).
_FLOATS = {torch.float8_e4m3fn: (127, 3, 7), torch.float8_e5m2: (124, 2, 15)}


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of an 8-bit float type nearest to x, of two equally near ones that with an even code; NaN stays NaN,
    and the largest stands for all beyond it.

    A code holds a sign, an exponent e and a mantissa m of M bits: 2^(1 - bias) m / 2^M where e = 0, else 2^(e - bias)
    (1 + m / 2^M).
    """
    num_codes, bits, bias = _FLOATS[dtype]
    codes, steps = torch.arange(num_codes), 2**bits
    values = torch.tensor(
        [
            2.0 ** (1 - bias) * code / steps
            if code < steps
            else 2.0 ** (code // steps - bias) * (1 + code % steps / steps)
            for code in codes.tolist()
        ],
        dtype=torch.float64,
    )
    x = f64(x)
    distances = (x.abs().clamp(max=values[-1]).unsqueeze(-1) - values).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    size = torch.where(x.isnan(), 127, (is_nearest * (2 - codes % 2)).argmax(-1))
    return (size + 128 * x.signbit()).to(torch.uint8).view(dtype)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up for "silu", "gelu" and "gelu_tanh"; for "swiglu_oai" min(gate, 7) sigmoid(1.702 min(gate,
    7)) (1 + up), with up clamped to [-7, 7]."""
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
    """The code of each column, as `packed.packing` says where it stands: nibble i of half h of word r of unit u."""
    columns = torch.arange(num_columns)
    unit, inside = columns // 128, columns % 128
    i, r, half = inside // 32, inside % 32 // 2, inside % 2
    return (words.cpu().long()[:, unit * 16 + r] >> (4 * i + 16 * half)) % 16
