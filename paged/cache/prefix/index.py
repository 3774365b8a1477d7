"""Full blocks by the chain of tokens that leads to them: what lets a prompt start from K/V computed before."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, KeysView, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from paged.cache.blocks.rollback import Rollback
from paged.cache.prefix.chain import Hash, TokenArray, TokenChain, pack
from paged.cache.prefix.chain_hash import FEW_BLOCKS, ChainHash, Sha256Chain
from paged.cache.prefix.other_tables import OtherTables
from paged.errors import PagedError

# A look-up hashes one block, then this many times more in every round, and ends with the round that misses a block.
# Most prompts miss the first block or find nearly all; 256 blocks hashed in vain take 50 us.
_LOOKUP_GROWTH = 256


@dataclass(eq=False, slots=True)
class _Root:
    """What the first published blocks of a namespace follow; without one it is dropped."""

    hash: Hash
    serial: int
    num_blocks: int = 0


class PrefixIndex:
    """Published blocks. Where sequences have several tables, those are of the first, and `other_tables` has the others.

    A hit compares the token ids again, and the serial number of the block before it, which only
    that publication has, so that two chains whose hashes collide can never serve each other's K/V, nor two namespaces.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        algorithm: str,
        rollback: Rollback | None = None,
        are_needed: Sequence[bool] = (),
    ) -> None:
        """are_needed: see `OtherTables`."""
        self._rollback = Rollback() if rollback is None else rollback
        self._block_size = block_size
        self._chain: ChainHash | Sha256Chain = ChainHash(block_size) if algorithm == "fast" else Sha256Chain()
        # Blocks of all tables; the object stays the same.
        self.published: set[int] = set()
        self._block_of: dict[Hash, int] = {}
        self._hash_of: dict[int, Hash] = {}
        # What was published with each block; rows of blocks that are not published are stale.
        self._tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self._serials = np.zeros(num_blocks + 1, np.int64)
        self._parents = np.zeros(num_blocks + 1, np.int64)
        self._last_serial = 0
        self._roots: dict[Hashable, _Root] = {}
        # The namespace and root of each published block that follows one.
        self._root_of: dict[int, tuple[Hashable, _Root]] = {}
        self.other_tables = OtherTables(num_blocks, are_needed, self.published, self._rollback) if are_needed else None

    def hash_of(self, block: int) -> Hash:
        """The hash under which `block` is published."""
        if self.other_tables is not None:
            block = self.other_tables.first_of(block)
        return self._hash_of[block]

    @property
    def namespaces(self) -> KeysView[Hashable]:
        """Namespaces in which a prompt can begin with a published block; a view that changes with the index."""
        return self._roots.keys()

    def forget_root(self, namespace: Hashable) -> None:
        """Let nothing published so far be found in a namespace. A later root has a number of its own, so that chains
        from this one never match, though their hashes may."""
        root = self._roots.get(namespace)
        if root is not None:
            self._rollback.append((self._roots.__setitem__, namespace, root))
            del self._roots[namespace]

    def root_hash(self, namespace: Hashable) -> Hash:
        """Return the hash that precedes the first block of a namespace."""
        root = self._roots.get(namespace)
        return self._chain.root(namespace) if root is None else root.hash

    def match(self, token_ids: list[int], namespace: Hashable) -> tuple[list[int], TokenChain]:
        """The longest published chain of full blocks that `token_ids` begins with: block ids, and the chain.

        Raises:
            InvalidInputError: one of the ids that were looked at is not an integer of 32 bits.
        """
        root = self._roots.get(namespace)
        if root is None:
            return [], TokenChain()
        previous, parent = root.hash, root.serial
        found: list[int] = []
        hashes: list[Hash] = []
        wanted = b""
        num_blocks, size = len(token_ids) // self._block_size, 1
        while len(found) == len(hashes) < num_blocks:
            tokens = self._pack(token_ids, len(hashes), min(len(hashes) + size, num_blocks))
            wanted += tokens.tobytes()
            hashes += self._chain.extend(previous, tokens)
            with suppress(KeyError):  # what comes before the first miss stays in the list
                found.extend(map(self._block_of.__getitem__, hashes[len(found) :]))
            previous = hashes[-1]
            size *= _LOOKUP_GROWTH
        if not found:
            return [], TokenChain()
        ids = np.array(found, np.int64)
        tokens = self._tokens.take(ids, axis=0)
        serials, parents = self._serials.take(ids).tolist(), self._parents.take(ids).tolist()
        length, wanted = len(found), wanted[: tokens.nbytes]
        # As lists and bytes: NumPy's comparisons take longer, as their code has mostly left the processor's caches.
        if parents != [parent, *serials[:-1]] or tokens.tobytes() != wanted:
            is_same = (tokens == np.frombuffer(wanted, np.int32).reshape(tokens.shape)).all(axis=1)
            is_next = np.array(parents) == [parent, *serials[:-1]]
            length = int((is_same & is_next).argmin())
        del found[length:], hashes[length:], serials[length:]
        return found, TokenChain(token_ids[: length * self._block_size], hashes, serials)

    def publish(
        self, blocks: Sequence[int], chain: TokenChain, namespace: Hashable, others: Sequence[Sequence[int]] = ()
    ) -> list[tuple[int, Hash]]:
        """Make `blocks`, which follow those that `chain` has published and hold its next ids, findable.

        Where a chain's tokens are published already that publication stays, and the chain goes on from it. Where
        another content has the same hash that one stays too, and the chain ends, as nothing behind could be found; only
        one that cannot be found itself, as what it follows is gone, gives way.

        others: those of further tables beside each of `blocks`, 0 where there is none; a publication is given what it
            lacks of them.

        Returns:
            what gave way, and those of `blocks` that were published with what they held before, with their hashes.

        Raises:
            InvalidInputError: an id is not an integer of 32 bits.
        """
        if not blocks:
            return []
        first = len(chain.serials)
        tokens = self._pack(chain.ids, first, first + len(blocks))
        root = None
        if first:
            previous_hash, previous = chain.hashes[-1], chain.serials[-1]
        else:
            root = self._roots.get(namespace) or _Root(self._chain.root(namespace), self._next_serial())
            previous_hash, previous = root.hash, root.serial
        hashes = self._chain.extend(previous_hash, tokens)
        serials: Sequence[int]
        displaced: list[tuple[int, Hash]] = []
        present: list[int] = []
        if len(blocks) > FEW_BLOCKS and self._hash_of.keys().isdisjoint(blocks):
            # One pass looks up and enters. `_publish_each` knows what was entered here by its not having a hash yet.
            self._rollback.keep_absence(self._hash_of, blocks)
            present = list(map(self._block_of.setdefault, hashes, blocks))
        if present == list(blocks):
            serials = self._publish_new(blocks, tokens, hashes, previous)
        else:
            serials, displaced = self._publish_each(blocks, tokens, hashes, previous)
        if root is not None:
            self._follow(root, namespace, blocks[0])
        self._rollback.keep_end(chain.hashes, first)
        self._rollback.keep_end(chain.serials, first)
        chain.hashes += hashes[: len(serials)]
        chain.serials += serials
        if self.other_tables is not None:
            for hash_, row in zip(chain.hashes[first:], others, strict=False):
                block = self._block_of[hash_]
                for other, column in self.other_tables.missing(block, row):
                    if other in self.other_tables.locations:  # with what it held before
                        displaced += self.forget([other])
                    self.other_tables.add(other, block, column)
        return displaced

    def _publish_new(
        self, blocks: Sequence[int], tokens: TokenArray, hashes: Sequence[Hash], previous: int
    ) -> Sequence[int]:
        """What a new prompt mostly is, all of it at once: no hash was taken, and `_block_of` has them. The serials."""
        first = self._last_serial + 1
        self._last_serial += len(blocks)
        ids = np.array(blocks, np.int64)
        serials = np.arange(first, first + len(blocks))
        self._tokens[ids], self._serials[ids] = tokens, serials
        self._parents[ids[1:]], self._parents[blocks[0]] = serials[:-1], previous
        self._hash_of.update(zip(blocks, hashes, strict=True))
        self.published.update(blocks)
        return range(first, first + len(blocks))

    def _publish_each(
        self, blocks: Sequence[int], tokens: TokenArray, hashes: Sequence[Hash], previous: int
    ) -> tuple[list[int], list[tuple[int, Hash]]]:
        """One block after the other: the serials, up to the first collision, and what `publish` returns.

        What was the next block of publications that gave way here is dead with them, without looking for its parent.
        """
        serials: list[int] = []
        displaced: list[tuple[int, Hash]] = []
        dead: set[int] = set()
        for block, row, hash_ in zip(blocks, tokens, hashes, strict=True):
            present = self._block_of.get(hash_)
            if present is not None and present in self._hash_of:
                if self._parents[present] == previous and (self._tokens[present] == row).all():
                    previous = int(self._serials[present])
                    serials.append(previous)
                    continue
                if present != block:
                    if int(self._parents[present]) not in dead and self._is_findable(present):
                        break
                    dead.add(int(self._serials[present]))
                    displaced += self.forget([present])
            if block in self._hash_of:  # with what it held before its sequence was told to advance over it
                displaced += self.forget([block])
            # The same content keeps its number, so that longer chains which go on from it are found again: the tail of
            # a whole prompt is withdrawn while its last token is computed.
            is_same = self._parents[block] == previous and (self._tokens[block] == row).all()
            serial = int(self._serials[block]) if is_same else self._next_serial()
            self._rollback.keep_absence(self._hash_of, (block,))
            self._block_of[hash_], self._hash_of[block] = block, hash_
            self.published.add(block)
            self._tokens[block], self._parents[block], self._serials[block] = row, previous, serial
            previous = serial
            serials.append(previous)
        for block, hash_ in zip(blocks[len(serials) :], hashes[len(serials) :], strict=True):
            if block in self._hash_of:
                displaced += self.forget([block])
            elif self._block_of.get(hash_) == block:
                del self._block_of[hash_]
        return serials, displaced

    def _is_findable(self, block: int) -> bool:
        """Whether what a published block follows is there: a root, or another published block. Slow."""
        parent = int(self._parents[block])
        is_first = any(root.serial == parent for root in self._roots.values())
        return is_first or bool((self._serials[list(self._hash_of)] == parent).any())

    def _follow(self, root: _Root, namespace: Hashable, block: int) -> None:
        """Note that `block` follows a root, where it was published behind that."""
        if block in self._hash_of and block not in self._root_of and self._parents[block] == root.serial:
            if not root.num_blocks:
                self._rollback.keep_absence(self._roots, (namespace,))
                self._roots[namespace] = root
            self._root_of[block] = namespace, root
            root.num_blocks += 1

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
        if self.other_tables is not None:
            self.other_tables.check(self._hash_of.keys())

    def forget(self, blocks: Sequence[int]) -> Iterable[tuple[int, Hash]]:
        """Withdraw the publications of `blocks`, and what is of no use without them; the first table's, with their
        hashes.
        """
        if self.other_tables is not None:
            blocks = self.other_tables.withdraw(blocks)
        hashes = list(map(self._hash_of.__getitem__, blocks))
        self._rollback.append((self._publish_again, blocks, hashes))
        deque(map(self._hash_of.__delitem__, blocks), maxlen=0)
        deque(map(self._block_of.__delitem__, hashes), maxlen=0)
        self.published.difference_update(blocks)
        if not self._root_of.keys().isdisjoint(blocks):
            for block in self._root_of.keys() & blocks:
                namespace, root = self._root_of.pop(block)
                root.num_blocks -= 1
                if not root.num_blocks and self._roots.get(namespace) is root:
                    self.forget_root(namespace)
        return zip(blocks, hashes, strict=True)

    def _publish_again(self, blocks: Sequence[int], hashes: Sequence[Hash]) -> None:
        self._hash_of.update(zip(blocks, hashes, strict=True))

    def recount(self) -> None:
        """See what follows from the published blocks and the roots, as far as those were put back."""
        self.published.clear()
        self.published.update(self._hash_of)
        self._block_of = {hash_: block for block, hash_ in self._hash_of.items()}
        roots = {root.serial: (namespace, root) for namespace, root in self._roots.items()}
        blocks = list(self._hash_of)
        parents = zip(blocks, self._parents[blocks].tolist(), strict=True)
        self._root_of = {block: roots[parent] for block, parent in parents if parent in roots}
        for _, root in roots.values():
            root.num_blocks = 0
        for _, root in self._root_of.values():
            root.num_blocks += 1
        if self.other_tables is not None:
            self.other_tables.recount()

    def _pack(self, token_ids: list[int], first: int, last: int) -> TokenArray:
        """Blocks `first` up to `last`, [n, block_size]."""
        size = self._block_size
        return pack(token_ids[first * size : last * size]).reshape(-1, size)

    def _next_serial(self) -> int:
        self._last_serial += 1
        return self._last_serial
