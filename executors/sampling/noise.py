"""Random numbers that are a function of (seed, position, token): the same in any batch, on any device.

A generator with a state gives a row other numbers when another row joins the batch. Here each is a hash of where it
stands, so nothing is kept, and a request can be preempted and computed again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

_MASK = (1 << 32) - 1
# The 32-bit finaliser "lowbias32" (C. Wellons, hash-prospector); its second factor, 0x846CA68B, less 2^32, so that
# products of 32-bit numbers stay within int64 and keep their low 32 bits.
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))


class Stream(IntEnum):
    """Independent numbers for one position: the token itself, a draft's proposal, whether that is accepted."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2


def hash_seeds(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What `noise_keys` takes: splitmix64 (Steele et al., 2014) of each, so that near seeds lead far apart."""
    return _splitmix64(seeds)


def noise_keys(hashed_seeds: NDArray[np.uint64], positions: NDArray[np.int64], stream: Stream) -> NDArray[np.uint64]:
    """One 64-bit key each, by splitmix64 of `hash_seeds`, position and stream; shapes broadcast."""
    return _splitmix64(hashed_seeds + positions.astype(np.uint64) * np.uint64(len(Stream)) + np.uint64(stream))


def uniform(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) a key."""
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def exponential(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Exponentially distributed numbers of mean 1, float32 [n, num_tokens], for `split_keys` int64 [n, 2].

    argmax(logits - log E) draws from softmax(logits) (the Gumbel-max trick).
    """
    tokens = torch.arange(num_tokens, device=keys.device)
    bits = _mix32(((tokens * 0x9E3779B1)[None] + keys[:, :1]) & _MASK)
    bits = _mix32(bits ^ keys[:, 1:])
    # The smallest numbers win: log1p keeps their precision, which a uniform number near 1 would lose in float32.
    # The largest stays finite: a token that is the only one allowed must win whatever its number.
    return bits.float().add_(0.5).mul_(-(2.0**-32)).clamp_(min=2.0**-24 - 1).log1p_().neg_()


def split_keys(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Keys as their two 32-bit halves, the lower first, int64 [..., 2]."""
    return keys.astype("<u8", copy=False)[..., None].view("<u4").astype(np.int64)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Hash in place, for values in [0, 2^32)."""
    first, second = _FACTORS
    x.bitwise_xor_(x >> 16).mul_(first).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).mul_(second).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)
