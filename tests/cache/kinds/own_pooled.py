"""A kind with blocks of its own: pooled keys whose blocks are smaller than those of the pool.

A block of the kind holds the entries of one position of the cache, then the raw rows of the newest pool that was
written in it. Prompts find the blocks of all their positions, on the device or in the tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from paged.cache.groups import CacheGroup
from paged.cache.kinds.slots import KeptSlot, SlotKind
from paged.cache.slot_memory import SlotMemory
from paged.errors import InvalidInputError, OutOfBlocksError, UnsupportedError

if TYPE_CHECKING:
    from paged.cache.slot_reservation import SequenceState

POOL = 4


class OwnBlocks(NamedTuple):
    """Record of a sequence.

    blocks: block of each position; 0 if it is on the host. hosts: host blocks by position.
    before: during a step, the blocks before it, of which the step has replaced the last one by a copy.
    end: end of what was written to the last block, also before a truncation.
    """

    blocks: tuple[int, ...] = ()
    hosts: tuple[tuple[int, int], ...] = ()
    before: tuple[int, ...] | None = None
    end: int = 0


class OwnPooled(SlotKind):
    """Blocks of pooled keys in memory of their own. num_loaded: blocks that came from the tier."""

    empty = OwnBlocks()
    num_loaded = 0

    def rows(self, state: SequenceState, layer: int, position: int) -> torch.Tensor:
        """The rows of the block at a position: [block_size / POOL + POOL, width]."""
        block = self.get(state).blocks[position // self._block_size]
        return self.memory.all["keys"][self.group.layers.index(layer), block]

    def _count(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # Steps.

    def require(self, states: Sequence[SequenceState], targets: Sequence[int]) -> list[int]:
        """Count the blocks of each sequence: one for each position that it writes to."""
        counts = []
        for state, target in zip(states, targets, strict=True):
            first = state.num_tokens // self._block_size
            counts.append(self._count(target) - first if target > state.num_tokens else 0)
        self.slots.require(sum(counts))
        return counts

    def reserve(self, states: Sequence[SequenceState], targets: Sequence[int], plan: Sequence[int]) -> None:
        for state, count in zip(states, plan, strict=True):
            if count:
                record, first = self.get(state), state.num_tokens // self._block_size
                fresh = self.take_written(count)
                for block in record.blocks[first:]:  # the last one, if it is not full
                    for tensor in self.memory.all.values():
                        tensor[:, fresh[0]] = tensor[:, block]
                blocks = record.blocks[:first] + tuple(fresh)
                self.put(state, record._replace(blocks=blocks, before=record.blocks))

    def commit(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            record = self.get(state)
            if record.before is not None:
                replaced = self._replaced(record)
                self.put(state, OwnBlocks(record.blocks, end=max(record.end, state.num_tokens)))
                self.slots.release(replaced)

    def cancel(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            record = self.get(state)
            if record.before is not None:
                first = state.num_tokens // self._block_size
                self.put(state, OwnBlocks(record.before, end=record.end))
                self.slots.release(record.blocks[first:])

    def _replaced(self, record: OwnBlocks) -> list[int]:
        return [block for block in record.before or () if block not in record.blocks]

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        raise UnsupportedError(f"{call}: pooled keys are written by a forward; use reserve")

    # Prefix hits.

    def keep(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            for index in range(state.num_tokens // self._block_size):
                self.keep_slot(state, KeptSlot(self.get(state).blocks[index], (index + 1) * self._block_size))

    def begin(self, state: SequenceState, matched: Sequence[int], prompt_len: int) -> None:
        count = self._count(state.num_tokens)
        self._share(state, tuple(self.kept[block].slot for block in matched[:count]), count * self._block_size)

    def loaded(self, slot: int, numbers: tuple[Any, ...]) -> None:
        self.num_loaded += 1

    def fork(self, source: SequenceState, target: SequenceState) -> None:
        record, count = self.get(source), self._count(target.num_tokens)
        self._share(target, record.blocks[:count], min(record.end, count * self._block_size))

    def _share(self, state: SequenceState, blocks: tuple[int, ...], end: int) -> None:
        self.slots.share(blocks)
        self.put(state, OwnBlocks(blocks, end=end))

    # Other calls of the cache.

    def check_truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Refuse a length within a pool whose raw rows are gone."""
        end = min(self.get(state).end, self._count(num_tokens) * self._block_size)
        if num_tokens % POOL and num_tokens // POOL != (end - 1) // POOL:
            raise InvalidInputError(f"num_tokens: {num_tokens} lies within a pool whose keys are gone")

    def truncate(self, state: SequenceState, num_tokens: int) -> None:
        record, count = self.get(state), self._count(num_tokens)
        self.put(state, OwnBlocks(record.blocks[:count], end=min(record.end, count * self._block_size)))
        self.slots.release(record.blocks[count:])

    def release(self, state: SequenceState) -> None:
        record = self.get(state)
        self.put(state, self.empty)
        self.slots.release(record.blocks)
        self.shelf.pool.release([host for _, host in record.hosts])

    def _moved(self, state: SequenceState) -> list[int]:
        """The positions whose blocks this sequence alone holds, without those of an open step."""
        record = self.get(state)
        blocks = record.blocks if record.before is None else record.before
        return [index for index, block in enumerate(blocks) if not self.is_fixed(block)]

    def check_swap_out(self, state: SequenceState) -> None:
        if len(self._moved(state)) > self.shelf.num_free:
            raise OutOfBlocksError(len(self._moved(state)), self.shelf.num_free)

    def swap_out(self, state: SequenceState) -> None:
        record, moved = self.get(state), self._moved(state)
        sources = [record.blocks[index] for index in moved]
        hosts = tuple(zip(moved, self.shelf.swap_out(sources), strict=True))
        blocks = tuple(0 if block in sources else block for block in record.blocks)
        self.put(state, record._replace(blocks=blocks, hosts=hosts))
        self.slots.release(sources)

    def check_swap_in(self, state: SequenceState) -> None:
        self.slots.require(len(self.get(state).hosts))

    def swap_in(self, state: SequenceState) -> None:
        record = self.get(state)
        taken = self.take_written(len(record.hosts))
        blocks = list(record.blocks)
        for (index, _), block in zip(record.hosts, taken, strict=True):
            blocks[index] = block
        self.put(state, record._replace(blocks=tuple(blocks), hosts=()))
        self.shelf.swap_in([host for _, host in record.hosts], taken)

    def held(self, states: Iterable[SequenceState]) -> tuple[Counter[int], Counter[int]]:
        on_device, on_host = Counter[int](), Counter[int]()
        for state in states:
            record = self.get(state)
            on_device.update([*record.blocks, *self._replaced(record)])
            on_host.update(host for _, host in record.hosts)
        del on_device[0]
        return on_device, on_host


class OwnPooledGroup(CacheGroup):
    """Layers with pooled keys of `head_dim` in blocks of their own."""

    kind: ClassVar[Any] = OwnPooled
    has_own_memory: ClassVar[bool] = True
    num_blocks: ClassVar[int] = 26
    num_swap_blocks: ClassVar[int] = 14

    def make_memory(self, config: Any, dtype: torch.dtype, device: torch.device, num_tier_bytes: int) -> SlotMemory:
        shape = len(self.layers), self.num_blocks + 1, config.block_size // POOL + POOL, self.head_dim
        return SlotMemory(
            {"keys": torch.zeros(shape, dtype=dtype, device=device)}, self.num_swap_blocks, num_tier_bytes
        )
