"""Index of published full blocks by their chain of tokens, so that prompts can reuse K/V."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, KeysView, Sequence, Set
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from paged.cache.guard import Rollback
from paged.cache.token_chain import FEW_BLOCKS, ChainHash, Contents, Hash, Sha256Chain, TokenArray, TokenChain, pack
from paged.errors import PagedError

# A look-up hashes one block first, then this many times more per round, until a round misses a block. Most prompts miss
# the first block or find nearly all; hashing 256 blocks in vain takes 50 us.
_LOOKUP_GROWTH = 256

_Location = tuple[int, int]
"""The block of the first table, and the column of a further table."""


class OtherTables:
    """Published blocks of further tables. Blocks of tables without a window are withdrawn together; behind a window
    they may be missing.

    rows: the blocks beside each block of the first table, [blocks, further tables], 0 for a missing one.
    on_withdrawn: called with blocks that are withdrawn together with others.
    """

    def __init__(self, num_blocks: int, are_needed: Sequence[bool], published: set[int], rollback: Rollback) -> None:
        """are_needed: whether each further table has no window, so that its blocks must not be missing."""
        self.on_withdrawn: Callable[[list[int]], None] = lambda blocks: None
        self.are_needed = are_needed
        self._published = published
        self._rollback = rollback
        self.rows = np.zeros((num_blocks + 1, len(are_needed)), np.int32)
        self.locations: dict[int, _Location] = {}

    def add(self, other: int, block: int, column: int) -> None:
        """Publish `other`, an unpublished block, beside `block`."""
        self._rollback.keep_absence(self.locations, (other,))
        self.rows[block, column] = other
        self.locations[other] = block, column
        self._published.add(other)

    def withdrawn_with(self, blocks: Sequence[int]) -> dict[int, _Location]:
        """Return published blocks and those that need them, each with its location; of the first table's, column -1."""
        withdrawn: dict[int, _Location] = {}
        for block in blocks:
            first, column = self.locations.get(block, (block, -1))
            if column >= 0 and not self.are_needed[column]:
                withdrawn[block] = first, column
                continue
            withdrawn[first] = first, -1
            for index, other in enumerate(self.rows[first].tolist()):
                if other:
                    withdrawn[other] = first, index
        return withdrawn

    def withdraw(self, blocks: Sequence[int]) -> list[int]:
        """Withdraw blocks of further tables by `withdrawn_with`; return those of the first table, for the index."""
        firsts: list[int] = []
        locations: dict[int, _Location] = {}
        for block, location in self.withdrawn_with(blocks).items():
            if location[1] < 0:
                firsts.append(block)
            else:
                locations[block] = location
        self._rollback.append((self.locations.update, locations))
        for block, location in locations.items():
            del self.locations[block]
            self._published.remove(block)
            self.rows[location] = 0
        known = set(blocks)
        self.on_withdrawn([block for block in (*firsts, *locations) if block not in known])
        return firsts

    def check(self, published: Set[int]) -> None:
        """Raise PagedError unless both directions agree and nothing is published beside an unpublished block."""
        for block, (first, column) in self.locations.items():
            if first not in published or self.rows[first, column] != block:
                raise PagedError(f"block {block} is published beside block {first}, but not the reverse")
        if np.count_nonzero(self.rows) != len(self.locations):
            raise PagedError(f"{np.count_nonzero(self.rows)} blocks beside others, {len(self.locations)} published")
        for first in published:
            for block, is_needed in zip(self.rows[first].tolist(), self.are_needed, strict=True):
                if is_needed and not block:
                    raise PagedError(f"block {first} is published without its blocks of further tables")

    def recount(self) -> None:
        """Derive the rest from `locations`, which a rollback has restored."""
        self.rows[:] = 0
        self._published.update(self.locations)
        for block, location in self.locations.items():
            self.rows[location] = block


@dataclass(eq=False, slots=True)
class _Root:
    """Parent of the first published blocks of a namespace; dropped when it has none."""

    hash: Hash
    serial: int
    num_blocks: int = 0


