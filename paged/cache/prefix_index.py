"""Index of published full blocks by their chain of tokens, so that prompts reuse K/V."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from paged.cache.guard import Rollback
from paged.cache.token_chain import (
    FEW_BLOCKS,
    ChainHash,
    Contents,
    Hash,
    PackedIds,
    Sha256Chain,
    TokenArray,
    TokenChain,
    pack,
)
from paged.errors import PagedError

# A look-up hashes one block in its first round, and in each further round this many times as many as before. It ends
# with the round that misses a block. Most prompts miss the first block or find nearly all, so few blocks are hashed in
# vain, see limits.md.
_LOOKUP_GROWTH = 256

_Location = tuple[int, int]
"""Location of a published block: the first table's block at its position, and the index of its own table."""


@dataclass(eq=False, slots=True)
class _Root:
    """Parent of the first published blocks of a namespace; dropped with its last child."""

    hash: Hash
    serial: int
    num_blocks: int = 0


class PrefixIndex:
    """Published blocks by the hashes of their positions; a position is known by the first table's block.

    The blocks of further tables at a position are published beside it. The tables that see all tokens come first; a
    position and its blocks of these tables are withdrawn together. Other blocks may be missing.

    A hit also compares the token ids and the serial number of the block before, which is unique to a publication.
    Therefore chains or namespaces whose hashes collide never get each other's K/V.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        algorithm: str,
        rollback: Rollback | None = None,
        num_tables: int = 1,
        num_whole: int = 1,
    ) -> None:
        """num_whole: see `PagedKvCacheConfig.num_whole`."""
        self._rollback = Rollback() if rollback is None else rollback
        self._block_size = block_size
        self._chain: ChainHash | Sha256Chain = ChainHash(block_size) if algorithm == "fast" else Sha256Chain()
        # Published blocks of all tables. The pool refers to this set object, so never assign a new set.
        self.published: set[int] = set()
        self._block_of: dict[Hash, int] = {}
        self._hash_of: dict[int, Hash] = {}
        # Token ids of each block's publication; rows of unpublished blocks are stale.
        self._tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self._serials = np.zeros(num_blocks + 1, np.int64)
        self._parents = np.zeros(num_blocks + 1, np.int64)
        # Full ids of the blocks that contain a `content_id`.
        self._contents: dict[int, list[int]] = {}
        self._last_serial = 0
        self._roots: dict[Hashable, _Root] = {}
        # How often each namespace was retired; part of the hash of its root.
        self._num_retired: dict[Hashable, int] = {}
        # Maps a namespace to a value that differs if the same name means something new.
        self.identify: Callable[[Hashable], Hashable] = lambda namespace: namespace
        # Namespace and root of each published block that follows a root.
        self._root_of: dict[int, tuple[Hashable, _Root]] = {}
        # Called with withdrawn blocks of the first table, and with all withdrawn blocks.
        self.on_forget: Callable[[Sequence[int], Sequence[int]], None] = lambda firsts, blocks: None
        self._num_tables, self._num_whole = num_tables, num_whole
        # Published blocks of all tables at the position of each block of the first table; 0 if missing.
        self.rows = np.zeros((num_blocks + 1, num_tables), np.int32)
        self.rows[:, 0] = np.arange(num_blocks + 1)
        # Locations of the published blocks of further tables.
        self.locations: dict[int, _Location] = {}

    def block_of(self, chain: TokenChain, count: int) -> int | None:
        """Return the published block at the end of a chain's first `count` blocks, or None."""
        if not 0 < count <= len(chain.serials):
            return None
        block = self._block_of.get(chain.hashes[count - 1])
        if block is None or self._serials[block] != chain.serials[count - 1]:
            return None
        return block

    @property
    def namespaces(self) -> KeysView[Hashable]:
        """Namespaces with published blocks that a prompt can begin with; a live view."""
        return self._roots.keys()

    def forget_root(self, namespace: Hashable) -> None:
        """Hide all earlier publications of a namespace. Later roots get new serials, so the old chains never match."""
        root = self._roots.get(namespace)
        if root is not None:
            self._rollback.append((self._roots.__setitem__, namespace, root))
            del self._roots[namespace]

    def retire(self, namespace: Hashable) -> None:
        """Hide all earlier publications of a namespace, also in tiers, by another hash for its next root."""
        self.forget_root(namespace)
        count = self._num_retired.get(namespace, 0)
        self._rollback.append((self._num_retired.__setitem__, namespace, count))
        self._num_retired[namespace] = count + 1

    def root_hash(self, namespace: Hashable) -> Hash:
        """Return the hash that precedes the first block of a namespace."""
        root = self._roots.get(namespace)
        if root is not None:
            return root.hash
        hash_ = self._chain.root(self.identify(namespace))
        count = self._num_retired.get(namespace, 0)
        return self._chain.root((hash_, count)) if count else hash_

    def withdrawn_with(self, blocks: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (block of the first table, index of the table, block) for each block that `forget` would withdraw."""
        if self._num_tables == 1:
            return [(block, 0, block) for block in blocks]
        withdrawn: dict[int, _Location] = {}
        for block in blocks:
            first, table = self.locations.get(block, (block, 0))
            if table >= self._num_whole:
                withdrawn[block] = first, table
                continue
            for index, beside in enumerate(self.rows[first].tolist()):
                if beside:
                    withdrawn[beside] = first, index
        return [(first, table, block) for block, (first, table) in withdrawn.items()]

    def next_hash(self, previous: Hash, ids: list[int]) -> Hash:
        """Return the chained hash of a block with these ids after the block with hash `previous`."""
        tokens, has_contents = pack(ids)
        contents: Contents | None = None
        if has_contents:
            contents = [ids]
        return self._chain.extend(previous, tokens[None], contents)[0]

    def hash_of(self, block: int) -> Hash | None:
        """Return the chained hash of a published block of the first table, or None."""
        return self._hash_of.get(block)

    def ids_of(self, block: int) -> list[int]:
        """Return all ids of a published block of the first table."""
        contents = self._contents.get(block)
        return self._tokens[block].tolist() if contents is None else contents

    def match(self, token_ids: list[int], namespace: Hashable) -> tuple[list[int], TokenChain]:
        """Return the longest published chain of full blocks that `token_ids` begins with: block ids and TokenChain."""
        root = self._roots.get(namespace)
        if root is None:
            return [], TokenChain()
        num_blocks = len(token_ids) // self._block_size
        blocks: list[int] = []
        hashes: list[Hash] = []
        packed, has_contents = b"", False
        previous, size = root.hash, 1
        while len(blocks) == len(hashes) < num_blocks:
            first = len(hashes)
            last = min(first + size, num_blocks)
            tokens, is_short = self._pack(token_ids, first, last)
            new_contents = None
            if is_short:
                has_contents = True
                new_contents = self._contents_of(token_ids[first * self._block_size : last * self._block_size])
            packed += tokens.tobytes()
            hashes += self._chain.extend(previous, tokens, new_contents)
            blocks += map(self._block_of.get, hashes[first:], repeat(0))  # no block has id 0
            if 0 in blocks:
                del blocks[blocks.index(0) :]
            previous = hashes[-1]
            size *= _LOOKUP_GROWTH
        if not blocks:
            return [], TokenChain()
        ids = np.array(blocks, np.int64)
        tokens = self._tokens.take(ids, axis=0)
        serials, parents = self._serials.take(ids).tolist(), self._parents.take(ids).tolist()
        expected_parents = [root.serial, *serials[:-1]]
        length, packed = len(blocks), packed[: tokens.nbytes]
        # Compare lists and bytes: NumPy's comparisons are slower, because their code is cold in the CPU's caches.
        if parents != expected_parents or tokens.tobytes() != packed:
            is_same = (tokens == np.frombuffer(packed, np.int32).reshape(tokens.shape)).all(axis=1)
            is_next = np.array(parents) == expected_parents
            length = int((is_same & is_next).argmin())
        if has_contents or not self._contents.keys().isdisjoint(blocks):
            contents = self._contents_of(token_ids[: length * self._block_size])
            for i in range(length):
                if self._contents.get(blocks[i]) != contents[i]:
                    length = i
                    break
        del blocks[length:], hashes[length:], serials[length:]
        return blocks, TokenChain(token_ids[: length * self._block_size], hashes, serials)

    def publications(self) -> Iterator[tuple[int, int, int, Hash | None]]:
        """Yield the published blocks of the first table behind their parents. Slow.

        Each with its serial number, its parent's, and the hash of its root if that is its parent.
        """
        blocks = np.array(list(self._hash_of), np.int64)
        for block in blocks[self._serials[blocks].argsort()].tolist():
            root = None
            if block in self._root_of:
                root = self._root_of[block][1].hash
            yield block, int(self._serials[block]), int(self._parents[block]), root

    def publish(
        self,
        blocks: Sequence[int],
        chain: TokenChain,
        namespace: Hashable,
        rows: Sequence[Sequence[int]] = (),
        packed: PackedIds | None = None,
    ) -> list[tuple[int, Hash]]:
        """Publish `blocks`, which follow the published chain and hold its next ids.

        If the same tokens are already published, that publication stays and the chain continues from it. If different
        content is published under the same hash, it stays and the chain ends, because later blocks could not be found.
        Such content is replaced only if it cannot be found itself because its parent is gone.

        rows: with several tables, for each of `blocks` the blocks of all tables, 0 if missing. An existing publication
        gets the blocks that it lacks. packed: the result of `pack` for the ids of `blocks`, if known.

        Returns:
            (block, hash) of replaced blocks, and of blocks among `blocks` that were published with earlier content.
        """
        if not blocks:
            return []
        first = len(chain.serials)
        if packed is None:
            packed = pack(chain.ids[first * self._block_size : (first + len(blocks)) * self._block_size])
        tokens, has_contents = packed[0].reshape(-1, self._block_size), packed[1]
        contents: Contents = [None] * len(blocks)
        if has_contents:
            contents = self._contents_of(chain.ids[first * self._block_size :][: tokens.size])
        root = None
        if first:
            previous_hash, previous = chain.hashes[-1], chain.serials[-1]
        else:
            root = self._roots.get(namespace) or _Root(self.root_hash(namespace), self._next_serial())
            previous_hash, previous = root.hash, root.serial
        hashes = self._chain.extend(previous_hash, tokens, contents if has_contents else None)
        serials: Sequence[int]
        displaced: list[tuple[int, Hash]] = []
        if len(blocks) > FEW_BLOCKS and self._are_new(blocks, hashes):
            first_serial = self._last_serial + 1
            parents = [previous, *range(first_serial, first_serial + len(blocks) - 1)]
            serials = self._publish_new(blocks, tokens, hashes, parents)
            if has_contents or self._contents:
                for block, ids in zip(blocks, contents, strict=True):
                    self._set_contents(block, ids)
        else:
            serials, displaced = self._publish_each(blocks, tokens, hashes, contents, previous)
        if root is not None:
            self._follow(root, namespace, blocks[0])
        self._rollback.keep_end(chain.hashes, first)
        self._rollback.keep_end(chain.serials, first)
        chain.hashes += hashes[: len(serials)]
        chain.serials += serials
        for hash_, row in zip(chain.hashes[first:], rows, strict=False):
            displaced += self.complete(self._block_of[hash_], row)
        return displaced

    def complete(self, first: int, row: Sequence[int]) -> list[tuple[int, Hash]]:
        """Publish the blocks in `row` that the position of `first` lacks; return what they displace, like `publish`."""
        displaced: list[tuple[int, Hash]] = []
        for table, (block, present) in enumerate(zip(row, self.rows[first].tolist(), strict=True)):
            if block and not present:
                if block in self.locations:  # still published with its earlier content
                    displaced += self.forget([block])
                self._rollback.keep_absence(self.locations, (block,))
                self.rows[first, table] = block
                self.locations[block] = first, table
                self.published.add(block)
        return displaced

    def publish_one_each(self, blocks: Sequence[int], chains: Sequence[TokenChain]) -> bool:
        """Publish the next block of several chains at once; False, and none published, if a block is not new."""
        size = self._block_size
        token_ids: list[int] = []
        for chain in chains:
            start = len(chain.serials) * size
            token_ids += chain.ids[start : start + size]
        tokens, has_contents = self._pack(token_ids, 0, len(blocks))
        hashes = self._chain.extend_each([chain.hashes[-1] for chain in chains], tokens)
        parents, rows = [chain.serials[-1] for chain in chains], np.array(blocks, np.int64)
        if has_contents or self._contents or not self._are_new(blocks, hashes):
            return False
        # A block republished with the same content must keep its serial, see `_publish_each`.
        if ((self._parents[rows] == parents) & (self._tokens[rows] == tokens).all(axis=1)).any():
            return False
        self._rollback.append((_shorten, chains, [len(chain.serials) for chain in chains]))
        serials = self._publish_new(blocks, tokens, hashes, parents)
        for chain, hash_, serial in zip(chains, hashes, serials, strict=True):
            chain.hashes.append(hash_)
            chain.serials.append(serial)
        return True

    def _are_new(self, blocks: Sequence[int], hashes: Sequence[Hash]) -> bool:
        """Return whether no block is published, and their hashes are unpublished and distinct."""
        if not self._hash_of.keys().isdisjoint(blocks) or not self._block_of.keys().isdisjoint(hashes):
            return False
        return len(set(hashes)) == len(hashes)

    def _publish_new(
        self, blocks: Sequence[int], tokens: TokenArray, hashes: Sequence[Hash], parents: Sequence[int]
    ) -> Sequence[int]:
        """Publish new blocks at once; return their serials."""
        self._rollback.keep_absence(self._hash_of, blocks)
        first = self._last_serial + 1
        self._last_serial += len(blocks)
        ids = np.array(blocks, np.int64)
        self._tokens[ids], self._parents[ids] = tokens, parents
        self._serials[ids] = np.arange(first, first + len(blocks))
        self._hash_of.update(zip(blocks, hashes, strict=True))
        self._block_of.update(zip(hashes, blocks, strict=True))
        self.published.update(blocks)
        return range(first, first + len(blocks))

    def _publish_each(
        self,
        blocks: Sequence[int],
        tokens: TokenArray,
        hashes: Sequence[Hash],
        contents: Contents,
        previous: int,
    ) -> tuple[list[int], list[tuple[int, Hash]]]:
        """Publish block by block; return the serials up to the first hash collision, and the result of `publish`.

        The children of a publication replaced here are unfindable, so they are left as they are.
        """
        serials: list[int] = []
        displaced: list[tuple[int, Hash]] = []
        dead: set[int] = set()
        for block, row, hash_, ids in zip(blocks, tokens, hashes, contents, strict=True):
            present = self._block_of.get(hash_)
            if present is not None:
                if self._is_publication(present, previous, row, ids):
                    previous = int(self._serials[present])
                    serials.append(previous)
                    continue
                if present != block:
                    if int(self._parents[present]) not in dead and self._is_findable(present):
                        break
                    dead.add(int(self._serials[present]))
                    displaced += self.forget([present])
            if block in self._hash_of:  # published before its sequence wrote over it
                displaced += self.forget([block])
            # The same content keeps its serial, so that longer chains from it are found again. For example, a prompt's
            # last block is withdrawn while its last token is computed.
            is_same = self._is_publication(block, previous, row, ids)
            serial = int(self._serials[block]) if is_same else self._next_serial()
            self._set_contents(block, ids)
            self._rollback.keep_absence(self._hash_of, (block,))
            self._block_of[hash_], self._hash_of[block] = block, hash_
            self.published.add(block)
            self._tokens[block], self._parents[block], self._serials[block] = row, previous, serial
            previous = serial
            serials.append(previous)
        for block in blocks[len(serials) :]:
            if block in self._hash_of:
                displaced += self.forget([block])
        return serials, displaced

    def _is_publication(self, block: int, parent: int, tokens: TokenArray, contents: list[int] | None) -> bool:
        """Return whether a block's last publication had this content and this parent."""
        is_same = self._parents[block] == parent and (self._tokens[block] == tokens).all()
        return bool(is_same) and self._contents.get(block) == contents

    def _set_contents(self, block: int, ids: list[int] | None) -> None:
        if ids is None:
            self._contents.pop(block, None)
        else:
            self._contents[block] = ids

    def _contents_of(self, ids: list[int]) -> list[list[int] | None]:
        """Return the ids of each block that contains a `content_id`, None for blocks of tokens only."""
        size = self._block_size
        contents: list[list[int] | None] = []
        for start in range(0, len(ids), size):
            block = ids[start : start + size]
            _, has_contents = pack(block)
            contents.append(block if has_contents else None)
        return contents

    def _is_findable(self, block: int) -> bool:
        """Return whether a published block's parent exists (a root or a published block). Slow."""
        parent = int(self._parents[block])
        is_first = any(root.serial == parent for root in self._roots.values())
        return is_first or bool((self._serials[list(self._hash_of)] == parent).any())

    def _follow(self, root: _Root, namespace: Hashable, block: int) -> None:
        """Note that `block` follows a root, if its chain is empty."""
        if block in self._hash_of and block not in self._root_of and self._parents[block] == root.serial:
            if not root.num_blocks:
                self._rollback.keep_absence(self._roots, (namespace,))
                self._roots[namespace] = root
            self._root_of[block] = namespace, root
            root.num_blocks += 1

    def check(self) -> None:
        """Raise PagedError unless blocks and hashes of the index agree."""
        for block, hash_ in self._hash_of.items():
            if self._block_of.get(hash_) != block:
                raise PagedError(f"block {block} is published under a hash of block {self._block_of.get(hash_)}")
        if len(self._block_of) != len(self._hash_of):
            raise PagedError(f"{len(self._block_of)} hashes, but {len(self._hash_of)} published blocks")
        for block, (first, table) in self.locations.items():
            if first not in self._hash_of or self.rows[first, table] != block:
                raise PagedError(f"block {block} is published beside block {first}, but not the reverse")
        num_beside = np.count_nonzero(self.rows[:, 1:])
        if num_beside != len(self.locations):
            raise PagedError(f"{num_beside} blocks beside others, {len(self.locations)} published")
        for first in self._hash_of:
            if not self.rows[first, : self._num_whole].all():
                raise PagedError(f"block {first} is published without its blocks of further tables")

    def forget(self, blocks: Sequence[int]) -> Iterable[tuple[int, Hash]]:
        """Withdraw `blocks` and the blocks that need them; return (block, hash) of the first table's blocks."""
        firsts = blocks
        if self._num_tables > 1:
            firsts, blocks = self._forget_beside(blocks)
        hashes = list(map(self._hash_of.__getitem__, firsts))
        self._rollback.append((self._publish_again, firsts, hashes))
        deque(map(self._hash_of.__delitem__, firsts), maxlen=0)
        deque(map(self._block_of.__delitem__, hashes), maxlen=0)
        self.published.difference_update(blocks)
        self.on_forget(firsts, blocks)
        if not self._root_of.keys().isdisjoint(firsts):
            for block in self._root_of.keys() & firsts:
                namespace, root = self._root_of.pop(block)
                root.num_blocks -= 1
                if not root.num_blocks and self._roots.get(namespace) is root:
                    self.forget_root(namespace)
        return zip(firsts, hashes, strict=True)

    def _forget_beside(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Withdraw the blocks of further tables; return the first table's blocks to withdraw, and all blocks."""
        firsts: list[int] = []
        locations: dict[int, _Location] = {}
        for first, table, block in self.withdrawn_with(blocks):
            if table:
                locations[block] = first, table
            else:
                firsts.append(block)
        self._rollback.append((self.locations.update, locations))
        for block, location in locations.items():
            del self.locations[block]
            self.rows[location] = 0
        return firsts, [*firsts, *locations]

    def _publish_again(self, blocks: Sequence[int], hashes: Sequence[Hash]) -> None:
        self._hash_of.update(zip(blocks, hashes, strict=True))

    def recount(self) -> None:
        """Derive all other fields from the published blocks and roots, which a rollback has restored."""
        self.published.clear()
        self.published.update(self._hash_of)
        self._block_of = {hash_: block for block, hash_ in self._hash_of.items()}
        roots: dict[int, tuple[Hashable, _Root]] = {}
        for namespace, root in self._roots.items():
            root.num_blocks = 0
            roots[root.serial] = namespace, root
        self._root_of = {}
        blocks = list(self._hash_of)
        for block, parent in zip(blocks, self._parents[blocks].tolist(), strict=True):
            if parent in roots:
                self._root_of[block] = roots[parent]
                roots[parent][1].num_blocks += 1
        self.rows[:, 1:] = 0
        self.published.update(self.locations)
        for block, location in self.locations.items():
            self.rows[location] = block

    def _pack(self, token_ids: list[int], first: int, last: int) -> tuple[TokenArray, bool]:
        """Return the packed ids of blocks `first` to `last`, [n, block_size], see `pack`."""
        size = self._block_size
        tokens, has_contents = pack(token_ids[first * size : last * size])
        return tokens.reshape(-1, size), has_contents

    def _next_serial(self) -> int:
        self._last_serial += 1
        return self._last_serial


def _shorten(chains: Iterable[TokenChain], counts: Iterable[int]) -> None:
    for chain, count in zip(chains, counts, strict=True):
        del chain.hashes[count:], chain.serials[count:]
