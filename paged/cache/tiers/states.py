"""States of recurrent layers in host memory: snapshots whose slot or block the device has given to others."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paged.cache.guard import Rollback
    from paged.cache.tensors import StateTensors
    from paged.cache.token_chain import Hash

_COUNTS = ("num_stored", "num_loaded")


class HostState(NamedTuple):
    """A state in a host slot: the position that it is kept for, and the first and last that it holds."""

    slot: int
    position: int
    start: int
    end: int


class StateTier:
    """Snapshots by the chained hash of the block before them, least recently used first.

    Its host slots lie behind those for swapped sequences. A call that fails leaves no new entry; entries that it has
    replaced stay replaced. The caller holds the cache's lock.

    num_stored, num_loaded: states copied to the host and back.
    """

    def __init__(self, tensors: StateTensors, num_swap_slots: int, rollback: Rollback) -> None:
        self.entries: OrderedDict[Hash, HostState] = OrderedDict()
        self.num_stored = self.num_loaded = 0
        self._slots = range(num_swap_slots + 1, num_swap_slots + 1 + tensors.num_tier_slots)
        self._tensors = tensors
        self._rollback = rollback
        self._free = list(self._slots)

    def store(self, hash_: Hash, slot: int, position: int, start: int, end: int) -> None:
        """Copy the state in a device slot to the host, unless it is there."""
        if hash_ in self.entries:
            self.entries.move_to_end(hash_)
            return
        if not self._slots:
            return
        self._rollback.keep_absence(self.entries, (hash_,))  # first, so that a rollback counts the free slots again
        if not self._free:
            _, oldest = self.entries.popitem(last=False)
            self._free.append(oldest.slot)
        host = self._free.pop()
        self._tensors.swap_out([(slot, host)])
        self._rollback.keep_fields(self, _COUNTS)
        self.entries[hash_] = HostState(host, position, start, end)
        self.num_stored += 1

    def load(self, hash_: Hash, slot: int) -> HostState:
        """Copy a state to a device slot."""
        state = self.entries[hash_]
        self._tensors.swap_in([(state.slot, slot)])
        self.entries.move_to_end(hash_)
        self._rollback.keep_fields(self, _COUNTS)
        self.num_loaded += 1
        return state

    def clear(self) -> None:
        """Forget all states."""
        self.entries.clear()
        self.recount()

    def recount(self) -> None:
        """Derive the free slots from `entries`, from which a rollback has removed what is new."""
        taken = {state.slot for state in self.entries.values()}
        self._free = [slot for slot in self._slots if slot not in taken]
