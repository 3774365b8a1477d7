"""The cache's memory: K and V, states of recurrent layers, and pinned host memory for swapped blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.groups import CacheGroup, RecurrentSpec
from paged.cache.guard import Rollback
from paged.cache.kv_cache import PagedKvCacheConfig
from paged.errors import InvalidInputError, ModelAsleepError
from paged.kernels.cache.copy_blocks import BlockCopy
from paged.kernels.cache.torch_ops.reshape_and_cache import cast_to_cache
from paged.kernels.common.checks import check_is_tensor, check_shape
from paged.kernels.common.device import default_device
from paged.kernels.common.scalars import as_int, shown
from paged.kernels.recurrent.metadata import RecurrentState
from paged.staging import to_device

# Largest transfer. 64 MB take 1.2 ms on PCIe 5 (55 GB/s), much more than the kernel's 40 us (read and written at 3.3
# TB/s) and a copy's start, 10 us. A second buffer to hide these would gain 4 %.
_STAGED_BYTES = 64 << 20


class HostBlocks:
    """Pinned memory for blocks, each with its part of every cache side by side, so that neighbours move in one copy.

    On the device a kernel gathers blocks into staging memory, or scatters them from it, in chunks. On a CPU they move
    directly. All work is on its own stream, and the host does not wait. The kernels run after all earlier work of the
    current stream and before all later work; later work does not wait for the copies to the host. A call that fails has
    written only to its targets.
    """

    def __init__(self, caches: torch.Tensor, num_blocks: int) -> None:
        """caches: contiguous [num_caches, blocks on the device, ...]; num_blocks: on the host, from 1 on."""
        caches = caches.view(torch.uint8).flatten(2)
        self._device = caches.device
        shape = caches.shape[0], caches.shape[2]
        is_pinned = caches.is_cuda and num_blocks > 0
        self._host = torch.empty((num_blocks + 1, *shape), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self._stream = torch.cuda.Stream(self._device) if caches.is_cuda else None
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():  # tells the allocator the stream
            self._staged = self._host
            if caches.is_cuda:
                length = min(num_blocks, max(1, _STAGED_BYTES // self._host[0].nbytes))
                self._staged = torch.empty((length, *shape), dtype=torch.uint8, device=self._device)
            self._gather = BlockCopy(caches.unbind(), self._staged.unbind(1))
            self._scatter = BlockCopy(self._staged.unbind(1), caches.unbind())

    def bind(self) -> None:
        """Take the caches' addresses again, after their memory has moved."""
        self._gather.bind()
        self._scatter.bind()

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device block to host block for every pair."""
        if self._stream is None:
            self._gather(torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
            return
        staged_pairs, hosts = self._stage(pairs, host=1)
        with self._beside() as run:
            for chunk in self._chunks(hosts):
                run(self._gather, staged_pairs[chunk])
                for on_host, staged in self._runs(hosts[chunk]):
                    on_host.copy_(staged, non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host block to device block for every pair. The first chunk is sent while the current forward runs."""
        if self._stream is None:
            self._scatter(torch.tensor(pairs, dtype=torch.int64).view(-1, 2))
            return
        staged_pairs, hosts = self._stage(pairs, host=0)
        with self._beside() as run:
            for chunk in self._chunks(hosts):
                for on_host, staged in self._runs(hosts[chunk]):
                    staged.copy_(on_host, non_blocking=True)
                run(self._scatter, staged_pairs[chunk])

    @property
    def num_block_bytes(self) -> int:
        """Bytes of a block over all caches."""
        return self._host[0].nbytes

    def read(self, block: int) -> bytes:
        """Return a copy of a host block; waits for copies that run."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._host[block].numpy().tobytes()

    def write(self, block: int, data: bytes | memoryview) -> None:
        """Fill a host block; waits for copies that run."""
        if self._stream is not None:
            self._stream.synchronize()
        self._host[block].numpy().ravel()[:] = np.frombuffer(data, np.uint8)

    def _stage(self, pairs: Sequence[tuple[int, int]], host: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Return pairs of device and staged blocks in host order, and the host blocks.

        host: index of the host block in a pair.
        """
        ids = np.array(sorted(pairs, key=itemgetter(host)), np.int64).reshape(-1, 2)
        hosts = ids[:, host].copy()
        ids[:, host] = np.arange(len(ids)) % max(1, len(self._staged))
        return to_device((ids,), self._device)[0], hosts

    def _chunks(self, hosts: NDArray[np.int64]) -> list[slice]:
        length = max(1, len(self._staged))
        return [slice(start, start + length) for start in range(0, len(hosts), length)]

    def _runs(self, hosts: NDArray[np.int64]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return host and staged memory of a chunk, one pair for each run of neighbouring host blocks."""
        borders = [0, *(np.flatnonzero(np.diff(hosts) != 1) + 1).tolist(), len(hosts)]
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start, end in pairwise(borders):
            first, last = int(hosts[start]), int(hosts[end - 1])
            runs.append((self._host[first : last + 1], self._staged[start:end]))
        return runs

    @contextmanager
    def _beside(self) -> Iterator[Callable[[BlockCopy, torch.Tensor], None]]:
        """Make the own stream current; yield a function that runs a kernel ordered with the other stream's work."""
        assert self._stream is not None
        ours, computing, moved = self._stream, torch.cuda.current_stream(self._device), torch.cuda.Event()
        computed = computing.record_event()

        def run(copy: BlockCopy, pairs: torch.Tensor) -> None:
            ours.wait_event(computed)
            copy(pairs)
            moved.record(ours)

        try:
            with torch.cuda.stream(ours):
                yield run
        finally:
            computing.wait_event(moved)


class HostMemory:
    """Host blocks of several tensors, which move together. num_block_bytes: of a block over all of them."""

    def __init__(self, tensors: Iterable[torch.Tensor], num_blocks: int) -> None:
        """tensors, num_blocks: as of `HostBlocks`."""
        self._parts = [HostBlocks(tensor, num_blocks) for tensor in tensors]
        self.num_block_bytes = sum(part.num_block_bytes for part in self._parts)

    def bind(self) -> None:
        """Take the tensors' addresses again, after their memory has moved."""
        for part in self._parts:
            part.bind()

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device block to host block for every pair."""
        for part in self._parts:
            part.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host block to device block for every pair."""
        for part in self._parts:
            part.swap_in(pairs)

    def read(self, block: int) -> bytes:
        """Return a copy of a host block, after the copies to it; any thread may call this."""
        return b"".join(part.read(block) for part in self._parts)

    def write(self, block: int, data: bytes | memoryview) -> None:
        """Fill a host block with what `read` has returned, after the copies from it."""
        start = 0
        for part in self._parts:
            part.write(block, data[start : start + part.num_block_bytes])
            start += part.num_block_bytes


class StateTensors:
    """Tensors of all slots, with the recurrent layers along the first axis; see `RecurrentState`.

    listener: called with each swap before it runs, by its name in the other ranks' messages.
    """

    listener: Callable[[str, tuple[Any, ...]], None] | None = None

    def __init__(
        self, spec: RecurrentSpec, cache_dtype: torch.dtype, device: torch.device, num_tier_bytes: int = 0
    ) -> None:
        """cache_dtype: of K and V. num_tier_bytes: host memory for a tier's states, beside those swapped out."""
        is_wide = cache_dtype.is_floating_point and cache_dtype.itemsize > 1
        conv_dtype = spec.conv_dtype
        if conv_dtype is None:
            conv_dtype = cache_dtype if is_wide else torch.float32
        heads, keys = (spec.num_heads, spec.head_dim), (spec.num_key_heads, spec.key_dim)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "conv": ((spec.conv_width - 1 + spec.ring, spec.conv_channels), conv_dtype)
        }
        if spec.num_heads:
            shapes |= {
                "state": ((*heads, spec.key_dim), torch.float32),
                "ring_k": ((spec.ring, *keys), torch.float32),
                "ring_u": ((spec.ring, *heads), torch.float32),
                "ring_g": ((spec.ring, spec.num_heads), torch.float32),
            }
        begin = len(spec.layers), spec.num_slots + 1
        try:
            self.all: dict[str, torch.Tensor] = {}
            for name, (shape, dtype) in shapes.items():
                self.all[name] = torch.zeros((*begin, *shape), dtype=dtype, device=device)
            self.num_tier_slots = num_tier_bytes // self.bytes_per_slot
            num_host_slots = spec.num_swap_slots + self.num_tier_slots
            self.host = HostMemory(self.all.values(), num_host_slots)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise InvalidInputError(f"recurrent: no states of shape {begin} and {shapes}: {error}") from error
        self.layers = {layer: index for index, layer in enumerate(spec.layers)}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot."""
        return sum(tensor.nbytes // tensor.shape[1] for tensor in self.all.values())

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape of a slot, without layers that have no state, and dtype, by name; the same in every process."""
        layout: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, tensor in self.all.items():
            layout[name] = (tensor.shape[0], *tensor.shape[2:]), str(tensor.dtype)
        return layout

    def layer(self, layer: int) -> RecurrentState:
        """Return the views of one of `layers`."""
        index = self.layers[layer]
        tensors = {name: tensor[index] for name, tensor in self.all.items()}
        return RecurrentState(tensors.pop("conv"), **tensors)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device slot to host slot for every pair."""
        if self.listener is not None:
            self.listener("swap_out_states", (pairs,))
        self.host.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host slot to device slot for every pair."""
        if self.listener is not None:
            self.listener("swap_in_states", (pairs,))
        self.host.swap_in(pairs)

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots with NaN."""
        for tensor in self.all.values():
            tensor[:, list(slots)] = torch.nan


class KvCacheTensors:
    """One storage [num_slots, num_blocks + 1, elements]: a block is its row in every slot, whichever table holds it.

    A table's layers have separate slots for keys and values; other tables use the same slots in other blocks. Scales of
    int8 rows are in a second storage with the same slots and blocks. In the first, a compiler that copies written
    tensors would overwrite one with the other.

    listener: called with name and arguments of every call that moves or clears blocks, before the call.
    states: memory of recurrent layers' states; None without such layers.
    """

    listener: Callable[[str, tuple[Any, ...]], None] | None = None

    def __init__(self, config: PagedKvCacheConfig) -> None:
        dtype = torch.get_default_dtype() if config.dtype is None else config.dtype
        if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype == torch.int8):
            raise InvalidInputError(f"dtype: {shown(dtype)}, expected a floating point dtype or int8")
        if dtype is torch.float4_e2m1fn_x2:
            raise InvalidInputError(f"dtype: {dtype}, expected a dtype with one value per element")
        if dtype == torch.int8 and any(table.latent for table in config.tables):
            raise InvalidInputError("dtype: torch.int8, expected a floating point dtype for latents")
        self.block_size, self._num_tables = config.block_size, len(config.tables)
        self.num_host_blocks = config.num_host_blocks(dtype)
        num_slots, size = config.slots
        shape = num_slots, config.num_blocks + 1, config.block_size * size
        device = default_device() if config.device is None else config.device
        try:
            self.storage = torch.zeros(shape, dtype=dtype, device=device)
            if self.storage.is_meta:
                raise InvalidInputError(f"device: {self.storage.device}, expected one with memory")
            self.storages = [self.storage]
            if dtype == torch.int8:
                scales = *shape[:2], config.block_size * config.rows_per_slot
                self.storages.append(torch.zeros(scales, device=self.storage.device, dtype=torch.float32))
            self.host = HostMemory(self.storages, self.num_host_blocks)
            spec = config.recurrent
            self.states = None
            if spec is not None:
                self.states = StateTensors(spec, dtype, self.storage.device, config.host_state_bytes)
        except (torch.OutOfMemoryError, InvalidInputError):
            raise
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # not enough memory, or no such device
            raise InvalidInputError(f"config: no cache of shape {shape} on {shown(device)}: {error}") from error
        self._copies: list[BlockCopy] = []
        for storage in self.storages:
            slots = storage.unbind()
            self._copies.append(BlockCopy(slots, slots))
        self._num_layers, self._tables = config.num_layers, config.tables
        self._stacks = [self._views(table) for table in config.tables]
        # A layer's table, keys and values, and scales if it has them.
        self._caches: dict[int, tuple[int, tuple[torch.Tensor, ...]]] = {}
        for index, (table, stacks) in enumerate(zip(config.tables, self._stacks, strict=True)):
            for layer, *caches in zip(table.layers, *map(chain.from_iterable, stacks), strict=False):
                self._caches[layer] = index, tuple(caches)

    def _views(self, table: CacheGroup) -> list[torch.Tensor]:
        """Return keys and values of a table's layers, [slots, layers per slot, num_blocks + 1, block_size,
        num_kv_heads, head_dim] each, and for int8 their scales without the last axis.
        """
        stacks, scales, start = [], [], 0
        num_blocks, size = self.storage.shape[1], self.storage.shape[2] // self.block_size
        heads = table.num_kv_heads
        assert heads is not None
        for elements in table.sizes:
            together = size // elements
            end = start - -len(table.layers) // together
            shape = end - start, num_blocks, together, self.block_size, heads
            rows = self.storage[start:end, :, : together * self.block_size * elements]
            stacks.append(rows.view(*shape, elements // heads).transpose(1, 2))
            for storage in self.storages[1:]:
                of_rows = storage[start:end, :, : together * self.block_size * heads]
                scales.append(of_rows.view(shape).transpose(1, 2))
            start = end
        return stacks + scales

    def k_cache(self, layer: int) -> torch.Tensor:
        """`PagedKvCacheManager.k_cache`."""
        return self._caches[self.layer(layer)][1][0]

    def v_cache(self, layer: int) -> torch.Tensor:
        """`PagedKvCacheManager.v_cache`; values of latents are a view of the keys."""
        return self._keys_and_values(self.layer(layer))[1]

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`PagedKvCacheManager.scales`."""
        scales = self._caches[self.layer(layer)][1][2:]
        if not scales:
            return None, None
        return scales[0], scales[1]

    def table_of(self, layer: int) -> int:
        """`PagedKvCacheManager.table_of`."""
        return self._caches[self.layer(layer)][0]

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of one block: K and V of all layers of a table, scales included."""
        return sum(storage.nbytes // storage.shape[1] for storage in self.storages)

    def release(self) -> None:
        """Give the device memory back, with all that is in it; nothing may use it before `restore`."""
        for tensor in self._on_device():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take device memory again, filled with zeros, for the same tensors and views; after an error take none."""
        try:
            for tensor in self._on_device():
                tensor.untyped_storage().resize_(tensor.nbytes)
                _bytes(tensor).zero_()
        except BaseException:
            self.release()
            raise
        for copy in self._copies:
            copy.bind()
        self.host.bind()
        if self.states is not None:
            self.states.host.bind()

    def _on_device(self) -> list[torch.Tensor]:
        tensors = list(self.storages)
        if self.states is not None:
            tensors += self.states.all.values()
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

    def swap_out(self, block_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device block to host block for every pair."""
        self._tell("swap_out", block_pairs)
        self.host.swap_out(block_pairs)

    def swap_in(self, block_pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host block to device block for every pair."""
        self._tell("swap_in", block_pairs)
        self.host.swap_in(block_pairs)

    def layer(self, layer: int) -> int:
        """Return `layer` as an int; raise InvalidInputError unless it exists and has K/V of its own."""
        layer = as_int("layer", layer, high=self._num_layers - 1)
        if layer not in self._caches:
            raise InvalidInputError(f"layer: {layer} has no K/V of its own")
        return layer

    def rows(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both as [num_tokens, num_kv_heads, head_dim]; for one token the first axis may be absent."""
        for name, rows in (("key", key), ("value", value)):
            check_is_tensor(name, rows)
            if rows.is_complex() or rows.is_quantized or rows.is_meta:
                raise InvalidInputError(f"{name}: {shown(rows)}, expected a tensor of real numbers")
        if key.dim() == 2 and value.dim() == 2:
            key, value = key[None], value[None]
        k_cache, v_cache = self._keys_and_values(layer)
        check_shape("key", key, ("num_tokens", *k_cache.shape[2:]))
        check_shape("value", value, (len(key), *v_cache.shape[2:]))
        if self._is_latent(layer) and not torch.equal(key[..., : value.shape[-1]], value):
            raise InvalidInputError(f"value: not the first {value.shape[-1]} elements of the key, as latents have it")
        return key, value

    def write(
        self, layer: int, blocks: Sequence[int], start: int, key: torch.Tensor, value: torch.Tensor, rollback: Rollback
    ) -> None:
        """Write K and V [num_tokens, num_kv_heads, head_dim], unscaled, in the cache's dtype, to the sequence in
        `blocks` from position `start` on.
        """
        table, caches = self._caches[layer]
        index = self._positions(table, blocks, start, start + len(key))
        written: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for rows in (key, value)[: len(caches)]:  # the value of a latent is in its key: there is one cache to write
            codes, scale = cast_to_cache(rows.to(self.storage.device), None, self.storage.dtype)
            written.append(codes)
            if scale is not None:
                scales.append(scale)
        for cache, rows in zip(map(_bytes, caches), written + scales, strict=True):
            # Expanded rows without elements keep their strides in contiguous(), and view refuses those.
            rows = _bytes(rows.clone(memory_format=torch.contiguous_format))
            rollback.append((cache.index_put_, index, cache[index]))
            cache.index_put_(index, rows)

    def read(self, layer: int, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V at positions start..end of the sequence in `blocks`, each [end - start,
        num_kv_heads, head_dim]; for int8 in float32, multiplied by their scales.
        """
        table, caches = self._caches[layer]
        index = self._positions(table, blocks, start, end)
        caches = self._keys_and_values(layer) + caches[2:]
        key, value, *scales = [_bytes(cache)[index].view(cache.dtype) for cache in caches]
        if scales:
            k_scale, v_scale = scales
            return key * k_scale.unsqueeze(-1), value * v_scale.unsqueeze(-1)
        return key, value

    def _is_latent(self, layer: int) -> bool:
        return self._tables[self._caches[layer][0]].latent

    def _keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        table, caches = self._caches[layer]
        if self._is_latent(layer):
            return caches[0], caches[0][..., : self._tables[table].v_head_dim]
        return caches[0], caches[1]

    def _tell(self, name: str, *arguments: Any) -> None:
        if self.listener is not None:
            self.listener(name, arguments)

    def _positions(self, table: int, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block and the offset in it of each position in a table, int64 [end - start] each.

        Raises:
            ModelAsleepError: the memory was given back.
        """
        if self.storage.untyped_storage().nbytes() < self.storage.nbytes:
            raise ModelAsleepError("the cache's memory was given back; wake the model first")
        indices, within = np.divmod(np.arange(start, end), self.block_size)
        ids = np.array(blocks[table :: self._num_tables], np.int64)[indices]
        device = self.storage.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(within).to(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes for slow accesses: 8-bit floats do not support indexing."""
    return tensor.view(torch.uint8)
