"""Random numbers as a function of key and token, without state between draws."""

from __future__ import annotations

import torch

# The 32-bit finaliser "lowbias32" (C. Wellons, hash-prospector), as signed numbers, whose products wrap around alike.
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
TOKEN_FACTOR = 0x9E3779B1 - (1 << 32)


def exponential(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return exponentially distributed float32 numbers of mean 1 for keys and tokens.

    tokens: int64. keys: int64 [..., 2], two 32-bit halves each. Their shapes broadcast. argmax(logits - log E) draws
    from softmax(logits) (the Gumbel-max trick).
    """
    low, high = keys.to(torch.int32).unbind(-1)
    bits = _mix32_(tokens.to(torch.int32) * TOKEN_FACTOR + low)
    bits = _mix32_(bits.bitwise_xor_(high))
    # The smallest numbers win: log1p keeps their precision, which a uniform number near 1 would lose in float32.
    # The largest stays finite: a token that is the only one allowed must win whatever its number.
    uniform = bits.view(torch.uint32).float().add_(0.5).mul_(-(2.0**-32))
    return uniform.clamp_(min=2.0**-24 - 1).log1p_().neg_()


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """In place, for the bits of int32."""
    first, second = _FACTORS
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(first)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(second)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
