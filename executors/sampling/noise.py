"""Keys of random numbers as a function of (seed, position), equal in any batch and on any device.

A generator with state would give a row different numbers when another row joins the batch. Here each key is a hash of
seed, position and stream. Without state, a request can be preempted and computed again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_UINT64_MAX = (1 << 64) - 1


class Stream(IntEnum):
    """Independent random numbers of one position: for the token, for a draft, for the acceptance of the draft."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2


def hash_seeds(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash seeds for `noise_keys` by splitmix64 (Steele et al., 2014), so that near seeds get unrelated hashes."""
    x = seeds + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(hashed_seeds: NDArray[np.uint64], positions: NDArray[np.int64], stream: Stream) -> NDArray[np.uint64]:
    """Return 64-bit keys: hashes of hashed seed, position and stream; shapes broadcast."""
    return hash_seeds(hashed_seeds + positions.astype(np.uint64) * np.uint64(len(Stream)) + np.uint64(stream))


def completion_seeds(seed: int, count: int) -> list[int]:
    """Return a seed for each completion of a request, from the low 64 bits of `seed`."""
    hashed = hash_seeds(np.array([seed & _UINT64_MAX], np.uint64))
    seeds: list[int] = noise_keys(hashed, np.arange(count), Stream.TOKEN).tolist()
    return seeds


def uniform(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each key."""
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_keys(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Split keys into two 32-bit halves, the lower first, int64 [..., 2], for `sample_tokens`."""
    return keys.astype("<u8", copy=False)[..., None].view("<u4").astype(np.int64)
