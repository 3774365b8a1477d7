"""Memory of K and V."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from paged.cache.groups import CacheGroup
from paged.cache.guard import Rollback
from paged.cache.host_blocks import HostMemory
from paged.cache.kv_cache import CacheRows, PagedKvCacheConfig, StorageShape
from paged.cache.slot_memory import OpenRows, SlotMemory, StateTensors
from paged.errors import InvalidInputError, ModelAsleepError
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.kernels.core.checks import check_is_tensor, check_shape
from paged.kernels.core.device import default_device
from paged.kernels.core.dtypes import KV_KINDS, KvKind, kv_kind
from paged.kernels.core.errors import as_int, shown
from paged.step.staging import to_device


class LayerCache(NamedTuple):
    """The cache of a layer and the index of its table. values: None for latents. k_scale, v_scale: of rows, or None."""

    table: int
    keys: torch.Tensor
    values: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


class KvCacheTensors:
    """K/V memory: a storage [num_planes, num_blocks + 1, elements] for each dtype. A block is its row in every plane.

    The layers of a table have separate planes for keys and values. Other tables use the same planes in other blocks.
    The scales of rows are in another storage with the same planes and blocks: a compiler that copies written
    tensors would overwrite one with the other in a common storage. Canaries are in the last one, which has one plane.

    canaries: int64 [num_blocks + 1, block_size]; None unless the configuration has canaries.
    listener: called with name and arguments before every call that moves or clears blocks.
    own: memory of each kind with memory of its own. states: the one of recurrent layers' states; None without them.
    memories: host memory of the blocks, then of each in `own`.
    """

    listener: Callable[[str, tuple[Any, ...]], None] | None = None

    def __init__(self, config: PagedKvCacheConfig, *, has_memory: bool = True) -> None:
        """has_memory: whether to allocate the memory; without it, only the shapes exist."""
        dtype = torch.get_default_dtype() if config.dtype is None else config.dtype
        if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype in KV_KINDS):
            code_dtypes = " or ".join(map(str, KV_KINDS))
            raise InvalidInputError(f"dtype: {shown(dtype)}, expected a floating point dtype or {code_dtypes}")
        rows_of_tables = [config.rows_of(table, dtype) for table in config.tables]
        for table, rows_of_table in zip(config.tables, rows_of_tables, strict=True):
            for rows in rows_of_table:
                _check_table(table, kv_kind(rows.dtype))
        self.block_size, self._num_tables = config.block_size, len(config.tables)
        self.num_host_blocks = config.num_host_blocks(dtype)
        shapes = config.storage_shapes(dtype)
        shape = shapes[0].num_planes, config.num_blocks + 1, config.block_size * shapes[0].size
        device = default_device() if config.device is None else config.device
        if not has_memory:
            device = torch.device("meta")
        try:
            self.storages: list[torch.Tensor] = []
            parts: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor | None]] = {}  # by dtype, and its scales
            for storage_shape in shapes:
                parts[storage_shape.kind.dtype] = self._make_storage(config, storage_shape, device)
            self.storage = self.storages[0]
            if self.storage.is_meta and has_memory:
                raise InvalidInputError(f"device: {self.storage.device}, expected one with memory")
            self.canaries: torch.Tensor | None = None
            if config.has_canaries and has_memory:
                self.canaries = torch.zeros(
                    config.num_blocks + 1, config.block_size, dtype=torch.int64, device=self.storage.device
                )
                self.storages.append(self.canaries[None])
            self.host = HostMemory(self.storages, self.num_host_blocks)
            self.own: list[SlotMemory] = []
            for group in config.own_groups:
                self.own.append(group.make_memory(config, dtype, self.storage.device, config.host_state_bytes))
            self.states = None
            if config.recurrent is not None:
                self.states = StateTensors(config.recurrent, dtype, self.storage.device, config.host_state_bytes)
                self.own.append(self.states)
            self.memories = [self.host, *(memory.host for memory in self.own)]
        except (torch.OutOfMemoryError, InvalidInputError):
            raise
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # too little memory, or no such device
            raise InvalidInputError(f"config: no cache of shape {shape} on {shown(device)}: {error}") from error
        self._copies: list[BlockCopy] = []
        for storage in self.storages:
            planes = storage.unbind()
            self._copies.append(BlockCopy(planes, planes))
        self._num_layers, self._tables = config.num_layers, config.tables
        self._entries: dict[int, list[torch.Tensor]] = {}  # by layer, see `entries`
        self._stacks: list[list[torch.Tensor]] = []  # of each table, [planes, layers per plane, num_blocks + 1, ...]
        self._caches: dict[int, LayerCache] = {}
        for index, (table, rows_of_table) in enumerate(zip(config.tables, rows_of_tables, strict=True)):
            starts = dict.fromkeys(parts, 0)
            stacks_of_table: list[torch.Tensor] = []
            self._stacks.append(stacks_of_table)
            for rows in rows_of_table:
                start = starts[rows.dtype]
                cache, scales, starts[rows.dtype] = self._views(table, rows, *parts[rows.dtype], start)
                stacks_of_table.append(cache)
                caches_of_layers: Iterator[torch.Tensor] = chain.from_iterable(cache)
                scales_of_layers: Iterator[torch.Tensor | None] = repeat(None)
                if scales is not None:
                    stacks_of_table.append(scales)
                    scales_of_layers = chain.from_iterable(scales)
                for layer, of_layer, scale in zip(rows.layers, caches_of_layers, scales_of_layers, strict=False):
                    if layer in self._caches:
                        self._caches[layer] = self._caches[layer]._replace(values=of_layer, v_scale=scale)
                    else:
                        self._caches[layer] = LayerCache(index, of_layer, k_scale=scale)

    def _make_storage(
        self, config: PagedKvCacheConfig, shape: StorageShape, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the storage of a dtype, and the storage of its scales if it has any, and return both."""
        kind = shape.kind
        sizes = shape.num_planes, config.num_blocks + 1, config.block_size * kind.num_elements(shape.size)
        if kind.is_bytes:  # PyTorch cannot fill int4
            storage = torch.zeros(sizes, dtype=torch.uint8, device=device).view(kind.dtype)
        else:
            storage = torch.zeros(sizes, dtype=kind.dtype, device=device)
        self.storages.append(storage)
        if not kind.has_scales:
            return storage, None
        sizes = *sizes[:2], config.block_size * shape.num_scales
        scales = torch.zeros(sizes, dtype=kind.scale_dtype, device=device)
        self.storages.append(scales)
        return storage, scales

    def _views(
        self, table: CacheGroup, rows: CacheRows, storage: torch.Tensor, scales: torch.Tensor | None, start: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Return keys or values of a table's layers from plane `start` on, their scales or None, and the next plane.

        Keys and values are [planes, layers per plane, num_blocks + 1, block_size, num_kv_heads, elements]. Scales lack
        the last axis, or have the groups of a row there.
        """
        num_blocks, size = storage.shape[1], storage.shape[2] // self.block_size  # in elements
        kind, heads = kv_kind(rows.dtype), rows.num_heads
        elements, row_size = kind.num_elements(rows.size), kind.num_elements(rows.row_size)
        groups = kind.num_scales(rows.row_size // heads)
        together = size // elements
        end = start - -len(rows.layers) // together
        shape = end - start, num_blocks, together
        parts = storage[start:end, :, : together * self.block_size * elements]
        parts = parts.view(*shape, self.block_size * elements).transpose(1, 2)
        cache, behind = parts.split([self.block_size * row_size, self.block_size * (elements - row_size)], -1)
        if start == 0:
            self._keep_entries(table, behind)
        cache = cache.unflatten(-1, (self.block_size, heads, row_size // heads))
        if scales is None:
            return cache, None, end
        # A head's scales lie side by side, so that a program that attends one head reads whole sectors.
        by_head = *shape, heads, self.block_size, groups
        of_rows = scales[start:end, :, : together * self.block_size * heads * groups]
        of_rows = of_rows.view(by_head).transpose(1, 2).transpose(3, 4)
        if not kind.group_size:
            of_rows = of_rows.squeeze(-1)
        return cache, of_rows, end

    def _keep_entries(self, table: CacheGroup, behind: torch.Tensor) -> None:
        """Keep views of a table's entries. behind: [planes, layers per plane, num_blocks + 1, elements after keys]."""
        start = 0
        for shape in table.entries_shapes(self.block_size):
            end = start + math.prod(shape)
            stack = behind[..., start:end].unflatten(-1, shape)
            for layer, entries in zip(table.layers, chain.from_iterable(stack), strict=False):
                self._entries.setdefault(layer, []).append(entries)
            start = end

    def entries(self, layer: int, index: int) -> torch.Tensor:
        """Implement `PagedKvCacheManager.entries`."""
        layer = self.layer(layer)
        if layer not in self._entries:
            raise InvalidInputError(f"layer: {layer} has no pooled keys")
        entries = self._entries[layer]
        return entries[as_int("index", index, high=len(entries) - 1)]

    def open_rows(self, layer: int) -> torch.Tensor:
        """Implement `PagedKvCacheManager.open_rows`."""
        for memory in self.own:
            if isinstance(memory, OpenRows) and layer in memory.layers:
                return memory.layers[layer]
        raise InvalidInputError(f"layer: {shown(layer)} has no rows of open pools")

    def k_cache(self, layer: int) -> torch.Tensor:
        """Implement `PagedKvCacheManager.k_cache`."""
        return self._caches[self.layer(layer)].keys

    def v_cache(self, layer: int) -> torch.Tensor:
        """Implement `PagedKvCacheManager.v_cache`. Values of latents are a view of the keys."""
        return self._keys_and_values(self.layer(layer))[1]

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Implement `PagedKvCacheManager.scales`."""
        cache = self._caches[self.layer(layer)]
        return cache.k_scale, cache.v_scale

    def table_of(self, layer: int) -> int:
        """Implement `PagedKvCacheManager.table_of`."""
        return self._caches[self.layer(layer)].table

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of a block: K and V of all layers of a table, scales included."""
        return sum(storage.nbytes // storage.shape[1] for storage in self.storages)

    def release(self) -> None:
        """Free the device memory and lose its contents; nothing may use it before `restore`."""
        for tensor in self._on_device():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate the device memory again, filled with zeros, for the same tensors and views; all of it or none."""
        try:
            for tensor in self._on_device():
                tensor.untyped_storage().resize_(tensor.nbytes)
                _bytes(tensor).zero_()
        except BaseException:
            self.release()
            raise
        for copy in self._copies:
            copy.read_addresses()
        for memory in self.memories:
            memory.read_addresses()

    def _on_device(self) -> list[torch.Tensor]:
        tensors = list(self.storages)
        for memory in self.own:
            tensors += memory.all.values()
        return tensors

    def copy(self, block_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to `destination` for every pair; the host does not wait."""
        if block_pairs:
            self._tell("copy", block_pairs)
            (pairs,) = to_device((np.array(block_pairs, np.int64),), self.storage.device)
            for copy in self._copies:
                copy(pairs)

    def clear(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Fill positions start..end of the sequence in `blocks` with zeros, in K and V of all layers."""
        if start < end:
            self._tell("clear", blocks, start, end)
            for table, stacks in enumerate(self._stacks):
                index = self._positions(table, blocks, start, end)
                for stack in stacks:
                    _bytes(stack)[:, :, *index] = 0

    def swap_out(self, block_pairs: Sequence[tuple[int, int]], memory: int = 0) -> None:
        """Copy device block to host block for every pair, in one of `memories`."""
        self._tell("swap_out", block_pairs, memory)
        self.memories[memory].swap_out(block_pairs)

    def swap_in(self, block_pairs: Sequence[tuple[int, int]], memory: int = 0) -> None:
        """Copy host block to device block for every pair, in one of `memories`."""
        self._tell("swap_in", block_pairs, memory)
        self.memories[memory].swap_in(block_pairs)

    def layer(self, layer: int) -> int:
        """Return `layer` as an int; raise InvalidInputError unless it exists and has K/V of its own."""
        layer = as_int("layer", layer, high=self._num_layers - 1)
        if layer not in self._caches:
            raise InvalidInputError(f"layer: {layer} has no K/V of its own")
        return layer

    def rows(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value as [num_tokens, num_kv_heads, head_dim]; one token may lack the first axis."""
        for name, rows in (("key", key), ("value", value)):
            check_is_tensor(name, rows)
            if rows.is_complex() or rows.is_quantized or rows.is_meta:
                raise InvalidInputError(f"{name}: {shown(rows)}, expected a tensor of real numbers")
        if key.dim() == 2 and value.dim() == 2:
            key, value = key[None], value[None]
        k_cache, v_cache = self._keys_and_values(layer)
        check_shape("key", key, ("num_tokens", k_cache.shape[2], kv_kind(k_cache.dtype).width(k_cache)))
        check_shape("value", value, (len(key), v_cache.shape[2], kv_kind(v_cache.dtype).width(v_cache)))
        if self._is_latent(layer) and not torch.equal(key[..., : value.shape[-1]], value):
            raise InvalidInputError(f"value: not the first {value.shape[-1]} elements of the key, as latents have it")
        return key, value

    def write(
        self, layer: int, blocks: Sequence[int], start: int, key: torch.Tensor, value: torch.Tensor, rollback: Rollback
    ) -> None:
        """Write K and V of the sequence in `blocks` from position `start` on.

        Each is [num_tokens, num_kv_heads, head_dim], unscaled, and is converted to the cache's dtype.
        """
        stored = self._caches[layer]
        index = self._positions(stored.table, blocks, start, start + len(key))
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cache, scales, rows in (
            (stored.keys, stored.k_scale, key),
            (stored.values, stored.v_scale, value),
        ):
            if cache is None:  # latents have one cache, because the value is part of the key
                continue
            codes, row_scales = kv_kind(cache.dtype).encode(rows.to(self.storage.device), None)
            written.append((cache, codes))
            if scales is not None and row_scales is not None:
                written.append((scales, row_scales))
        for cache, rows in written:
            # Clone, because contiguous() keeps the strides of empty expanded rows, which `view` refuses.
            rows = _bytes(rows.clone(memory_format=torch.contiguous_format))
            target = _bytes(cache)
            rollback.append((target.index_put_, index, target[index]))
            target.index_put_(index, rows)

    def read(self, layer: int, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V at positions start..end of the sequence in `blocks`.

        Each is [end - start, num_kv_heads, head_dim]. Rows with scales are returned as float32, multiplied by them.
        """
        stored = self._caches[layer]
        index = self._positions(stored.table, blocks, start, end)
        k_cache, v_cache = self._keys_and_values(layer)
        return _read_rows(k_cache, stored.k_scale, index), _read_rows(v_cache, stored.v_scale, index)

    def _is_latent(self, layer: int) -> bool:
        return self._caches[layer].values is None

    def _keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self._caches[layer]
        if cache.values is None:
            return cache.keys, cache.keys[..., : self._tables[cache.table].v_head_dim]
        return cache.keys, cache.values

    def _tell(self, name: str, *arguments: Any) -> None:
        if self.listener is not None:
            self.listener(name, arguments)

    def _positions(self, table: int, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block and the offset within it of each position in a table, int64 [end - start] each.

        Raises:
            ModelAsleepError: the memory was freed by `release`.
        """
        if self.storage.untyped_storage().nbytes() < self.storage.nbytes:
            raise ModelAsleepError("the cache's memory was given back; wake the model first")
        indices, within = np.divmod(np.arange(start, end), self.block_size)
        ids = np.array(blocks[table :: self._num_tables], np.int64)[indices]
        device = self.storage.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(within).to(device)


def _check_table(table: CacheGroup, kind: KvKind) -> None:
    """Raise InvalidInputError unless a kind can hold the rows of a table."""
    if kind.has_scales and table.latent:
        raise InvalidInputError(f"dtype: {kind.dtype}, expected a floating point dtype for latents")
    if kind.numbers_per_element == 1:
        return
    if table.sizes != table.row_sizes:
        raise InvalidInputError(f"dtype: {kind.dtype}, expected one number per element beside pooled keys")
    for name in ("head_dim", "v_head_dim"):
        if getattr(table, name) is not None and getattr(table, name) % kind.numbers_per_element:
            expected = f"a multiple of {kind.numbers_per_element} for {kind.name}"
            raise InvalidInputError(f"{name}: {getattr(table, name)}, expected {expected}")


def _read_rows(
    cache: torch.Tensor, scales: torch.Tensor | None, index: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return copies of the rows at blocks and offsets; float32, multiplied by their scales, if there are any."""
    rows = _bytes(cache)[index].view(cache.dtype)
    if scales is None:
        return rows
    of_rows = _bytes(scales)[index].view(scales.dtype)
    return kv_kind(cache.dtype).decode(rows, of_rows, torch.float32)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View numbers of 8 bits as bytes for slow accesses, because 8-bit floats do not support indexing."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)
    return tensor
