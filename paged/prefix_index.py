"""Full blocks by the chain of tokens that leads to them: what lets a prompt start from K/V computed before."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, KeysView, Sequence
from operator import mul
from typing import cast

import numpy as np
from numpy.typing import NDArray

from paged.errors import PagedError

Hash = int | bytes
TokenArray = NDArray[np.int32]

_MASK = (1 << 64) - 1
# Any odd factor can be divided by again modulo 2^64, which is what lets a whole chain be hashed at once; this one is
# Knuth's, for multiplicative hashing (The Art of Computer Programming, volume 3, section 6.4).
_CHAIN_FACTOR = 6364136223846793005
_CHAIN_INVERSE = pow(_CHAIN_FACTOR, -1, 1 << 64)
# Up to this many blocks plain integers are faster than setting up arrays.
_FEW_BLOCKS = 4


class ChainHash:
    """h(i) = F h(i - 1) + sum_j M(j) (token(i, j) + 1) modulo 2^64, with odd factors M: fast, and not cryptographic.

    Unrolled, h(i) = F^(i + 1) (h(-1) + sum_k F^-(k + 1) c(k)) with c(k) the sum over block k, so a whole prompt takes a
    matrix product and a running sum.
    """

    def __init__(self, block_size: int) -> None:
        digests = (hashlib.sha256(f"paged {offset}".encode()).digest()[:8] for offset in range(block_size))
        self._factors = [int.from_bytes(digest, "little") | 1 for digest in digests]
        self._factor_array = np.array(self._factors, np.uint64)
        self._powers = np.empty(0, np.uint64)
        self._inverse_powers = np.empty(0, np.uint64)

    def extend(self, previous: Hash, blocks: TokenArray) -> list[Hash]:
        """Hashes of `blocks` [n, block_size], which follow the block with hash `previous`."""
        assert isinstance(previous, int)
        if len(blocks) <= _FEW_BLOCKS:
            hashes: list[Hash] = []
            for block in blocks.tolist():
                content = sum(map(mul, block, self._factors)) + sum(self._factors)
                previous = (_CHAIN_FACTOR * previous + content) & _MASK
                hashes.append(previous)
            return hashes
        while len(self._powers) < len(blocks):
            self._grow()
        powers, inverse_powers = self._powers[: len(blocks)], self._inverse_powers[: len(blocks)]
        contents = (blocks.astype(np.uint64) + np.uint64(1)) @ self._factor_array
        sums = np.cumsum(contents * inverse_powers, dtype=np.uint64) + np.uint64(previous)
        chain: list[Hash] = (powers * sums).tolist()
        return chain

    def _grow(self) -> None:
        size = max(64, 2 * len(self._powers))
        self._powers = np.cumprod(np.full(size, _CHAIN_FACTOR, np.uint64), dtype=np.uint64)
        self._inverse_powers = np.cumprod(np.full(size, _CHAIN_INVERSE, np.uint64), dtype=np.uint64)

    def root(self, namespace: Hashable) -> Hash:
        """What the first block of a namespace follows; the same in every process."""
        return int.from_bytes(hashlib.sha256(repr(namespace).encode()).digest()[:8], "little")


class Sha256Chain:
    """h(i) = sha256(h(i - 1), tokens of block i), for pools that share hashes with untrusted parties."""

    def extend(self, previous: Hash, blocks: TokenArray) -> list[Hash]:
        """As `ChainHash.extend`."""
        assert isinstance(previous, bytes)
        hashes: list[Hash] = []
        for block in blocks:
            previous = hashlib.sha256(previous + block.tobytes()).digest()
            hashes.append(previous)
        return hashes

    def root(self, namespace: Hashable) -> Hash:
        """As `ChainHash.root`."""
        return hashlib.sha256(repr(namespace).encode()).digest()


Link = tuple[Hash, int]
"""One published block's place in a chain: its hash, and a serial number that no other publication ever has."""


