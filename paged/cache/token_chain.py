"""Token chains: known token ids of a sequence, its published blocks, and the chained hashes of full blocks."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul

import numpy as np
from numpy.typing import NDArray

from paged.cache.guard import Rollback
from paged.errors import InvalidInputError

Hash = int | bytes
TokenArray = NDArray[np.int32]
PackedIds = tuple[TokenArray, bool]
"""Ids as an int32 array, and whether a `content_id` is among them."""
Contents = Sequence[list[int] | None]
"""For each block, all its ids if it contains a `content_id`, else None."""
# Ids at or below this value are `content_id`s, not tokens.
_FIRST_CONTENT_ID = -(1 << 128)


@dataclass(slots=True)
class TokenChain:
    """Known token ids of a sequence and their publications.

    ids: known token ids from position 0 on.
    hashes, serials: one entry for each of the first full blocks of `ids` that are published, possibly by other
    sequences.
        A serial number distinguishes publications with the same hash.
    """

    ids: list[int] = field(default_factory=list)
    hashes: list[Hash] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)

    def copy(self, num_tokens: int, num_blocks: int) -> TokenChain:
        """Return a copy with the first `num_tokens` ids and the chain of the first `num_blocks` blocks."""
        return TokenChain(self.ids[:num_tokens], self.hashes[:num_blocks], self.serials[:num_blocks])

    def cut(self, num_tokens: int, num_blocks: int, rollback: Rollback) -> None:
        """Cut to the part that `copy` would return."""
        for items, end in ((self.ids, num_tokens), (self.hashes, num_blocks), (self.serials, num_blocks)):
            if len(items) > end:
                rollback.keep_end(items, end)
                del items[end:]


def content_id(digest: bytes) -> int:
    """Return the id that the prefix index uses for a position with an embedding row instead of a token.

    digest: the hash of the row, 128 bits. Token ids have 32 bits, so no token has the same id.
    """
    return _FIRST_CONTENT_ID - int.from_bytes(digest, "little")


def to_int32(ids: list[int]) -> list[int]:
    """Return the ids with each `content_id` replaced by a negative integer made of its last bits."""
    short = list(ids)
    for place, id_ in enumerate(ids):
        if id_ <= _FIRST_CONTENT_ID:
            short[place] = -1 - (id_ & 0x7FFFFFFF)
    return short


def pack(ids: list[int]) -> PackedIds:
    """Return the ids as an int32 array, see `to_int32`.

    Raises:
        InvalidInputError: an id is neither a `content_id` nor an integer of 32 bits.
    """
    try:  # twice as fast as numpy's own conversions
        return np.frombuffer(_layout(len(ids)).pack(*ids), np.int32), False
    except struct.error as error:
        short = to_int32(ids)
        if short == ids:
            raise InvalidInputError(f"token_ids: expected integers of 32 bits, {error}") from error
        return pack(short)[0], True


@lru_cache(maxsize=256)
def _layout(count: int) -> struct.Struct:
    """Return the cached `struct` layout of `count` integers; making it is a third of the cost of packing."""
    return struct.Struct(f"{count}i")


_MASK = (1 << 64) - 1
# An odd factor has an inverse modulo 2^64, so a whole chain can be hashed at once. This factor is from Knuth's MMIX
# generator (The Art of Computer Programming, volume 2, section 3.3.4).
_CHAIN_FACTOR = 6364136223846793005
_CHAIN_INVERSE = pow(_CHAIN_FACTOR, -1, 1 << 64)
# Up to this number of blocks, plain integers are faster than arrays.
FEW_BLOCKS = 4


class ChainHash:
    """Fast, non-cryptographic chained hash: h(i) = F h(i - 1) + sum_j M(j) (token(i, j) + 1) modulo 2^64, M odd.

    Unrolled, h(i) = F^(i + 1) (h(-1) + sum_k F^-(k + 1) c(k)), where c(k) is the sum over block k. Therefore a matrix
    product and a running sum hash a whole prompt.
    """

    def __init__(self, block_size: int) -> None:
        self._factors: list[int] = []
        for offset in range(block_size):
            digest = hashlib.sha256(f"paged {offset}".encode()).digest()
            self._factors.append(int.from_bytes(digest[:8], "little") | 1)
        self._factor_array = np.array(self._factors, np.uint64)
        # Constant part of a block's sum, because the hash adds 1 to each token.
        self._factor_sum = sum(self._factors) & _MASK
        self._powers = np.empty((2, 0), np.uint64)  # powers of the factor, and of its inverse

    def extend(self, previous: Hash, blocks: TokenArray, contents: Contents | None = None) -> list[Hash]:
        """Return the hashes of `blocks` [n, block_size] that follow the block with hash `previous`.

        contents: not hashed, because all ids are compared on a hit.
        """
        assert isinstance(previous, int)
        if len(blocks) <= FEW_BLOCKS:
            hashes: list[Hash] = []
            for block in blocks.tolist():
                content = sum(map(mul, block, self._factors)) + self._factor_sum
                previous = (_CHAIN_FACTOR * previous + content) & _MASK
                hashes.append(previous)
            return hashes
        if self._powers.shape[1] < len(blocks):
            factors = np.array([[_CHAIN_FACTOR], [_CHAIN_INVERSE]], np.uint64)
            self._powers = factors.repeat(2 * len(blocks), 1).cumprod(1, dtype=np.uint64)
        powers, inverse_powers = self._powers[:, : len(blocks)]
        sums = blocks.astype(np.uint64) @ self._factor_array
        sums += np.uint64(self._factor_sum)
        sums *= inverse_powers
        sums.cumsum(out=sums)
        sums += np.uint64(previous)
        sums *= powers
        chain: list[Hash] = sums.tolist()
        return chain

    def extend_each(self, previous: Sequence[Hash], blocks: TokenArray) -> list[Hash]:
        """Return the hashes of `blocks` [n, block_size]; block i follows the block with hash `previous[i]`."""
        sums = blocks.astype(np.uint64) @ self._factor_array
        sums += np.uint64(self._factor_sum)
        sums += np.array(previous, np.uint64) * np.uint64(_CHAIN_FACTOR)
        hashes: list[Hash] = sums.tolist()
        return hashes

    def root(self, namespace: Hashable) -> Hash:
        """Return the hash that precedes the first block of a namespace; the same in every process."""
        return int.from_bytes(hashlib.sha256(_namespace_text(namespace).encode()).digest()[:8], "little")


class Sha256Chain:
    """Chained hash h(i) = sha256(h(i - 1), tokens of block i), for tiers and pools with untrusted parties."""

    def extend(self, previous: Hash, blocks: TokenArray, contents: Contents | None = None) -> list[Hash]:
        """Like `ChainHash.extend`, but with all bits of `contents`, because a tier compares only hashes of prefixes."""
        assert isinstance(previous, bytes)
        hashes: list[Hash] = []
        for index, block in enumerate(blocks):
            content = block.tobytes()
            ids = None if contents is None else contents[index]
            if ids is not None:
                content += repr(ids).encode()
            previous = hashlib.sha256(previous + content).digest()
            hashes.append(previous)
        return hashes

    def extend_each(self, previous: Sequence[Hash], blocks: TokenArray) -> list[Hash]:
        """Like `ChainHash.extend_each`."""
        return [self.extend(before, block[None])[0] for before, block in zip(previous, blocks, strict=True)]

    def root(self, namespace: Hashable) -> Hash:
        """Like `ChainHash.root`."""
        return hashlib.sha256(_namespace_text(namespace).encode()).digest()


def _namespace_text(namespace: Hashable) -> str:
    """Return a `repr` of a namespace with sorted sets, because their order depends on PYTHONHASHSEED."""
    if isinstance(namespace, frozenset):
        return f"frozenset({{{', '.join(sorted(map(_namespace_text, namespace)))}}})"
    if isinstance(namespace, tuple):
        end = "," if len(namespace) == 1 else ""
        return f"({', '.join(map(_namespace_text, namespace))}{end})"
    return repr(namespace)