class PrefixIndex:
    """Published blocks. With several tables, these are blocks of the first; `other_tables` has the others.

    A hit also compares the token ids, and the serial number of the block before, which is unique to a publication. So
    chains or namespaces whose hashes collide never get each other's K/V.
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
        # Published blocks of all tables; always the same object.
        self.published: set[int] = set()
        self._block_of: dict[Hash, int] = {}
        self._hash_of: dict[int, Hash] = {}
        # Data of each block's publication; rows of unpublished blocks are stale.
        self._tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self._serials = np.zeros(num_blocks + 1, np.int64)
        self._parents = np.zeros(num_blocks + 1, np.int64)
        # All ids of blocks that hold a `content_id`.
        self._contents: dict[int, list[int]] = {}
        self._last_serial = 0
        self._roots: dict[Hashable, _Root] = {}
        # How often a namespace was retired; part of the hash of its root.
        self._num_retired: dict[Hashable, int] = {}
        # What tells a namespace apart from others that have had its name.
        self.identify: Callable[[Hashable], Hashable] = lambda namespace: namespace
        # Namespace and root of each published block that follows a root.
        self._root_of: dict[int, tuple[Hashable, _Root]] = {}
        # Called with the first table's blocks that are withdrawn.
        self.on_forget: Callable[[Iterable[int]], None] = lambda blocks: None
        self.other_tables = OtherTables(num_blocks, are_needed, self.published, self._rollback) if are_needed else None

    def block_of(self, chain: TokenChain, count: int) -> int | None:
        """Return the published block that ends a chain's first `count` blocks; None if it is not published."""
        if not 0 < count <= len(chain.serials):
            return None
        block = self._block_of.get(chain.hashes[count - 1])
        if block is None or self._serials[block] != chain.serials[count - 1]:
            return None
        return block

    @property
    def namespaces(self) -> KeysView[Hashable]:
        """Namespaces in which a prompt can begin with a published block; a view that changes with the index."""
        return self._roots.keys()

    def forget_root(self, namespace: Hashable) -> None:
        """Make all earlier publications of a namespace unfindable. A later root has a new number, so chains from this
        one never match, even if hashes do."""
        root = self._roots.get(namespace)
        if root is not None:
            self._rollback.append((self._roots.__setitem__, namespace, root))
            del self._roots[namespace]

    def retire(self, namespace: Hashable) -> None:
        """Make all earlier publications of a namespace unfindable, in tiers too: its next root has another hash."""
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
        """Return what `forget` would withdraw: block of the first table, index of the table, and block, for each."""
        if self.other_tables is None:
            return [(block, 0, block) for block in blocks]
        withdrawn = self.other_tables.withdrawn_with(blocks)
        return [(first, column + 1, block) for block, (first, column) in withdrawn.items()]

    def next_hash(self, previous: Hash, ids: list[int]) -> Hash:
        """Return the hash of the block with these ids that follows the block with hash `previous`."""
        tokens, has_contents = pack(ids)
        contents: Contents | None = None
        if has_contents:
            contents = [ids]
        return self._chain.extend(previous, tokens[None], contents)[0]

    def hash_of(self, block: int) -> Hash | None:
        """Return the chained hash of a published block of the first table, None for other blocks."""
        return self._hash_of.get(block)

    def ids_of(self, block: int) -> list[int]:
        """Return all ids of a published block of the first table."""
        contents = self._contents.get(block)
        return self._tokens[block].tolist() if contents is None else contents

    def match(self, token_ids: list[int], namespace: Hashable) -> tuple[list[int], TokenChain]:
        """Return the longest published chain of full blocks that `token_ids` begins with: block ids, and the chain."""
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
        # Lists and bytes: NumPy's comparisons are slower, mostly because their code has left the CPU's caches.
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

    def publish(
        self, blocks: Sequence[int], chain: TokenChain, namespace: Hashable, other_rows: Sequence[Sequence[int]] = ()
    ) -> list[tuple[int, Hash]]:
        """Publish `blocks`, which follow the published chain and hold its next ids.

        If a chain's tokens are already published, that publication stays and the chain continues from it. If other
        content has the same hash, it stays and the chain ends, because later blocks could not be found. It is replaced
        only if it cannot be found itself, because its parent is gone.

        other_rows: for each of `blocks` its blocks of further tables, 0 for none. A publication gets those it lacks.

        Returns:
            The replaced blocks, and those of `blocks` that had been published with earlier content, with their hashes.
        """
        if not blocks:
            return []
        first = len(chain.serials)
        tokens, has_contents = self._pack(chain.ids, first, first + len(blocks))
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
        if self.other_tables is not None:
            for hash_, row in zip(chain.hashes[first:], other_rows, strict=False):
                block = self._block_of[hash_]
                for column, other in enumerate(row):
                    if other and not self.other_tables.rows[block, column]:
                        if other in self.other_tables.locations:  # with earlier content
                            displaced += self.forget([other])
                        self.other_tables.add(other, block, column)
        return displaced

    def publish_one_each(self, blocks: Sequence[int], chains: Sequence[TokenChain]) -> bool:
        """Publish the next block of each chain that has begun, all at once; False if one is not new, and none is."""
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
        # Blocks that held the same content before keep their serials, see `_publish_each`.
        if ((self._parents[rows] == parents) & (self._tokens[rows] == tokens).all(axis=1)).any():
            return False
        self._rollback.append((_shorten, chains, [len(chain.serials) for chain in chains]))
        serials = self._publish_new(blocks, tokens, hashes, parents)
        for chain, hash_, serial in zip(chains, hashes, serials, strict=True):
            chain.hashes.append(hash_)
            chain.serials.append(serial)
        return True

    def _are_new(self, blocks: Sequence[int], hashes: Sequence[Hash]) -> bool:
        """Return whether none of the blocks is published, and no published block or other one has its hash."""
        if not self._hash_of.keys().isdisjoint(blocks) or not self._block_of.keys().isdisjoint(hashes):
            return False
        return len(set(hashes)) == len(hashes)

    def _publish_new(
        self, blocks: Sequence[int], tokens: TokenArray, hashes: Sequence[Hash], parents: Sequence[int]
    ) -> Sequence[int]:
        """Publish blocks that are new at once; return their serials."""
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
        """Publish block by block; return the serials up to the first collision, and the result of `publish`.

        Children of a publication that is replaced here are dead, so their parents are not searched.
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
            if block in self._hash_of:  # with the content before its sequence advanced over it
                displaced += self.forget([block])
            # The same content keeps its number, so that longer chains from it are found again: a prompt's last block is
            # withdrawn while its last token is computed.
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
        """Return whether the last publication of a block had this content after that parent."""
        is_same = self._parents[block] == parent and (self._tokens[block] == tokens).all()
        return bool(is_same) and self._contents.get(block) == contents

    def _set_contents(self, block: int, ids: list[int] | None) -> None:
        if ids is None:
            self._contents.pop(block, None)
        else:
            self._contents[block] = ids

    def _contents_of(self, ids: list[int]) -> list[list[int] | None]:
        """Return the ids of each block that holds a `content_id`, None for blocks of tokens alone."""
        size = self._block_size
        contents: list[list[int] | None] = []
        for start in range(0, len(ids), size):
            block = ids[start : start + size]
            _, has_contents = pack(block)
            contents.append(block if has_contents else None)
        return contents

    def _is_findable(self, block: int) -> bool:
        """Return whether a published block's parent exists: a root, or another published block. Slow."""
        parent = int(self._parents[block])
        is_first = any(root.serial == parent for root in self._roots.values())
        return is_first or bool((self._serials[list(self._hash_of)] == parent).any())

    def _follow(self, root: _Root, namespace: Hashable, block: int) -> None:
        """Record that `block` follows a root, if it was published after one."""
        if block in self._hash_of and block not in self._root_of and self._parents[block] == root.serial:
            if not root.num_blocks:
                self._rollback.keep_absence(self._roots, (namespace,))
                self._roots[namespace] = root
            self._root_of[block] = namespace, root
            root.num_blocks += 1

    def check(self) -> None:
        """Raise PagedError unless both directions of the index agree."""
        for block, hash_ in self._hash_of.items():
            if self._block_of.get(hash_) != block:
                raise PagedError(f"block {block} is published under a hash of block {self._block_of.get(hash_)}")
        if len(self._block_of) != len(self._hash_of):
            raise PagedError(f"{len(self._block_of)} hashes, but {len(self._hash_of)} published blocks")
        if self.other_tables is not None:
            self.other_tables.check(self._hash_of.keys())

    def forget(self, blocks: Sequence[int]) -> Iterable[tuple[int, Hash]]:
        """Withdraw `blocks` and the publications that need them; return those of the first table, with their hashes."""
        if self.other_tables is not None:
            blocks = self.other_tables.withdraw(blocks)
        hashes = list(map(self._hash_of.__getitem__, blocks))
        self._rollback.append((self._publish_again, blocks, hashes))
        deque(map(self._hash_of.__delitem__, blocks), maxlen=0)
        deque(map(self._block_of.__delitem__, hashes), maxlen=0)
        self.published.difference_update(blocks)
        self.on_forget(blocks)
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
        """Derive the rest from the published blocks and the roots that a rollback has restored."""
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
        if self.other_tables is not None:
            self.other_tables.recount()

    def _pack(self, token_ids: list[int], first: int, last: int) -> tuple[TokenArray, bool]:
        """Return `pack` of blocks `first` to `last`, [n, block_size]."""
        size = self._block_size
        tokens, has_contents = pack(token_ids[first * size : last * size])
        return tokens.reshape(-1, size), has_contents

    def _next_serial(self) -> int:
        self._last_serial += 1
        return self._last_serial


def _shorten(chains: Iterable[TokenChain], counts: Iterable[int]) -> None:
    for chain, count in zip(chains, counts, strict=True):
        del chain.hashes[count:], chain.serials[count:]
