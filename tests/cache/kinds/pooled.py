"""A kind that the cache does not know: one entry for every four tokens, and the raw rows of the pool that is open.

A block holds its entries, then four rows of raw keys: those of the newest pool that was written in it. Blocks take them
along when they are copied, swapped and found by prompts. A sequence's record says which pool the rows belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from paged.cache.groups import CacheGroup
from paged.cache.kinds.kind import CacheParts, Kind
from paged.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from paged.cache.slot_reservation import SequenceState

POOL = 4


class Pooled(NamedTuple):
    """Record of a sequence.

    end: end of what was written to the sequence's last block, also before a truncation.
    saved: during a step, the raw rows before it; None at the beginning of a block.
    """

    end: int = 0
    saved: torch.Tensor | None = None


class PooledTable(Kind):
    """Block tables of pooled keys."""

    empty = Pooled()

    def __init__(self, group: CacheGroup, columns: range, parts: CacheParts) -> None:
        super().__init__(group, columns, parts)
        self._tensors = parts.tensors

    def raw_rows(self, state: SequenceState) -> torch.Tensor:
        """The rows of the open pool in the block of the next token, in each layer: [layers, POOL, width]."""
        assert self.group is not None
        index = state.num_tokens // self._block_size * self._num_tables + self.columns[0]
        caches = [rows_of(self._tensors.k_cache(layer)) for layer in self.group.layers]
        return torch.stack([cache[state.blocks[index], -POOL:] for cache in caches])

    def reserve(self, states: Sequence[SequenceState], targets: Sequence[int], plan: Any) -> None:
        """Save the rows that a step may overwrite although its sequence still needs them if it fails."""
        for state in states:
            if state.num_tokens % self._block_size:
                self.put(state, self.get(state)._replace(saved=self.raw_rows(state)))

    def cancel(self, states: Sequence[SequenceState]) -> None:
        """Write the saved rows back."""
        assert self.group is not None
        for state in states:
            record = self.get(state)
            if record.saved is not None:
                index = state.num_tokens // self._block_size * self._num_tables + self.columns[0]
                for layer, rows in zip(self.group.layers, record.saved, strict=True):
                    rows_of(self._tensors.k_cache(layer))[state.blocks[index], -POOL:] = rows
                self.put(state, record._replace(saved=None))

    def check_advance(self, call: str, state: SequenceState, target: int) -> None:
        """Refuse zeros at positions, because entries do not lie at positions."""
        raise UnsupportedError(f"{call}: pooled keys are written by a forward; use reserve")

    def drop(self, states: Sequence[SequenceState]) -> None:
        """Note what was written."""
        for state in states:
            self.put(state, Pooled(max(self.get(state).end, state.num_tokens)))

    def begin(self, state: SequenceState, matched: Sequence[int], prompt_len: int) -> None:
        """A hit ends in a full block, or one token before its end: the rows are those of the block's last pool."""
        self.put(state, Pooled(self._end_of_block(state.num_tokens)))

    def fork(self, source: SequenceState, target: SequenceState) -> None:
        self.put(target, Pooled(min(self.get(source).end, self._end_of_block(target.num_tokens))))

    def check_truncate(self, state: SequenceState, num_tokens: int) -> None:
        """Refuse a length within a pool whose raw rows are gone."""
        end = min(self.get(state).end, self._end_of_block(num_tokens))
        if num_tokens % POOL and num_tokens // POOL != (end - 1) // POOL:
            raise InvalidInputError(f"num_tokens: {num_tokens} lies within a pool whose keys are gone")

    def truncate(self, state: SequenceState, num_tokens: int) -> None:
        self.put(state, Pooled(min(self.get(state).end, self._end_of_block(num_tokens))))

    def _end_of_block(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * self._block_size


class PooledGroup(CacheGroup):
    """Layers with pooled keys of `head_dim`, and no values."""

    kind: ClassVar[Any] = PooledTable
    block_size: ClassVar[int] = 16

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements per token, so that a block has a row for each pool and the rows of the open one."""
        assert self.head_dim is not None
        num_rows = self.block_size // POOL + POOL
        return (num_rows * self.head_dim // self.block_size,)


def rows_of(cache: torch.Tensor, width: int = 8) -> torch.Tensor:
    """View a pooled layer's blocks as rows: [blocks, block_size / POOL + POOL, width]."""
    return cache.view(len(cache), -1, width)
