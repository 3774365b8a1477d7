"""Sizes, random prompts and the hit that a prompt must have: the same for our cache and the peer's."""

from __future__ import annotations

import random
from collections.abc import Iterator

from paged.bench.check import WrongResultError

BLOCK_SIZE = 16
# No row but the one that means to comes to evict: 300 samples of 2,048 tokens each are 38,400 blocks.
NUM_BLOCKS = 40_000
# Steps after which a decode starts over with new sequences.
DECODE_STEPS = 256
_VOCAB_SIZE = 50_000


def prompts(num_tokens: int) -> Iterator[list[int]]:
    """Random token ids without end, the same for every caller."""
    generator = random.Random(0)
    while True:
        yield generator.choices(range(_VOCAB_SIZE), k=num_tokens)


def decode_lengths() -> list[int]:
    """Tokens of 256 sequences at context 1,000: 992 to 1,007, so that 16 of them need a block in every step."""
    return [992 + index % BLOCK_SIZE for index in range(256)]


def check_hit(num_cached_tokens: int, num_tokens: int, *, cached: bool) -> None:
    """Raise WrongResultError unless all of the prompt but its last block or token was found, or nothing if not cached.

    The last token is always left to compute. Ours shares its block and copies it, the peer computes it all.
    """
    least, most = (((num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE), num_tokens - 1) if cached else (0, 0)
    if not least <= num_cached_tokens <= most:
        raise WrongResultError(f"{num_cached_tokens} tokens were found in the prefix cache, expected {least} to {most}")
