"""The token ids of one sequence, and the chain of published blocks that they lead to."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paged.errors import InvalidInputError

Hash = int | bytes
TokenArray = NDArray[np.int32]


class TokenChain:
    """The ids at positions 0.., of which the first `num_known` are certain. Those after them are what its prompt was
    looked up with: mostly they come true, and need not be packed and hashed again.

    rows: full blocks of `ids`, int32 [n, block_size], as far as they were looked up.
    hashes: of full blocks of `ids`, at least those of `rows`.
    serials: of the publications that the sequence's first blocks lead to, by PrefixIndex.
    """

    __slots__ = ("hashes", "ids", "num_known", "rows", "serials")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_known = 0
        self.rows: TokenArray | None = None
        self.hashes: list[Hash] = []
        self.serials: list[int] = []

    def expect(self, ids: list[int], block_size: int) -> TokenArray:
        """Take `ids` for what will stand at positions 0.. of a new sequence; its full blocks [n, block_size].

        Raises:
            InvalidInputError: one is not an integer of 32 bits.
        """
        self.rows = pack(ids)[: len(ids) // block_size * block_size].reshape(-1, block_size)
        self.ids = ids.copy()
        return self.rows

    def learn(self, ids: list[int], block_size: int) -> None:
        """`ids` stand at the positions after the known ones."""
        start, end = self.num_known, self.num_known + len(ids)
        if self.ids[start:end] != ids:
            del self.ids[start:], self.hashes[start // block_size :]
            self.ids += ids
            if self.rows is not None:
                self.rows = self.rows[: start // block_size]
        self.num_known = end

    def forget(self, position: int, block_size: int) -> None:
        """What stands at `position` and after it is no longer known."""
        self.num_known = min(self.num_known, position)
        del self.serials[position // block_size :]

    def copy(self, num_tokens: int, block_size: int) -> TokenChain:
        """What is known of the first `num_tokens` positions."""
        twin = TokenChain()
        twin.num_known = min(self.num_known, num_tokens)
        twin.ids, twin.serials = self.ids[: twin.num_known], self.serials[: num_tokens // block_size]
        twin.hashes = self.hashes[: len(twin.serials)]
        return twin

    def blocks(self, first: int, last: int, block_size: int) -> TokenArray:
        """The full blocks from `first` up to `last`, int32 [n, block_size].

        Raises:
            InvalidInputError: an id is not an integer of 32 bits.
        """
        if self.rows is not None and last <= len(self.rows):
            return self.rows[first:last]
        return pack(self.ids[first * block_size : last * block_size]).reshape(-1, block_size)


def as_list(token_ids: Sequence[int]) -> list[int]:
    """The ids as Python integers; a list is returned as it is."""
    if isinstance(token_ids, list):
        return token_ids
    return list(token_ids) if isinstance(token_ids, tuple) else np.asarray(token_ids).tolist()


def pack(ids: list[int]) -> TokenArray:
    """The ids as an array.

    Raises:
        InvalidInputError: one is not an integer of 32 bits.
    """
    try:  # twice as fast as numpy's own conversions, and refuses floats
        return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)
    except struct.error as error:
        raise InvalidInputError(f"token_ids: expected integers of 32 bits, {error}") from error
