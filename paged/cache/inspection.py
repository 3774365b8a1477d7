"""Tensors of a cache's layers, and reads and writes of K and V of single sequences, position by position."""

from __future__ import annotations

import torch

from paged.cache.guard import CacheGuard
from paged.cache.kv_cache import KvCacheHandle
from paged.cache.live_sequences import LiveSequences
from paged.cache.sliding_window import SlidingWindow
from paged.cache.slot_allocator import KvSlotAllocator
from paged.cache.tensors import KvCacheTensors
from paged.errors import InvalidInputError
from paged.kernels.common.scalars import as_int, shown
from paged.kernels.recurrent.metadata import RecurrentState


class KvInspection:
    """The part of a `PagedKvCacheManager` that accesses its memory."""

    _guard: CacheGuard
    _sequences: LiveSequences
    _slots: KvSlotAllocator
    _tensors: KvCacheTensors
    _window: SlidingWindow

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self._tensors.storage.device

    @property
    def tensors(self) -> KvCacheTensors:
        """Memory of the cache. Its `listener` is called for every move or clearing of blocks, to mirror it."""
        return self._tensors

    def k_cache(self, layer: int) -> torch.Tensor:
        """Return the keys of one layer, a view [num_blocks + 1, block_size, num_kv_heads, head_dim].

        Raises:
            InvalidInputError: the layer does not exist, or has no K/V of its own.
        """
        return self._tensors.k_cache(layer)

    def v_cache(self, layer: int) -> torch.Tensor:
        """Return the values of one layer, as `k_cache`; the last dimension is the group's v_head_dim."""
        return self._tensors.v_cache(layer)

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return `k_scale` and `v_scale` of an int8 layer, as the kernels take them; (None, None) for other dtypes.

        Each is float32 [num_blocks + 1, block_size, num_kv_heads]. Errors are those of `k_cache`.
        """
        return self._tensors.scales(layer)

    def table_of(self, layer: int) -> int:
        """Return the index of a layer's table, for `AttentionMetadata.table`; errors are those of `k_cache`."""
        return self._tensors.table_of(layer)

    def state(self, layer: int) -> RecurrentState:
        """Return the state slots of one recurrent layer.

        Raises:
            InvalidInputError: the layer has no recurrent state.
        """
        states, layer = self._tensors.states, as_int("layer", layer)
        if states is None or layer not in states.layers:
            raise InvalidInputError(f"layer: {shown(layer)} has no recurrent state")
        return states.layer(layer)

    def write_kv(
        self, handle: KvCacheHandle, layer: int, position: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write K and V of the token at `position`, or of several from there on. Slow: for tests and inspection.

        The length does not change, and positions may lie anywhere within the capacity. Values are converted to the
        cache's dtype; 8-bit floats are saturated and not scaled, int8 rows are scaled and their scales are written.

        Args:
            key: [num_kv_heads, head_dim], or [num_tokens, num_kv_heads, head_dim].
            value: the same, with the head size of the values.

        Raises:
            InvalidInputError: the layer, position or a shape is invalid.
            OutOfBlocksError: a shared block has to be copied and none is free.
        """
        layer, position = self._tensors.layer(layer), as_int("position", position)
        key, value = self._tensors.rows(layer, key, value)
        with self._guard:
            state = self._sequences.state(handle)
            end = position + len(key)
            rollback = self._guard.rollback
            if end > handle.capacity:
                raise InvalidInputError(f"position: {position}..{end}, expected within the capacity {handle.capacity}")
            self._window.check_seen(state, self.table_of(layer), position, end)
            self._slots.make_exclusive([(state, position, end)])
            if position < state.num_tokens:  # a rollback must not restore the previous ids
                state.begin_change(rollback)
            else:
                state.keep(rollback)
            if len(key):  # the new K/V may not match the ids at these positions
                state.chain.cut(position, position // self._tensors.block_size, rollback)
            self._tensors.write(layer, state.blocks, position, key, value, rollback)
            readable = max(state.num_tokens, state.num_written)
            if position <= readable:
                state.num_written = max(readable, end)

    def read_kv(
        self, handle: KvCacheHandle, layer: int, start: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V at `num_tokens` positions from `start` on. Slow: for tests and inspection.

        Each is [num_tokens, num_kv_heads, head_dim] in the cache's dtype, without the scales of an 8-bit float cache.
        int8 is returned as float32, multiplied by its scales.

        Raises:
            InvalidInputError: the layer does not exist or has no K/V of its own, or a position is not written or lies
                behind the sliding window. Written positions are the first `num_tokens` and those that `write_kv` added
                after them without a gap.
        """
        layer, start = self._tensors.layer(layer), as_int("start", start)
        num_tokens = as_int("num_tokens", num_tokens)
        with self._guard:
            state = self._sequences.state(handle)
            end, readable = start + num_tokens, max(state.num_tokens, state.num_written)
            if end > readable:
                raise InvalidInputError(f"num_tokens: positions {start}..{end}, expected within the {readable} written")
            self._window.check_seen(state, self.table_of(layer), start, end)
            return self._tensors.read(layer, state.blocks, start, end)
