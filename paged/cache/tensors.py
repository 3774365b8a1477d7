"""The cache's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paged.cache.blocks.undo_log import UndoLog
from paged.cache.host_blocks import HostBlocks
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.errors import InvalidInputError
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.kernels.cache.torch_ops.reshape_and_cache import scaled_cast
from paged.kernels.common.checks import check_is_tensor, check_shape
from paged.kernels.common.scalars import as_int, shown
from paged.staging import to_device


class KvCacheTensors:
    """One storage [num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim], K at 0 and V at 1 of axis 1."""

    def __init__(self, config: PagedKvCacheConfig) -> None:
        dtype = torch.get_default_dtype() if config.dtype is None else config.dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidInputError(f"dtype: {shown(dtype)}, expected a floating point type")
        if dtype is torch.float4_e2m1fn_x2:
            raise InvalidInputError(f"dtype: {dtype}, expected a type of one value an element")
        self._num_layers = config.num_layers
        per_block = (config.block_size, config.num_kv_heads, config.head_dim)
        shape = config.num_layers, 2, config.num_blocks + 1, *per_block
        try:
            self.storage = torch.zeros(shape, dtype=dtype, device=config.device)
            if self.storage.is_meta:
                raise InvalidInputError(f"device: {self.storage.device}, expected one with memory")
            self.host_blocks = HostBlocks(self.storage.flatten(0, 1), config.num_swap_blocks)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, AssertionError) as error:  # more memory than there is, or no such device
            where = "" if config.device is None else f" on {shown(config.device)}"
            raise InvalidInputError(f"config: no cache of shape {shape}{where}: {error}") from error
        # Bytes serve the slow accesses: indexing is not implemented for the 8-bit float types.
        self._bytes = self.storage.view(torch.uint8)
        self._caches: list[torch.Tensor] = [cache for layer in self.storage for cache in layer]
        self._copy_blocks = BlockCopy(self._caches, self._caches)

    def k_cache(self, layer: int) -> torch.Tensor:
        """Keys of one layer, a view [num_blocks + 1, block_size, num_kv_heads, head_dim].

        Raises:
            InvalidInputError: there is no such layer.
        """
        return self._caches[2 * self.layer(layer)]

    def v_cache(self, layer: int) -> torch.Tensor:
        """Values of one layer, as `k_cache`."""
        return self._caches[2 * self.layer(layer) + 1]

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self.storage.shape[3]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: K and V of all layers."""
        return self._bytes.numel() // self.storage.shape[2]

    def copy(self, block_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to `destination` for every pair, K and V of all layers, without a wait of the host."""
        if block_pairs:
            (pairs,) = to_device((np.array(block_pairs, np.int64),), self.storage.device)
            self._copy_blocks(pairs)

    def clear(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Fill positions start..end of the sequence in `blocks` with zeros, K and V of all layers."""
        if start < end:
            self._bytes.flatten(2, 3).index_fill_(2, self._slots(blocks, start, end), 0)

    def layer(self, layer: int) -> int:
        """`layer` as an int; InvalidInputError unless there is such a layer."""
        return as_int("layer", layer, high=self._num_layers - 1)

    def rows(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as [num_tokens, num_kv_heads, head_dim], which one token's may do without the first axis.

        Raises:
            InvalidInputError: they are no tensors, or not of these shapes and the same num_tokens.
        """
        for name, rows in (("key", key), ("value", value)):
            check_is_tensor(name, rows)
            if rows.is_complex() or rows.is_quantized or rows.is_meta:
                raise InvalidInputError(f"{name}: {shown(rows)}, expected a tensor of real numbers")
        if key.dim() == 2 and value.dim() == 2:
            key, value = key[None], value[None]
        check_shape("key", key, ("num_tokens", *self.storage.shape[-2:]))
        check_shape("value", value, key.shape)
        return key, value

    def write(
        self, layer: int, blocks: Sequence[int], start: int, key: torch.Tensor, value: torch.Tensor, undo: UndoLog
    ) -> None:
        """Write K and V [num_tokens, num_kv_heads, head_dim], unscaled, in the cache's dtype, from position `start` of
        the sequence in `blocks` on.
        """
        index = self._slots(blocks, start, start + len(key))
        caches = [cache.flatten(0, 1) for cache in self._bytes[layer]]
        written = []
        for rows in (key, value):
            # contiguous() keeps the strides of expanded rows without an element, and view refuses those.
            stored = scaled_cast(rows.to(self.storage.device), None, self.storage.dtype)
            written.append(stored.clone(memory_format=torch.contiguous_format).view(torch.uint8))
        for cache, rows in zip(caches, written, strict=True):
            undo.add((cache.index_copy_, 0, index, cache[index]))
            cache.index_copy_(0, index, rows)

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
