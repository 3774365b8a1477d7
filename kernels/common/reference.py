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


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The float8_e4m3fn values nearest to x, of two equally near ones that with an even code; NaN stays NaN.

    A code holds a sign, 4 bits of exponent e and 3 of mantissa m: 2^-6 m / 8 where e = 0, else 2^(e - 7) (1 + m / 8).
    The last one, which would be 480, is NaN, so 448 stands for all beyond it (Micikevicius et al., 2022).
    """
    codes = torch.arange(127)
    values = torch.tensor(
        [2.0**-6 * code / 8 if code < 8 else 2.0 ** (code // 8 - 7) * (1 + code % 8 / 8) for code in codes.tolist()],
        dtype=torch.float64,
    )
    x = f64(x)
    distances = (x.abs().clamp(max=values[-1]).unsqueeze(-1) - values).abs()
    is_nearest = distances == distances.amin(-1, keepdim=True)
    size = torch.where(x.isnan(), 127, (is_nearest * (2 - codes % 2)).argmax(-1))
    return (size + 128 * x.signbit()).to(torch.uint8).view(torch.float8_e4m3fn)


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
