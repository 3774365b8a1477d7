"""States of recurrent layers in host memory: snapshots whose slot or block the device has given to others."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from paged.cache.tiers.block_file import BlockKey, StoredBlock
from paged.cache.tiers.files import FileTier, Write

if TYPE_CHECKING:
    from paged.cache.guard import CacheGuard
    from paged.cache.tensors import StateTensors
    from paged.cache.token_chain import Hash

# In a file before the state: the position that it is kept for, and the first and last that it holds.
POSITIONS = struct.Struct("<QQQ")


class HostState(NamedTuple):
    """A state in a host slot: the position that it is kept for, and the first and last that it holds.

    token_ids: of the block before the position.
    """

    slot: int
    position: int
    start: int
    end: int
    token_ids: list[int]


class StateTier:
    """Snapshots by the chained hash of the block before them, least recently used first.

    Its host slots lie behind those for swapped sequences. A call that fails leaves no new entry; entries that it has
    replaced stay replaced. The caller holds the cache's lock.

    files: the tier below; what is stored here is written there, too.
    """

    files: FileTier | None = None

    def __init__(self, tensors: StateTensors, num_swap_slots: int, column: int, guard: CacheGuard) -> None:
        """column: index of states in files, behind those of the tables."""
        self.entries: OrderedDict[Hash, HostState] = OrderedDict()
        self.column = column
        self._slots = range(num_swap_slots + 1, num_swap_slots + 1 + tensors.num_tier_slots)
        self._tensors = tensors
        self._rollback, self._counts = guard.rollback, guard.counts
        self._free = list(self._slots)

    @property
    def num_file_bytes(self) -> int:
        """Bytes of a state in a file."""
        return POSITIONS.size + self._tensors.host.num_block_bytes

    def store(self, hash_: Hash, token_ids: list[int], slot: int, position: int, start: int, end: int) -> None:
        """Copy the state in a device slot to the host, unless it is there."""
        host = self._take(hash_)
        if host:
            self._tensors.swap_out([(slot, host)])
            self.entries[hash_] = HostState(host, position, start, end, token_ids)
            if self.files is not None:
                self.files.write([self._write_of(hash_, self.files.digest)])

    def keep(self, block: StoredBlock) -> int:
        """Copy a state that has come from a file to the host, unless it is there; return its host slot, or 0."""
        host = self._take(block.key.hash)
        if host:
            self._tensors.host.write(host, block.data[POSITIONS.size :])
            position, start, end = POSITIONS.unpack_from(block.data)
            self.entries[block.key.hash] = HostState(host, position, start, end, block.token_ids)
        return host

    def load(self, hash_: Hash, slot: int) -> HostState:
        """Copy a state to a device slot."""
        state = self.entries[hash_]
        self._tensors.swap_in([(state.slot, slot)])
        self.entries.move_to_end(hash_)
        self._counts.add("host_loaded_states", 1)
        return state

    def writes(self, digest: bytes) -> list[Write]:
        """Return all states, for files."""
        return [self._write_of(hash_, digest) for hash_ in self.entries]

    def clear(self) -> None:
        """Forget all states."""
        self.entries.clear()
        self.recount()

    def recount(self) -> None:
        """Derive the free slots from `entries`, from which a rollback has removed what is new."""
        taken = {state.slot for state in self.entries.values()}
        self._free = [slot for slot in self._slots if slot not in taken]

    def _take(self, hash_: Hash) -> int:
        """Return a host slot for a state; 0 if the state is there, or there are no slots."""
        if hash_ in self.entries:
            self.entries.move_to_end(hash_)
            return 0
        if not self._slots:
            return 0
        self._rollback.keep_absence(self.entries, (hash_,))  # first, so that a rollback counts the free slots again
        if not self._free:
            _, oldest = self.entries.popitem(last=False)
            self._free.append(oldest.slot)
        return self._free.pop()

    def _write_of(self, hash_: Hash, digest: bytes) -> Write:
        assert isinstance(hash_, bytes)
        key, state = BlockKey(digest, hash_, self.column), self.entries[hash_]

        def read() -> bytes:
            return POSITIONS.pack(state.position, state.start, state.end) + self._tensors.host.read(state.slot)

        return Write(state.slot, key, state.token_ids, read, lambda: self.entries.get(hash_) is state)
