"""The hashes of chains of blocks are their formulas, in every process."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from paged.cache.token_chain import ChainHash, Sha256Chain
from tests.cache.prefix_cache import BLOCK


def block_hash(previous: int, tokens: Sequence[int]) -> int:
    """The formula of ChainHash's docstring."""
    digests = [hashlib.sha256(f"paged {offset}".encode()).digest()[:8] for offset in range(len(tokens))]
    factors = [int.from_bytes(digest, "little") | 1 for digest in digests]
    content = sum(factor * (token + 1) for factor, token in zip(factors, tokens, strict=True))
    return (6364136223846793005 * previous + content) % (1 << 64)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 64, 65, 300])
def test_chain_hash_is_its_formula(count: int) -> None:
    rng = np.random.default_rng(count)
    blocks = rng.integers(-(1 << 31), 1 << 31, (count, BLOCK), dtype=np.int64).astype(np.int32)
    chain = ChainHash(BLOCK)
    previous = start = (1 << 64) - 5
    expected, stepwise = [], []
    for block in blocks:
        expected.append(block_hash(expected[-1] if expected else start, block.tolist()))
        previous = chain.extend(previous, block[None])[0]  # type: ignore[assignment]
        stepwise.append(previous)
    assert chain.extend(start, blocks) == stepwise == expected


def test_hashes_are_the_same_in_every_process() -> None:
    chain = ChainHash(BLOCK)
    root = chain.root(("model", "adapter"))
    assert root == 5_026_032_558_425_948_998
    assert chain.extend(root, np.array([[1, 2, 3, 4]], np.int32)) == [5_364_142_828_442_713_310]


def test_sha256_chain() -> None:
    blocks, chain = np.arange(3 * BLOCK, dtype=np.int32).reshape(-1, BLOCK), Sha256Chain()
    previous, expected = chain.root("a"), []
    for block in blocks.tolist():
        content = b"".join(token.to_bytes(4, "little") for token in block)
        previous = hashlib.sha256(previous + content).digest()  # type: ignore[operator]
        expected.append(previous)
    assert chain.extend(chain.root("a"), blocks) == expected
    assert chain.root("a") != chain.root("b")
