"""The cache's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paged.errors import InvalidInputError
from paged.kernels.checks import check_shape
from paged.kernels.copy_blocks import copy_blocks
from paged.kernels.torch_ops.reshape_and_cache import scaled_cast
from paged.kv_cache import PagedKvCacheConfig


class KvCacheTensors:
    """One storage [num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim], K at 0 and V at 1 of axis 1."""

    def __init__(self, config: PagedKvCacheConfig) -> None:
        dtype = torch.get_default_dtype() if config.dtype is None else config.dtype
        if not dtype.is_floating_point:
            raise InvalidInputError(f"dtype: {dtype}, expected a floating point type")
        self._num_layers = config.num_layers
        self.storage = torch.zeros(
            (
                config.num_layers,
                2,
                config.num_blocks + 1,
                config.block_size,
                config.num_kv_heads,
                config.head_dim,
            ),
            dtype=dtype,
            device=config.device,
        )
        self._host = torch.empty(
            (config.num_layers, 2, config.num_swap_blocks + 1, *self.storage.shape[3:]),
            dtype=dtype,
            device="cpu",
            pin_memory=self.storage.is_cuda and config.num_swap_blocks > 0,
        )
        self._swap_stream = torch.cuda.Stream(self.storage.device) if self.storage.is_cuda else None
        # Bytes serve the slow accesses: indexing is not implemented for the 8-bit float types.
        self._bytes = self.storage.view(torch.uint8)
        self._caches: list[torch.Tensor] = [cache for layer in self.storage for cache in layer]

    def k_cache(self, layer: int) -> torch.Tensor:
        """Keys of one layer, a view [num_blocks + 1, block_size, num_kv_heads, head_dim].

        Raises:
            InvalidInputError: there is no such layer.
        """
        self.check_layer(layer)
        return self._caches[2 * layer]

    def v_cache(self, layer: int) -> torch.Tensor:
        """Values of one layer, as `k_cache`."""
        self.check_layer(layer)
        return self._caches[2 * layer + 1]

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.storage.shape[3]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: K and V of all layers."""
        return self._bytes.numel() // self.storage.shape[2]

    def copy(self, block_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to `destination` for every pair, K and V of all layers."""
        if block_pairs:
            copy_blocks(self._caches, block_pairs)

    def clear(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Fill positions start..end of the sequence in `blocks` with zeros, K and V of all layers."""
        if start < end:
            self._bytes.flatten(2, 3).index_fill_(2, self._slots(blocks, start, end), 0)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device block to host block for every pair, K and V of all layers."""
        self._swap(self.storage, self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host block to device block for every pair."""
        self._swap(self._host, self.storage, pairs)

    def _swap(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """One asynchronous copy for each run of neighbouring blocks, cache and layer, on a stream of its own.

        That stream begins after the forward in flight, and the next forward after it: the blocks may be written again.
        """
        if self._swap_stream is None:
            _copy_runs(source, target, pairs)
            return
        computing = torch.cuda.current_stream(self.storage.device)
        self._swap_stream.wait_stream(computing)
        with torch.cuda.stream(self._swap_stream):
            _copy_runs(source, target, pairs)
        computing.wait_stream(self._swap_stream)

    def check_layer(self, layer: int) -> None:
        """Raise InvalidInputError unless there is such a layer."""
        if not 0 <= layer < self._num_layers:
            raise InvalidInputError(f"layer: {layer}, expected 0 <= layer < {self._num_layers}")

    def check_rows(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raise InvalidInputError unless both are [num_tokens, num_kv_heads, head_dim], of the same num_tokens."""
        check_shape("key", key, ("num_tokens", *self.storage.shape[-2:]))
        check_shape("value", value, key.shape)

    def write(self, layer: int, blocks: Sequence[int], start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V [num_tokens, num_kv_heads, head_dim], unscaled, in the cache's dtype, from position `start` of
        the sequence in `blocks` on.
        """
        index = self._slots(blocks, start, start + len(key))
        for cache, rows in zip(self._bytes[layer], (key, value), strict=True):
            # contiguous() keeps the strides of expanded rows without an element, and view refuses those.
            stored = scaled_cast(rows.to(self.storage.device), None, self.storage.dtype)
            dense = stored.clone(memory_format=torch.contiguous_format)
            cache.flatten(0, 1)[index] = dense.view(torch.uint8)

    def read(self, layer: int, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V at positions start..end of the sequence in `blocks`, each [end - start, num_kv_heads,
        head_dim].
        """
        index = self._slots(blocks, start, end)
        key, value = (cache.flatten(0, 1)[index].view(self.storage.dtype) for cache in self._bytes[layer])
        return key, value

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """int64 [end - start], where these positions stand in a cache whose blocks are laid end to end."""
        indices, within = np.divmod(np.arange(start, end), self.block_size)
        slots = np.array(blocks, np.int64)[indices] * self.block_size + within
        return torch.from_numpy(slots).to(self.storage.device)


def _copy_runs(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for first_source, first_target, length in _runs(pairs):
        for from_layer, to_layer in zip(source, target, strict=True):
            for from_cache, to_cache in zip(from_layer, to_layer, strict=True):
                run = from_cache[first_source : first_source + length]
                to_cache[first_target : first_target + length].copy_(run, non_blocking=True)


def _runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs as (source, target, length) wherever both ids rise by one together."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs
