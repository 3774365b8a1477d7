"""Float64 copies and rounding to 8-bit floats, independent of the operations' arithmetic."""

from __future__ import annotations

import torch


def f64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU in float64."""
    return tensor.detach().to(device="cpu", dtype=torch.float64)


# Number of codes without sign and NaN, bits of the mantissa, bias of the exponent. The remaining codes are NaN in
# e4m3fn, and infinity and NaN in e5m2 (Micikevicius et al., 2022).
_FLOATS = {torch.float8_e4m3fn: (127, 3, 7), torch.float8_e5m2: (124, 2, 15)}


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the nearest values of an 8-bit float dtype, ties to the even code. NaN stays, larger numbers saturate.

    A code has a sign, an exponent e and a mantissa m of M bits. Its magnitude is 2^(1 - bias) m / 2^M if e = 0, else
    2^(e - bias) (1 + m / 2^M).
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
