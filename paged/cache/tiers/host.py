"""Host tier of the prefix cache: blocks that the device evicts stay in host memory until a prompt begins with them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from paged.cache.guard import Rollback
    from paged.cache.pool import BlockPool
    from paged.cache.prefix_index import PrefixIndex
    from paged.cache.tensors import KvCacheTensors
    from paged.cache.token_chain import Hash

_COUNTS = ("num_stored", "num_loaded", "num_dropped", "num_hits", "num_misses")


@dataclass(frozen=True, eq=False, slots=True)
class HostEntry:
    """What a host block holds: the K/V of one block table at one position of a chain.

    Attributes:
        hash, column: chained hash of the position, and index of the table.
        token_ids: the position's ids, compared on every hit.
    """

    hash: Hash
    column: int
    token_ids: list[int]


class HostTier:
    """Published blocks in host memory, found by their chained hash and table. The caller holds the cache's lock.

    Host blocks are those of the swap space: blocks of swapped sequences are in use, entries are free blocks that hold
    something, and go first where the swap space needs them. Entries are evicted least recently used first, and the
    tail of a prefix before its head. Copies are ordered on the device as those of a swap are.

    A call that fails leaves no new entry; entries that it has replaced stay replaced.

    entries: by host block. pool: set by the manager, with `entries` as the published blocks.
    num_stored, num_loaded: blocks copied to the host and back. num_dropped: evicted blocks that found no host block.
    num_hits, num_misses: prompts that a look-up has continued from here, or not.
    """

    pool: BlockPool

    def __init__(self, tensors: KvCacheTensors, index: PrefixIndex, block_size: int, rollback: Rollback) -> None:
        self.entries: dict[int, HostEntry] = {}
        self.num_stored = self.num_loaded = self.num_dropped = 0
        self.num_hits = self.num_misses = 0
        self._hosts: dict[tuple[Hash, int], int] = {}
        self._tensors = tensors
        self._index = index
        self._block_size = block_size
        self._rollback = rollback

    def store(self, blocks: Sequence[int]) -> None:
        """Copy published blocks, which are about to be withdrawn, to the host, unless it has them."""
        present: list[int] = []
        sources: list[int] = []
        entries: list[HostEntry] = []
        # The pool evicts tails first. The host keeps heads longest, so they come first here.
        for first, column, block in reversed(self._index.withdrawn_with(blocks)):
            hash_ = self._index.hash_of(first)
            assert hash_ is not None
            host = self._hosts.get((hash_, column))
            if host is not None:
                present.append(host)
                continue
            sources.append(block)
            entries.append(HostEntry(hash_, column, self._index.ids_of(first)))
        self.pin(present)
        self.pool.release(present)  # most recently used now
        num_stored = min(len(sources), self.pool.num_free)
        self._rollback.keep_fields(self, _COUNTS)
        self.num_dropped += len(sources) - num_stored
        if num_stored:
            hosts = self.pool.allocate(num_stored)
            self._tensors.swap_out(list(zip(sources, hosts, strict=False)))
            self._enter(hosts, entries[:num_stored])
            self.num_stored += num_stored

    def find(
        self, token_ids: list[int], namespace: Hashable, hashes: Sequence[Hash], is_needed: Sequence[bool]
    ) -> NDArray[np.int64]:
        """Return the host blocks that a prompt can use, by position and table; 0 for none.

        The rows are those of the positions on the device, and further ones as far as the host has a block of the first
        table and of all needed ones.

        hashes: of the positions that the device has. is_needed: whether each table has no window.
        """
        size = self._block_size
        rows: list[list[int]] = []
        previous = self._index.root_hash(namespace)
        if hashes and len(is_needed) == 1:  # the device lacks nothing at its positions
            rows = [[0]] * len(hashes)
            previous = hashes[-1]
        for start in range(len(rows) * size, len(token_ids) - size + 1, size):
            ids = token_ids[start : start + size]
            is_on_device = len(rows) < len(hashes)
            if is_on_device:
                previous = hashes[len(rows)]
            else:
                previous = self._index.next_hash(previous, ids)
            row = [self._host_of(previous, column, ids) for column in range(len(is_needed))]
            if not is_on_device:
                has_needed = all(host for host, needed in zip(row, is_needed, strict=True) if needed)
                if not row[0] or not has_needed:
                    break
            rows.append(row)
        self._rollback.keep_fields(self, _COUNTS)
        self.num_hits += len(rows) > len(hashes)
        self.num_misses += len(rows) <= len(hashes)
        return np.array(rows, np.int64).reshape(len(rows), len(is_needed))

    def pin(self, hosts: Sequence[int]) -> None:
        """Keep entries until `load`, or a release, however much is stored meanwhile."""
        self.pool.share(hosts)

    def load(self, hosts: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy pinned entries to blocks of the device, and unpin them."""
        self._tensors.swap_in(list(zip(hosts, blocks, strict=True)))
        self.pool.release(hosts)
        self._rollback.keep_fields(self, _COUNTS)
        self.num_loaded += len(hosts)

    def drop(self, hosts: Sequence[int]) -> None:
        """Forget entries; a rollback does not bring them back, as their memory may have been written."""
        for host in hosts:
            entry = self.entries.pop(host)
            del self._hosts[entry.hash, entry.column]

    def clear(self) -> None:
        """Forget all entries."""
        hosts = list(self.entries)
        self.drop(hosts)
        self.pool.unpublished(hosts)

    def recount(self) -> None:
        """Derive the rest from `entries`, from which a rollback has removed what is new."""
        self._hosts = {(entry.hash, entry.column): host for host, entry in self.entries.items()}

    def _enter(self, hosts: Sequence[int], entries: Sequence[HostEntry]) -> None:
        """Make host blocks findable that have just been taken and written."""
        self._rollback.keep_absence(self.entries, hosts)
        for host, entry in zip(hosts, entries, strict=True):
            self.entries[host] = entry
            self._hosts[entry.hash, entry.column] = host
        self.pool.release(hosts)

    def _host_of(self, hash_: Hash, column: int, ids: list[int]) -> int:
        host = self._hosts.get((hash_, column), 0)
        if host and self.entries[host].token_ids != ids:
            return 0
        return host
