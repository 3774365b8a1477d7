"""Files of the ranks other than 0: each reads and writes its own part of the blocks that rank 0 decides on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paged.cache.tiers.block_file import HASH_WORDS, BlockKey
from paged.cache.tiers.files import FileRead, FileTier, Position, Write
from paged.cache.tiers.states import POSITIONS

if TYPE_CHECKING:
    from paged.cache.tensors import HostMemory, KvCacheTensors


class FollowerFiles:
    """Files of another rank, whose host memory mirrors that of rank 0; calls come in the order of its moves.

    Rank 0 compares token ids with those of its own files; here there are none.
    """

    def __init__(self, files: FileTier, tensors: KvCacheTensors, state_column: int) -> None:
        """state_column: index of states in files, behind those of the tables."""
        self._files = files
        self._tensors = tensors
        self._state_column = state_column
        self._reads: dict[int, FileRead] = {}
        self._writes: dict[tuple[bool, int], Write] = {}  # what a state's slot or a host block holds
        tensors.listener = self._forget
        if tensors.states is not None:
            tensors.states.listener = self._forget

    def read_files(self, number: int, hashes: list[list[int]]) -> None:
        """Begin a read."""
        positions = [Position(HASH_WORDS.pack(*words), []) for words in hashes]
        self._reads[number] = self._files.read(positions)

    def progress(self, number: int, *, is_late: bool) -> NDArray[np.int64]:
        """Return `FileTier.progress` of a read; if it is late, it is given up."""
        read = self._reads[number]
        if is_late:
            read.is_over = read.is_late = True
        return self._files.progress(read)

    def keep_files(self, number: int, places: list[list[int]]) -> None:
        """Copy blocks of a read to host memory. places: position, table and host block of each."""
        blocks = self._reads[number].blocks
        for index, column, host in places:
            self._writes.pop((column == self._state_column, host), None)
            memory, header = self._memory(column)
            memory.write(host, blocks[index, column].data[len(header) :])

    def drop_files(self, number: int) -> None:
        """Forget a read."""
        self._reads.pop(number).is_over = True

    def write_files(self, rows: list[list[int]]) -> None:
        """Write host memory to files. rows: host block, or slot of a state, then table and hash of each."""
        writes: list[Write] = []
        for host, column, *words in rows:
            key = BlockKey(self._files.digest, HASH_WORDS.pack(*words), column)
            writes.append(self._write_of(host, key))
        self._files.write(writes)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what host memory holds of the current weights, as far as the time goes; then use no files."""
        digest = self._files.digest
        writes = [write for write in self._writes.values() if write.key.digest == digest]
        self._files.close(writes, timeout_s)

    def _memory(self, column: int) -> tuple[HostMemory, bytes]:
        """Return the host memory for a file's data, and what is before these; rank 0 knows a state's positions."""
        if column != self._state_column:
            return self._tensors.host, b""
        assert self._tensors.states is not None
        return self._tensors.states.host, bytes(POSITIONS.size)

    def _forget(self, name: str, arguments: tuple[Sequence[tuple[int, int]], ...]) -> None:
        """Forget what is about to be overwritten by a move from the device."""
        if name.startswith("swap_out"):
            for _, host in arguments[0]:
                self._writes.pop((name == "swap_out_states", host), None)

    def _write_of(self, host: int, key: BlockKey) -> Write:
        memory, header = self._memory(key.column)
        place = key.column == self._state_column, host
        write = Write(host, key, [], lambda: header + memory.read(host), lambda: self._writes.get(place) is write)
        self._writes[place] = write
        return write
