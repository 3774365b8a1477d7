"""Reads and writes of K and V of single sequences, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.cache.events import Notifier, recovering
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.live_sequences import LiveSequences
from paged.cache.sliding_window import SlidingWindow
from paged.cache.slot_allocator import KvSlotAllocator
from paged.cache.tensors import KvCacheTensors
from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int


@recovering
@dataclass(frozen=True)
class KvInspection:
    """Reads and writes K and V as a forward would. Slow: for tests and inspection. Takes the guard itself."""

    _guard: Notifier
    sequences: LiveSequences
    slots: KvSlotAllocator
    tensors: KvCacheTensors
    window: SlidingWindow

    def write(self, handle: KvCacheHandle, layer: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """`PagedKvCacheManager.write_kv`."""
        layer, position = self.tensors.layer(layer), as_int("position", position)
        key, value = self.tensors.rows(layer, key, value)
        with self._guard:
            state = self.sequences.state(handle)
            end = position + len(key)
            rollback = self._guard.rollback
            if end > handle.capacity:
                raise InvalidInputError(f"position: {position}..{end}, expected within the capacity {handle.capacity}")
            self.window.check_seen(state, self.tensors.table_of(layer), position, end)
            self.slots.make_exclusive([(state, position, end)])
            if position < state.num_tokens:  # a rollback must not restore the previous ids
                state.begin_change(rollback)
            else:
                state.keep(rollback)
            if len(key):  # the new K/V may not match the ids at these positions
                state.chain.cut(position, position // self.tensors.block_size, rollback)
            self.tensors.write(layer, state.blocks, position, key, value, rollback)
            readable = max(state.num_tokens, state.num_written)
            if position <= readable:
                state.num_written = max(readable, end)

    def read(self, handle: KvCacheHandle, layer: int, start: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`PagedKvCacheManager.read_kv`."""
        layer, start = self.tensors.layer(layer), as_int("start", start)
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self.sequences.state(handle)
            end, readable = start + num_tokens, max(state.num_tokens, state.num_written)
            if end > readable:
                raise InvalidInputError(f"num_tokens: positions {start}..{end}, expected within the {readable} written")
            self.window.check_seen(state, self.tensors.table_of(layer), start, end)
            return self.tensors.read(layer, state.blocks, start, end)