class PrefixIndex:
    """Published blocks. A hit compares the token ids again, and the serial number of the block before it, so that two
    chains whose hashes collide can never serve each other's K/V, nor two namespaces.
    """

    def __init__(self, num_blocks: int, block_size: int, algorithm: str) -> None:
        self._block_size = block_size
        self._chain: ChainHash | Sha256Chain = ChainHash(block_size) if algorithm == "fast" else Sha256Chain()
        self._block_of: dict[Hash, int] = {}
        self._hash_of: dict[int, Hash] = {}
        # What was published with each block; rows of blocks that are not published are stale.
        self._tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self._serials = np.zeros(num_blocks + 1, np.int64)
        self._parents = np.zeros(num_blocks + 1, np.int64)
        self._last_serial = 0
        self._roots: dict[Hashable, Link] = {}

    @property
    def published(self) -> KeysView[int]:
        """The published blocks; a view that changes with the index."""
        return self._hash_of.keys()

    def hash_of(self, block: int) -> Hash:
        """The hash under which `block` is published."""
        return self._hash_of[block]

    def root(self, namespace: Hashable) -> Link:
        """The link before the first block of a namespace."""
        link = self._roots.get(namespace)
        if link is None:
            link = self._roots[namespace] = (self._chain.root(namespace), self._next_serial())
        return link

    @property
    def namespaces(self) -> KeysView[Hashable]:
        """Those with a root; a view that changes with the index."""
        return self._roots.keys()

    def forget_root(self, namespace: Hashable) -> None:
        """Let nothing published so far be found in a namespace. A later root has a number of its own, so that chains
        from this one never match, though their hashes may."""
        self._roots.pop(namespace, None)

    def match(self, tokens: TokenArray, namespace: Hashable) -> tuple[list[int], list[Link]]:
        """The longest published chain of full blocks that `tokens` begins with: block ids and links."""
        count = len(tokens) // self._block_size
        root = self._roots.get(namespace)
        if count == 0 or root is None or not self._block_of:
            return [], []
        wanted = tokens[: count * self._block_size].reshape(count, self._block_size)
        hashes = self._chain.extend(root[0], wanted)
        candidates = list(map(self._block_of.get, hashes))
        end = candidates.index(None) if None in candidates else count
        found = cast("list[int]", candidates[:end])
        ids = np.array(found, np.int64)
        serials = self._serials[ids]
        same = (self._tokens[ids] == wanted[: len(found)]).all(axis=1)
        same[:1] &= self._parents[ids[:1]] == root[1]
        same[1:] &= self._parents[ids[1:]] == serials[:-1]
        length = len(found) if same.all() else int(same.argmin())
        return found[:length], list(zip(hashes, serials[:length].tolist(), strict=False))

    def publish(
        self, blocks: Sequence[int], tokens: TokenArray, previous: Link
    ) -> tuple[list[Link], list[tuple[int, Hash]]]:
        """Make `blocks`, which hold `tokens` [n, block_size] and follow `previous`, findable.

        Where a chain's tokens are published already that publication stays, and the chain goes on from it. One of the
        same hash but another content gives way.

        Returns:
            the links of the chain, and the blocks whose publication gave way, with their hashes.
        """
        hashes = self._chain.extend(previous[0], tokens)
        is_new = self._block_of.keys().isdisjoint(hashes) and self._hash_of.keys().isdisjoint(blocks)
        if len(blocks) > _FEW_BLOCKS and is_new and len(set(hashes)) == len(hashes):
            return self._publish_new(blocks, tokens, hashes, previous), []
        links: list[Link] = []
        displaced: list[tuple[int, Hash]] = []
        for block, row, hash_ in zip(blocks, tokens, hashes, strict=True):
            present = self._block_of.get(hash_)
            if present is not None:
                if self._parents[present] == previous[1] and (self._tokens[present] == row).all():
                    previous = (hash_, int(self._serials[present]))
                    links.append(previous)
                    continue
                displaced.append((present, self.forget([present])[0]))
            if block in self._hash_of:  # with what it held before its sequence was told to advance over it
                displaced.append((block, self.forget([block])[0]))
            # The same content keeps its number, so that longer chains which go on from it are found again: the tail of
            # a whole prompt is withdrawn while its last token is computed.
            is_same = self._parents[block] == previous[1] and (self._tokens[block] == row).all()
            serial = int(self._serials[block]) if is_same else self._next_serial()
            self._block_of[hash_], self._hash_of[block] = block, hash_
            self._tokens[block], self._parents[block], self._serials[block] = row, previous[1], serial
            previous = (hash_, serial)
            links.append(previous)
        return links, displaced

    def _publish_new(self, blocks: Sequence[int], tokens: TokenArray, hashes: list[Hash], previous: Link) -> list[Link]:
        """`publish` where no hash is taken: what a new prompt mostly is, and all of it at once."""
        first = self._last_serial + 1
        self._last_serial += len(blocks)
        serials = np.arange(first, first + len(blocks))
        ids = np.array(blocks, np.int64)
        self._tokens[ids], self._serials[ids] = tokens, serials
        self._parents[ids[:1]], self._parents[ids[1:]] = previous[1], serials[:-1]
        self._block_of.update(zip(hashes, blocks, strict=True))
        self._hash_of.update(zip(blocks, hashes, strict=True))
        return list(zip(hashes, serials.tolist(), strict=True))

    def check(self) -> None:
        """Both directions of the index say the same.

        Raises:
            PagedError: names the first contradiction.
        """
        for block, hash_ in self._hash_of.items():
            if self._block_of.get(hash_) != block:
                raise PagedError(f"block {block} is published under a hash that leads to {self._block_of.get(hash_)}")
        if len(self._block_of) != len(self._hash_of):
            raise PagedError(f"{len(self._block_of)} hashes lead to {len(self._hash_of)} published blocks")

    def forget(self, blocks: Sequence[int]) -> list[Hash]:
        """Withdraw the publications of `blocks`; their hashes."""
        hashes = list(map(self._hash_of.pop, blocks))
        for hash_ in hashes:
            del self._block_of[hash_]
        return hashes

    def _next_serial(self) -> int:
        self._last_serial += 1
        return self._last_serial
