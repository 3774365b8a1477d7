"""Sizes and factors of hashed tables of n-grams, which Qwen4-Exp and DeepSeek-V4.1 choose by the same rules."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

MAX_ORDER = 8
# Largest number of rows of a head's table that is looked for; published tables have up to 20 million.
MAX_ROWS = 1 << 31
# Distance of the seeds of two layers.
SEED_STEP = 10_007


def table_sizes(first: int, num_heads: int) -> Iterator[tuple[int, ...]]:
    """Yield the rows of each head's table for one layer after the other: the next primes from `first` on."""
    sizes: list[int] = []
    number = max(first, 2)
    while True:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            sizes.append(number)
        if len(sizes) == num_heads:
            yield tuple(sizes)
            sizes = []
        number += 1


def factor_bound(num_ids: int) -> int:
    """Return a bound of random numbers n, so that 2 n + 1, a factor of the hash, times an id stays below 2^63."""
    return max(1, ((1 << 63) - 1) // num_ids // 2)
