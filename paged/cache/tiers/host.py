"""Host tier of the prefix cache: blocks that the device evicts stay in host memory until a prompt begins with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paged.cache.tiers.block_file import BlockKey, StoredBlock
from paged.cache.tiers.files import FileRead, FileTier, Position, Write
from paged.cache.tiers.host_events import HostBlockRemoved, HostBlockStored, HostEvent
from paged.cache.tiers.states import StateTier

if TYPE_CHECKING:
    from paged.cache.guard import CacheGuard
    from paged.cache.kv_cache import PagedKvCacheConfig
    from paged.cache.pool import BlockPool
    from paged.cache.prefix_index import PrefixIndex
    from paged.cache.tensors import KvCacheTensors
    from paged.cache.token_chain import Hash


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

    files: the tier below; what is stored here is written there, too. states: the tier of recurrent layers' states.
    entries: by host block. pool: set by the manager, with `entries` as the published blocks.
    """

    pool: BlockPool
    files: FileTier | None = None
    states: StateTier | None = None

    def __init__(
        self, config: PagedKvCacheConfig, tensors: KvCacheTensors, index: PrefixIndex, guard: CacheGuard
    ) -> None:
        self.entries: dict[int, HostEntry] = {}
        self._hosts: dict[tuple[Hash, int], int] = {}
        self._tensors = tensors
        self._index = index
        self._block_size = config.block_size
        # Tables without whose blocks a position is of no use; those with a window lack most.
        self._needed = [0]
        for column, table in enumerate(config.tables[1:], 1):
            if not table.sliding_window:
                self._needed.append(column)
        self._num_tables = len(config.tables)
        self._rollback, self._listeners, self._counts = guard.rollback, guard.listeners, guard.counts

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
        self.pool.share(present)
        self.pool.release(present)  # most recently used now
        num_stored = min(len(sources), self.pool.num_free)
        self._counts.add("host_dropped_blocks", len(sources) - num_stored)
        if num_stored:
            hosts = self.pool.allocate(num_stored)
            self._tensors.swap_out(list(zip(sources, hosts, strict=False)))
            self._enter(hosts, entries[:num_stored])
            self._counts.add("host_stored_blocks", num_stored)
            if self.files is not None:
                self.files.write([self._write_of(host, self.files.digest) for host in hosts])

    def find(
        self, token_ids: list[int], namespace: Hashable, hashes: Sequence[Hash]
    ) -> tuple[NDArray[np.int64], list[Hash]]:
        """Return the host blocks that a prompt can use, by position and table, 0 for none; and the positions' hashes.

        The rows are those of the positions on the device, and further ones as far as the host has a block of the first
        table and of all needed ones. Nothing changes.

        hashes: of the positions that the device has.
        """
        size, num_tables = self._block_size, self._num_tables
        rows: list[list[int]] = []
        known: list[Hash] = []
        previous = self._index.root_hash(namespace)
        if hashes and num_tables == 1:  # the device lacks nothing at its positions
            rows = [[0]] * len(hashes)
            known, previous = list(hashes), hashes[-1]
        for start in range(len(rows) * size, len(token_ids) - size + 1, size):
            ids = token_ids[start : start + size]
            is_on_device = len(rows) < len(hashes)
            if is_on_device:
                previous = hashes[len(rows)]
            else:
                previous = self._index.next_hash(previous, ids)
            row = [self._host_of(previous, column, ids) for column in range(num_tables)]
            if not is_on_device and not all(row[index] for index in self._needed):
                break
            known.append(previous)
            rows.append(row)
        return np.array(rows, np.int64).reshape(len(rows), num_tables), known

    def count(self, num_tokens: int, *, is_hit: bool) -> None:
        """Count a prompt that the device lacks so many tokens of."""
        self._counts.add("host_hits" if is_hit else "host_misses", 1)
        self._counts.add("host_query_tokens", num_tokens)

    def load(self, hosts: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy entries to blocks of the device, and release them: `pool.share` has kept them for this call."""
        self._tensors.swap_in(list(zip(hosts, blocks, strict=True)))
        self.pool.release(hosts)
        self._counts.add("host_loaded_blocks", len(hosts))

    def read(self, token_ids: list[int], namespace: Hashable, known: Sequence[Hash]) -> FileRead:
        """Begin to read blocks that a prompt continues with from files.

        known: hashes of the positions that the device or the host has.
        """
        assert self.files is not None
        size = self._block_size
        previous = self._index.root_hash(namespace)
        if known:
            previous = known[-1]
        positions: list[Position] = []
        for start in range(len(known) * size, len(token_ids) - size + 1, size):
            ids = token_ids[start : start + size]
            previous = self._index.next_hash(previous, ids)
            assert isinstance(previous, bytes)
            positions.append(Position(previous, ids))
        return self.files.read(positions)

    def keep(self, read: FileRead, held: Sequence[int]) -> None:
        """Copy blocks that have come from files to the host, in place of any entries but `held`."""
        assert self.files is not None
        blocks: list[tuple[tuple[int, int], StoredBlock]] = []
        places: list[tuple[int, int, int]] = []
        for place, block in self.files.take(read).items():
            if self.states is not None and block.key.column == self.states.column:
                slot = self.states.keep(block)
                if slot:
                    places.append((*place, slot))
            elif (block.key.hash, block.key.column) not in self._hosts:
                blocks.append((place, block))
        self.pool.share(held)
        del blocks[self.pool.num_free :]
        hosts = self.pool.allocate(len(blocks))
        entries: list[HostEntry] = []
        for host, (place, block) in zip(hosts, blocks, strict=True):
            self._tensors.host.write(host, block.data)
            entries.append(HostEntry(block.key.hash, block.key.column, block.token_ids))
            places.append((*place, host))
        if self.files.tell is not None and places:
            self.files.tell("keep_files", (read.number, places))
        self._enter(hosts, entries)
        self.pool.release(held)

    def close(self, timeout_s: float) -> None:
        """Write all entries to files, as far as the time goes; then use no files."""
        assert self.files is not None
        digest = self.files.digest
        writes = [self._write_of(host, digest) for host in self.entries]
        if self.states is not None:
            writes += self.states.writes(digest)
        self.files.close(writes, timeout_s)

    def drop(self, hosts: Sequence[int]) -> None:
        """Forget entries; a rollback does not bring them back, as their memory may have been written."""
        entries = {host: self.entries[host] for host in hosts}
        self._rollback.keep_lost(self._drop_again, entries)
        self._forget(entries)

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
        self._report(HostBlockStored, entries)
        self.pool.release(hosts)

    def _drop_again(self, entries: dict[int, HostEntry]) -> None:
        """Forget after a rollback what a call that failed has dropped, or was about to drop."""
        self._forget(entries)
        self.pool.unpublished(entries)

    def _forget(self, entries: dict[int, HostEntry]) -> None:
        for host, entry in entries.items():
            self.entries.pop(host, None)
            self._hosts.pop((entry.hash, entry.column), None)
        self._report(HostBlockRemoved, entries.values())

    def _report(self, event: type[HostEvent], entries: Iterable[HostEntry]) -> None:
        """Tell listeners of the positions whose first table's block is among the entries."""
        if self._listeners.on_host_event:
            for entry in entries:
                if entry.column == 0:
                    self._listeners.events.append(event(entry.hash))

    def _write_of(self, host: int, digest: bytes) -> Write:
        entry = self.entries[host]
        assert isinstance(entry.hash, bytes)
        key = BlockKey(digest, entry.hash, entry.column)
        read = partial(self._tensors.host.read, host)
        return Write(host, key, entry.token_ids, read, lambda: self.entries.get(host) is entry)

    def _host_of(self, hash_: Hash, column: int, ids: list[int]) -> int:
        host = self._hosts.get((hash_, column), 0)
        if host and self.entries[host].token_ids != ids:
            return 0
        return host
