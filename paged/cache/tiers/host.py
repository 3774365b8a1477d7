"""Host tier of the prefix cache: keeps what the device evicts in host memory for later prompts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paged.cache.tiers.block_file import StoredBlock
from paged.cache.tiers.files import FileRead, FileTier, Position
from paged.cache.tiers.shelf import HostEntry, HostShelf, Place

if TYPE_CHECKING:
    from paged.cache.kinds.kind import CacheParts
    from paged.cache.tiers.block_store import BlockStore
    from paged.cache.token_chain import Hash


class HostTier:
    """What prompts may begin with in host memory, by chained hash and table. The caller holds the cache's lock.

    blocks: host blocks of all tables, shared with the swap space. shelves: `blocks`, then the shelf of each kind with
    memory of its own. files: the file tier below.
    """

    files: FileTier | None = None

    def __init__(self, parts: CacheParts, blocks: HostShelf, slot_shelves: Sequence[HostShelf]) -> None:
        self.blocks, self.shelves = blocks, [blocks, *slot_shelves]
        config = parts.config
        self._config, self._tensors, self._index = config, parts.tensors, parts.index
        self._block_size = config.block_size
        self._num_tables, self._num_whole = len(config.tables), config.num_whole
        self._counts, self._priorities = parts.guard.counts, parts.pool.priorities

    def attach(self, store: BlockStore, fingerprint: bytes) -> None:
        """Also write the blocks to `store`, and look there for blocks of the weights with this fingerprint."""
        config, storage = self._config, self._tensors.storage
        shape, *slot_shapes = config.storage_shapes(storage.dtype)
        layout = {
            "dtype": str(storage.dtype),
            "device": storage.device.type,
            "block_size": config.block_size,
            "slots": (shape.num_planes, shape.size),
            "rows_per_slot": shape.num_rows,
            "tables": config.tables,
        }
        if slot_shapes:
            layout["others"] = [(str(other.kind.dtype), *other[1:]) for other in slot_shapes]
            layout["kept_layers"] = config.kept_layers
        if shape.kind.has_scales:
            layout["scales"] = "by head"
        if config.rotation is not None:
            layout["rotation"] = config.rotation
        if config.has_canaries:
            layout["canaries"] = True
        if self._tensors.own:
            layout["own"] = [memory.layout for memory in self._tensors.own]
        self.files = FileTier(store, repr(layout), config.block_size, self.shelves, self._num_whole)
        self.files.identify(fingerprint)
        for shelf in self.shelves:
            shelf.on_stored = partial(self._write, shelf)

    def _write(self, shelf: HostShelf, hosts: Sequence[int]) -> None:
        assert self.files is not None
        self.files.write(shelf.writes(hosts, self.files.digest))

    def store(self, blocks: Sequence[int]) -> None:
        """Copy published blocks that are about to be withdrawn to the host, unless it has them."""
        contents: list[tuple[int, HostEntry]] = []
        # Store the first blocks of prompts first. The pool evicts in the opposite order.
        for first, column, block in reversed(self._index.withdrawn_with(blocks)):
            hash_ = self._index.hash_of(first)
            assert hash_ is not None
            contents.append((block, HostEntry(hash_, column, self._index.ids_of(first))))
        num_stored, num_dropped = self.blocks.store(contents, self._priorities)
        self._counts.add("host_stored_blocks", num_stored)
        self._counts.add("host_dropped_blocks", num_dropped)

    def find(
        self, token_ids: list[int], namespace: Hashable, hashes: Sequence[Hash]
    ) -> tuple[NDArray[np.int64], list[Hash]]:
        """Return a prompt's host blocks by position and table, 0 for none, and the hashes of the positions.

        Rows are the positions on the device, then further positions for which the host has the blocks of all tables
        that see every token. Nothing changes.

        hashes: hashes of the positions on the device.
        """
        size, num_tables = self._block_size, self._num_tables
        rows: list[list[int]] = []
        known: list[Hash] = []
        previous = self._index.root_hash(namespace)
        if hashes and num_tables == 1:  # with one table, the device has every block of its positions
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
            if not is_on_device and 0 in row[: self._num_whole]:
                break
            known.append(previous)
            rows.append(row)
        return np.array(rows, np.int64).reshape(len(rows), num_tables), known

    def count(self, num_tokens: int, *, is_hit: bool) -> None:
        """Count a prompt whose last `num_tokens` the device lacks."""
        self._counts.add("host_hits" if is_hit else "host_misses", 1)
        self._counts.add("host_query_tokens", num_tokens)

    def load(self, hosts: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy entries to device blocks, and release the references that the caller took by `pool.share`."""
        self.blocks.swap_in(hosts, blocks)
        self._counts.add("host_loaded_blocks", len(hosts))

    def read(self, token_ids: list[int], namespace: Hashable, known: Sequence[Hash]) -> FileRead:
        """Start to read a prompt's missing blocks from files.

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
        """Copy what a file read has brought to the host. It may replace any entries but the blocks `held`."""
        assert self.files is not None
        blocks: dict[int, list[tuple[Place, StoredBlock]]] = {shelf.memory: [] for shelf in self.shelves}
        for place, block in self.files.take(read).items():
            blocks[self.files.shelves[block.key.column].memory].append((place, block))
        self.blocks.pool.share(held)
        places: list[tuple[int, int, int]] = []
        for shelf in self.shelves:
            places += shelf.keep(blocks[shelf.memory])
        self.blocks.pool.release(held)
        if self.files.tell is not None and places:
            self.files.tell("keep_files", (read.number, places))

    def close(self, timeout_s: float) -> None:
        """Write all entries to files until the timeout, then stop using files."""
        assert self.files is not None
        writes = []
        for shelf in self.shelves:
            writes += shelf.writes(shelf.entries, self.files.digest)
        self.files.close(writes, timeout_s)

    def clear(self) -> None:
        """Forget all entries."""
        for shelf in self.shelves:
            shelf.clear()

    def _host_of(self, hash_: Hash, column: int, ids: list[int]) -> int:
        host = self.blocks.find(hash_, column)
        if host and self.blocks.entries[host].token_ids != ids:
            return 0
        return host
