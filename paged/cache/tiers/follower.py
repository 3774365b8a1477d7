"""File tier of ranks other than 0: each reads and writes its own part of the blocks that rank 0 chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paged.cache.tiers.block_file import HASH_WORDS, BlockKey
from paged.cache.tiers.files import FileRead, FileTier, Position
from paged.cache.tiers.shelf import Write

if TYPE_CHECKING:
    from paged.cache.tensors import KvCacheTensors


class FollowerFiles:
    """File tier of one rank, whose host memory mirrors rank 0's. Calls arrive in the order of rank 0's block moves.

    These files contain no token ids, because rank 0 compares the ids in its own files.
    """

    def __init__(self, files: FileTier, tensors: KvCacheTensors) -> None:
        self._files = files
        self._tensors = tensors
        self._reads: dict[int, FileRead] = {}
        self._writes: dict[tuple[int, int], Write] = {}  # by memory and host block
        tensors.listener = self._forget

    def read_files(self, number: int, hashes: list[list[int]]) -> None:
        """Start a read."""
        positions = [Position(HASH_WORDS.pack(*words), []) for words in hashes]
        self._reads[number] = self._files.read(positions)

    def progress(self, number: int, *, is_late: bool) -> NDArray[np.int64]:
        """Return `FileTier.progress` of a read; give it up if it is late."""
        read = self._reads[number]
        if is_late:
            read.is_over = read.is_late = True
        return self._files.progress(read)

    def keep_files(self, number: int, places: list[list[int]]) -> None:
        """Copy blocks of a read to host memory. places: (position, table, host block) of each block."""
        blocks = self._reads[number].blocks
        for index, column, host in places:
            shelf = self._files.shelves[column]
            self._writes.pop((shelf.memory, host), None)
            data = blocks[index, column].data[shelf.header.size :]
            self._tensors.memories[shelf.memory].write(host, data)

    def drop_files(self, number: int) -> None:
        """Forget a read."""
        self._reads.pop(number).is_over = True

    def write_files(self, rows: list[list[int]]) -> None:
        """Write host memory to files. rows: host block, then table and hash, of each write."""
        writes: list[Write] = []
        for host, column, *words in rows:
            key = BlockKey(self._files.digest, HASH_WORDS.pack(*words), column)
            writes.append(self._write_of(host, key))
        self._files.write(writes)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the blocks of the current weights until the timeout, then stop using files."""
        digest = self._files.digest
        writes = [write for write in self._writes.values() if write.key.digest == digest]
        self._files.close(writes, timeout_s)

    def _forget(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Forget content that a move from the device is about to overwrite."""
        if name == "swap_out":
            pairs, memory = arguments
            for _, host in pairs:
                self._writes.pop((memory, host), None)

    def _write_of(self, host: int, key: BlockKey) -> Write:
        shelf = self._files.shelves[key.column]
        place, memory = (shelf.memory, host), self._tensors.memories[shelf.memory]

        def read() -> bytes:  # rank 0 has the numbers of the header
            return bytes(shelf.header.size) + memory.read(host)

        write = Write(host, key, [], read, lambda: self._writes.get(place) is write)
        self._writes[place] = write
        return write
