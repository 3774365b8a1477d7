"""Keys of random numbers that are a function of (seed, position): the same in any batch, on any device.

A generator with a state gives a row other numbers when another row joins the batch. Here each is a hash of where it
stands, so nothing is kept, and a request can be preempted and computed again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Stream(IntEnum):
    """Independent numbers for one position: the token itself, a draft's proposal, whether that is accepted."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2


def hash_seeds(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What `noise_keys` takes: splitmix64 (Steele et al., 2014) of each, so that near seeds lead far apart."""
    x = seeds + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(hashed_seeds: NDArray[np.uint64], positions: NDArray[np.int64], stream: Stream) -> NDArray[np.uint64]:
    """One 64-bit key each, by another hash of `hash_seeds`, position and stream; shapes broadcast."""
    return hash_seeds(hashed_seeds + positions.astype(np.uint64) * np.uint64(len(Stream)) + np.uint64(stream))


def uniform(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) a key."""
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_keys(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Keys as their two 32-bit halves, the lower first, int64 [..., 2]: what `sample_tokens` takes."""
    return keys.astype("<u8", copy=False)[..., None].view("<u4").astype(np.int64)
