"""Kinds with memory of their own: slots that sequences hold, some of them kept for prefix hits."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache.kinds.kind import Kind, Match
from paged.cache.tiers.shelf import NO_NUMBERS, HostEntry, HostShelf
from paged.errors import PagedError

if TYPE_CHECKING:
    from paged.cache.kinds.kind import CacheParts
    from paged.cache.retention import Level
    from paged.cache.slot_reservation import SequenceState


class KeptSlot(NamedTuple):
    """A slot that is kept for hits, and the length of the prefix that ends with it."""

    slot: int
    position: int


class Fetched(NamedTuple):
    """A slot loaded from the tier: index of its position in the prompt, and the numbers beside it."""

    place: int
    slot: int
    numbers: tuple[Any, ...]


class SlotKind(Kind):
    """Base of kinds whose sequences hold slots of their own memory, beside the blocks of tables or in place of them.

    A slot is kept for hits behind a published block of the first table. It is dropped with its block, or when the pool
    needs it: slots without a sequence are handed out least recently used first, after a copy to the tier. A slot that
    is kept or that several sequences hold is never written.

    A derived kind counts what its sequences hold in `held`, calls `keep_slot` in `keep`, and shares what a hit needs of
    `kept` in `begin`.

    needs_all: whether a hit needs the kept slots of all its positions, or the last one alone.
    header: layout of the numbers that go with a kept slot, see `numbers_of`.
    memory: device and host memory. slots: pool of device slots; kept ones are published in it.
    kept: kept slots by block of the first table. shelf: host slots of swapped sequences, and evicted ones.
    """

    needs_all: ClassVar[bool] = True
    header: ClassVar[struct.Struct] = NO_NUMBERS

    def __init__(self, group: Any, columns: range, parts: CacheParts) -> None:
        super().__init__(group, columns, parts)
        index = columns.start - self._num_tables
        self.memory = parts.tensors.own[index]
        self.kept: dict[int, KeptSlot] = {}
        self._blocks_of: dict[int, list[int]] = {}  # blocks by kept slot
        published = self._blocks_of.keys()
        self.slots = parts.new_pool(self.memory.num_slots, published, self._evict, parts.guard.rollback)
        num_swap = self.memory.num_swap_slots
        self.shelf = HostShelf(parts, index + 1, columns, num_swap, self.header, keeps_heads=self.needs_all)
        self._fetched: list[Fetched] = []

    @abstractmethod
    def held(self, states: Iterable[SequenceState]) -> tuple[Counter[int], Counter[int]]:
        """Count the references of sequences and open steps to device slots and to host slots."""

    def numbers_of(self, kept: KeptSlot) -> tuple[Any, ...]:
        """Return the numbers of a kept slot that `header` packs."""
        return ()

    def loaded(self, slot: int, numbers: tuple[Any, ...]) -> None:
        """Note what was loaded from the tier to a slot."""

    def is_fixed(self, slot: int) -> bool:
        """Return whether a sequence's slot also belongs to another sequence or is kept, so that it is not written."""
        return slot in self.slots.shared or slot in self._blocks_of

    def take_written(self, count: int) -> list[int]:
        """Return slots to write in this call; there are as many. If the call fails, kept ones stay evicted."""
        slots = self.slots.allocate(count)
        self._rollback.keep_lost(self._lose, slots)
        return slots

    def keep_slot(self, state: SequenceState, kept: KeptSlot) -> bool:
        """Keep a slot of a sequence; False if its block is unpublished or already has a kept slot."""
        block = self._index.block_of(state.chain, kept.position // self._block_size)
        if block is None or block in self.kept:
            return False
        self._enter(block, kept)
        return True

    # Prefix hits.

    def usable(self, match: Match) -> NDArray[np.bool_] | None:
        """A hit may end behind a slot that the device or the tier has; with `needs_all`, all before must be there."""
        is_usable = np.zeros(len(match.has_block) + 1, bool)
        is_usable[0] = True
        for count, block in enumerate(match.blocks, 1):
            if block in self.kept:
                is_usable[count] = True
        if self.shelf.entries:
            for count, hash_ in enumerate(match.hashes, 1):
                if self.shelf.find(hash_, self.columns.start):
                    is_usable[count] = True
        if self.needs_all:
            is_usable = np.logical_and.accumulate(is_usable)
        return is_usable

    def fetch(self, match: Match, count: int) -> bool:
        """Copy what the device lacks from the tier to free slots."""
        first = 0 if self.needs_all else count - 1
        held: list[int] = []
        missing: list[int] = []
        for index in range(first, count):
            if index < len(match.blocks) and match.blocks[index] in self.kept:
                held.append(self.kept[match.blocks[index]].slot)
            else:
                missing.append(index)
        hosts = [self.shelf.find(match.hashes[index], self.columns.start) for index in missing]
        if 0 in hosts or len(missing) + self.slots.count_cached(held) > self.slots.num_free:
            return False
        numbers = [self.shelf.entries[host].numbers for host in hosts]
        self.slots.share(held)
        self.shelf.pool.share(hosts)  # keep them: slots evicted now go to the tier and could replace them
        slots = self.take_written(len(missing))
        self.shelf.swap_in(hosts, slots)
        self.slots.release(held)
        self._fetched = list(map(Fetched, missing, slots, numbers))
        return True

    def enter(self, blocks: Sequence[int]) -> None:
        """Keep the results of `fetch` behind the blocks of their positions."""
        fetched, self._fetched = self._fetched, []
        for place, slot, numbers in fetched:
            if place < len(blocks) and blocks[place] in self._index.published and blocks[place] not in self.kept:
                self.loaded(slot, numbers)
                self._enter(blocks[place], KeptSlot(slot, (place + 1) * self._block_size))
            self.slots.release([slot])

    def store(self, blocks: Iterable[int]) -> None:
        """Copy the slots kept behind blocks to the tier."""
        if not self._config.has_tier:
            return
        contents: list[tuple[int, HostEntry]] = []
        for block in blocks:
            kept, hash_ = self.kept.get(block), self._index.hash_of(block)
            if kept is not None and hash_ is not None:
                entry = HostEntry(hash_, self.columns.start, self._index.ids_of(block), self.numbers_of(kept))
                contents.append((kept.slot, entry))
        contents.reverse()  # the first positions first; the pool evicts in the opposite order
        self.shelf.store(contents, self.slots.priorities)

    def slots_of_hit(self, blocks: Sequence[int]) -> set[int]:
        """Return the kept slots that a hit needs. blocks: its positions' blocks of the first table."""
        needed = blocks if self.needs_all else blocks[-1:]
        return {self.kept[block].slot for block in needed}

    def retain(self, blocks: Sequence[int], level: Level) -> None:
        """Give the slots kept behind blocks the priority of the blocks."""
        self.slots.priorities.raise_to([self.kept[block].slot for block in blocks if block in self.kept], level)

    def withdrawn(self, blocks: Iterable[int]) -> None:
        """Drop the slots kept behind blocks that are no longer published."""
        kept = self.kept.keys() & set(blocks)
        if kept:
            self._drop(kept)

    def _enter(self, block: int, kept: KeptSlot) -> None:
        self._rollback.append((self.kept.pop, block, None))
        self.kept[block] = kept
        self._blocks_of.setdefault(kept.slot, []).append(block)
        level = self._pool.priorities.levels.get(block)
        if level is not None:
            self.slots.priorities.raise_to([kept.slot], level)

    def _drop(self, blocks: Iterable[int]) -> None:
        emptied = []
        for block in blocks:
            kept = self.kept.pop(block)
            self._rollback.append((self.kept.__setitem__, block, kept))
            remaining = self._blocks_of[kept.slot]
            remaining.remove(block)
            if not remaining:
                del self._blocks_of[kept.slot]
                emptied.append(kept.slot)
        self.slots.unpublished(emptied)

    def _evict(self, slots: list[int]) -> None:
        """Drop kept slots that the pool is about to hand out."""
        blocks: list[int] = []
        for slot in slots:
            blocks += self._blocks_of[slot]
        self.store(blocks)
        self._drop(blocks)

    def _lose(self, slots: list[int]) -> None:
        """Drop kept slots that a failed call has overwritten."""
        for slot in slots:
            self.withdrawn(self._blocks_of.get(slot, ()))

    # Counts.

    def recount(self, states: Sequence[SequenceState]) -> None:
        """Derive the reference counts from the restored sequences and kept slots, after a rollback."""
        self._fetched = []
        self._blocks_of.clear()
        for block, kept in self.kept.items():
            self._blocks_of.setdefault(kept.slot, []).append(block)
        self.shelf.recount()
        on_device, on_host = self.held(states)
        self.slots.recount(on_device)
        self.shelf.pool.recount(on_host)

    def check(self, states: Sequence[SequenceState]) -> None:
        """Recount every reference; raise PagedError for the first error."""
        on_device, on_host = self.held(states)
        self.slots.check(on_device)
        self.shelf.pool.check(on_host)
        for block, kept in self.kept.items():
            if self._index.hash_of(block) is None:
                raise PagedError(f"slot {kept.slot} is kept behind block {block}, which is unpublished")
            if block not in self._blocks_of.get(kept.slot, ()):
                raise PagedError(f"slot {kept.slot} is kept behind block {block}, but not the reverse")
        if sum(map(len, self._blocks_of.values())) != len(self.kept):
            raise PagedError(f"slots are kept behind blocks {self._blocks_of}, expected {len(self.kept)}")
