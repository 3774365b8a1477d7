"""Blocks of one host memory: those of swapped sequences, and published ones that the device has evicted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paged.cache.tiers.block_file import BlockKey, StoredBlock
from paged.cache.tiers.host_events import HostBlockRemoved, HostBlockStored, HostEvent

if TYPE_CHECKING:
    from paged.cache.kinds.kind import CacheParts
    from paged.cache.retention import Priorities
    from paged.cache.token_chain import Hash

NO_NUMBERS = struct.Struct("")
Place = tuple[int, int]
"""Where a block lies in a read of files: index of the position, and of the table."""


class Write(NamedTuple):
    """A block to write to a file, and its place in host memory.

    read: copies the data. is_there: whether the place still holds the data. It becomes false before the place is
    overwritten, so a copy is valid if `is_there` is still true after it.
    """

    host: int
    key: BlockKey
    token_ids: list[int]
    read: Callable[[], bytes]
    is_there: Callable[[], bool]


@dataclass(frozen=True, eq=False, slots=True)
class HostEntry:
    """Content of a host block: what one table, or one kind, has at one position of a chain.

    Attributes:
        hash, column: chained hash of the position, and index of the table; see `HostShelf.columns`.
        token_ids: token ids of the position, compared on every hit.
        numbers: what `HostShelf.header` packs.
    """

    hash: Hash
    column: int
    token_ids: list[int]
    numbers: tuple[int, ...] = ()


class HostShelf:
    """Blocks of one host memory in a pool. The caller holds the cache's lock.

    Blocks of swapped sequences are in use. Entries are free blocks with content that a prompt may begin with. Swapped
    sequences may take them; they are evicted least recently used first, and the tail of a prefix before its head.
    Copies are ordered on the device in the same way as swaps.

    A call that fails leaves no new entry; the entries that it replaced stay replaced.

    memory: index in `KvCacheTensors.memories`. columns: what entries may belong to: the indices of the block tables, or
    the index behind them of a kind with memory of its own.
    entries: entries by block; their blocks are published in `pool`.
    header: layout of the numbers that precede an entry's content in a file.
    on_stored: called with the blocks of new entries that came from the device.
    """

    on_stored: Callable[[Sequence[int]], None] | None = None

    def __init__(
        self,
        parts: CacheParts,
        memory: int,
        columns: range,
        num_swap_blocks: int,
        header: struct.Struct = NO_NUMBERS,
        *,
        keeps_heads: bool = True,
    ) -> None:
        """num_swap_blocks: how many blocks sequences may take. keeps_heads: see `keep`."""
        self.memory, self.columns, self.header = memory, columns, header
        self.entries: dict[int, HostEntry] = {}
        self._blocks: dict[tuple[Hash, int], int] = {}
        self._tensors, self._host = parts.tensors, parts.tensors.memories[memory]
        self._num_swap_blocks, self._keeps_heads = num_swap_blocks, keeps_heads
        self._rollback, self._listeners = parts.guard.rollback, parts.guard.listeners
        self.pool = parts.new_pool(self._host.num_blocks, self.entries.keys(), self._drop, self._rollback)

    @property
    def num_free(self) -> int:
        """Number of blocks that sequences can still take."""
        return self._num_swap_blocks - (self.pool.num_blocks - self.pool.num_free)

    @property
    def num_file_bytes(self) -> int:
        """Bytes of an entry in a file, its numbers included."""
        return self.header.size + self._host.num_block_bytes

    def swap_out(self, blocks: Sequence[int]) -> list[int]:
        """Copy device blocks to host blocks; return these, with one reference each."""
        hosts = self.pool.allocate(len(blocks))
        self._tensors.swap_out(list(zip(blocks, hosts, strict=True)), self.memory)
        return hosts

    def swap_in(self, hosts: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host blocks to device blocks, and release one reference of each host block."""
        self._tensors.swap_in(list(zip(hosts, blocks, strict=True)), self.memory)
        self.pool.release(hosts)

    def find(self, hash_: Hash, column: int) -> int:
        """Return the block of an entry; 0 if there is none."""
        return self._blocks.get((hash_, column), 0)

    def store(self, contents: Sequence[tuple[int, HostEntry]], priorities: Priorities) -> tuple[int, int]:
        """Copy device blocks to the host unless it has their content.

        contents: device block and entry. The first ones are stored first, so that the last are dropped if memory is
        short. priorities: those of the device blocks, which the entries get.

        Returns:
            How many blocks were copied, and for how many there was no memory.
        """
        present: list[int] = []
        blocks: list[int] = []
        entries: list[HostEntry] = []
        for block, entry in contents:
            host = self.find(entry.hash, entry.column)
            if host:
                present.append(host)
            else:
                blocks.append(block)
                entries.append(entry)
        self.pool.share(present)
        self.pool.release(present)  # makes them the most recently used
        num_stored = min(len(blocks), self.pool.num_free)
        if num_stored:
            hosts = self.swap_out(blocks[:num_stored])
            self._enter(hosts, entries[:num_stored])
            if self.on_stored is not None:
                self.on_stored(hosts)
        if priorities.levels:
            for block, entry in contents:
                level, host = priorities.levels.get(block), self.find(entry.hash, entry.column)
                if level is not None and host:
                    self.pool.priorities.raise_to([host], level)
        return num_stored, len(blocks) - num_stored

    def keep(self, read: Sequence[tuple[Place, StoredBlock]]) -> list[tuple[int, int, int]]:
        """Copy blocks that were read from files to the host unless it has them; return where, see `keep_files`.

        If memory is short, the first positions are kept with `keeps_heads`, else the last.
        """
        new = [(place, block) for place, block in read if not self.find(block.key.hash, block.key.column)]
        if not self._keeps_heads:
            new.reverse()
        del new[self.pool.num_free :]
        hosts = self.pool.allocate(len(new))
        entries: list[HostEntry] = []
        places: list[tuple[int, int, int]] = []
        for host, (place, block) in zip(hosts, new, strict=True):
            self._host.write(host, block.data[self.header.size :])
            numbers = self.header.unpack_from(block.data)
            entries.append(HostEntry(block.key.hash, block.key.column, block.token_ids, numbers))
            places.append((*place, host))
        self._enter(hosts, entries)
        return places

    def writes(self, hosts: Iterable[int], digest: bytes) -> list[Write]:
        """Return the writes of entries to files."""
        return [self._write_of(host, digest) for host in hosts]

    def clear(self) -> None:
        """Forget all entries."""
        self._drop(list(self.entries))

    def recount(self) -> None:
        """Derive the look-up table from `entries`, after a rollback has removed the new entries."""
        self._blocks = {(entry.hash, entry.column): host for host, entry in self.entries.items()}

    def _enter(self, hosts: Sequence[int], entries: Sequence[HostEntry]) -> None:
        """Enter blocks that were just allocated and written, so that prompts find them."""
        self._rollback.keep_absence(self.entries, hosts)
        for host, entry in zip(hosts, entries, strict=True):
            self.entries[host] = entry
            self._blocks[entry.hash, entry.column] = host
        self._report(HostBlockStored, entries)
        self.pool.release(hosts)

    def _drop(self, hosts: Sequence[int]) -> None:
        """Forget entries. A rollback does not bring them back, because their memory may be overwritten."""
        entries = {host: self.entries[host] for host in hosts}
        self._rollback.keep_lost(self._forget, entries)
        self._forget(entries)

    def _forget(self, entries: dict[int, HostEntry]) -> None:
        """Forget entries; after a rollback also those that the failed call dropped or was about to drop."""
        for host, entry in entries.items():
            self.entries.pop(host, None)
            self._blocks.pop((entry.hash, entry.column), None)
        self.pool.unpublished(entries)
        self._report(HostBlockRemoved, entries.values())

    def _report(self, event: type[HostEvent], entries: Iterable[HostEntry]) -> None:
        """Queue events for the entries of the first table."""
        if self._listeners.on_host_event:
            for entry in entries:
                if entry.column == 0:
                    self._listeners.events.append(event(entry.hash))

    def _write_of(self, host: int, digest: bytes) -> Write:
        entry = self.entries[host]
        assert isinstance(entry.hash, bytes)
        key = BlockKey(digest, entry.hash, entry.column)

        def read() -> bytes:
            return self.header.pack(*entry.numbers) + self._host.read(host)

        return Write(host, key, entry.token_ids, read, lambda: self.entries.get(host) is entry)
