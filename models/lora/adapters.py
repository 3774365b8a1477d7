"""A model's low-rank adapters: the loaded ones, their weights, and the sequences that use them."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged.cache.kv_cache import KvCacheHandle
from paged.cache.manager import PagedKvCacheManager
from paged.errors import CheckpointError, InvalidInputError
from paged.folder_path import as_folder
from paged.kernels.core.errors import shown
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.lora.weights import MAX_PARTS, LoraWeights
from paged.models.families.network import Network
from paged.models.layers.attention import Attention
from paged.models.layers.head_rotation import KEYS_AND_VALUES
from paged.models.layers.modules import Linear
from paged.models.lora.checkpoint import TARGET_MODULES, WEIGHTS_FILE, LowRank, read_adapter
from paged.seq_id import SeqId
from paged.step.staging import to_device


@dataclass
class LoadedAdapter:
    """A loaded adapter.

    index: place of its weights in every layer's stack. num_tokens: tokens that ran with it. stamp: unique to this load,
    so that the tiers of a cache tell adapters apart that were loaded under the same name.
    """

    index: int
    rank: int
    num_bytes: int
    num_tokens: int = 0
    stamp: bytes = field(default_factory=lambda: os.urandom(16))


class LoraAdapters:
    """Up to max_loras adapters beside the base model, all in one batch.

    A sequence's cache namespace decides its adapter: the adapter's name, or a tuple that begins with it. So no
    sequence finds K/V of another adapter, and a fork keeps its adapter. Unloading an adapter withdraws its published
    blocks.

    Each linear layer has one stack of weights for max_loras adapters of max_rank. The first adapter that changes the
    layer allocates the stack, which keeps its address; later adapters are written into it.

    num_layers: layers with a stack. loaded: adapters by name. Thread-safe.
    """

    def __init__(self, network: Network, kv_manager: PagedKvCacheManager, *, max_loras: int, max_rank: int) -> None:
        self.max_loras, self.max_rank = max_loras, max_rank
        self.num_layers = 0
        self._network, self._kv_manager = network, kv_manager
        self.loaded: dict[str, LoadedAdapter] = {}
        self._lock = RLock()
        kv_manager.tell_apart(self._with_stamp)

    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in the order they were loaded."""
        return tuple(self.loaded)

    def load(self, name: str, path: str | Path) -> bool:
        """Load an adapter from a folder that PEFT saved; return whether any layer changes for the first time.

        Sequences can use the adapter as soon as this returns.

        Raises:
            InvalidInputError: the name is empty or taken, or is the namespace of sequences without an adapter; all
                max_loras adapters are loaded, or a rank is above max_rank.
            CheckpointError, UnsupportedError: as `read_adapter`; or a weight is not finite in the model's dtype.
        """
        with self._lock:
            self._check_new(name)
            linears = _adaptable(self._network)
            shapes: dict[str, list[int]] = {}
            for key, (linear, part) in linears.items():
                shapes[key] = [linear.sizes[part], linear.in_features]
            shared = self._network.ranks.share.adapted(self._network.config, shapes)
            for key, (dim, sections) in shared.items():
                shapes[key][dim] = sum(section.size for section in sections)
            folder = as_folder("path", path)
            changes = read_adapter(folder, shapes)
            for key in changes.keys() & shared.keys():
                changes[key] = changes[key].part(*shared[key])
            rank = max(change.rank for change in changes.values())
            if rank > self.max_rank:
                raise InvalidInputError(
                    f"adapter {name!r}: rank {rank}, expected at most max_lora_rank {self.max_rank}"
                )
            dtype = next(self._network.parameters()).dtype
            for key, change in changes.items():
                if not (change.a.to(dtype).isfinite().all() and change.b.to(dtype).isfinite().all()):
                    raise CheckpointError(f"{key}: not all values are finite as {dtype} in {folder / WEIGHTS_FILE}")
            taken = {adapter.index for adapter in self.loaded.values()}
            index = min(set(range(self.max_loras)) - taken)
            num_elements, num_layers = 0, self.num_layers
            changes_of_parts: dict[tuple[Linear, int], LowRank] = {}
            for key, change in changes.items():
                changes_of_parts[linears[key]] = change
                num_elements += change.a.numel() + change.b.numel()
            if self._network.kv_rotation == KEYS_AND_VALUES:
                for layer in self._network.layers:
                    if isinstance(layer.self_attn, Attention):
                        layer.self_attn.rotate_adapter(changes_of_parts)
            with torch.no_grad():
                self._write(index, changes_of_parts)
            self._forget_prefixes(name)
            self.loaded[name] = LoadedAdapter(index, rank, num_elements * dtype.itemsize)
            return self.num_layers > num_layers

    def unload(self, name: str) -> None:
        """Unload an adapter, so that another one can take its index.

        Raises:
            InvalidInputError: the adapter is not loaded, or sequences use it.
        """
        with self._lock:
            self._check_loaded(name)
            if holders := self._holders(name):
                raise InvalidInputError(
                    f"adapter {name!r}: {len(holders)} sequences use it, first {holders[0].cache_id!r}"
                )
            self._forget_prefixes(name)
            del self.loaded[name]

    def choose(self, seq_id: SeqId, name: str | None) -> None:
        """Choose a sequence's adapter, None for no adapter; if the sequence is new, start it.

        Raises:
            InvalidInputError: the adapter is not loaded, or the sequence's namespace belongs to another adapter.
        """
        with self._lock:
            if name is not None:
                self._check_loaded(name)
            handle = self._kv_manager.get_handle(seq_id)
            if handle is None:
                if name is not None:
                    self._kv_manager.allocate(seq_id, namespace=name)
                return
            owner = _owner(handle.namespace)
            if name != owner and (name is not None or owner in self.loaded):
                raise InvalidInputError(
                    f"adapter {name!r} for sequence {seq_id!r}: its namespace {handle.namespace!r} belongs to another"
                )

    def row_adapters(self, handles: Sequence[KvCacheHandle], counts: Sequence[int]) -> NDArray[np.int32] | None:
        """Return the adapter of each row, by index, in a forward over `counts` tokens of each sequence, -1 for none.

        Return None if no row has an adapter.
        """
        indices: list[int] = []
        for handle in handles:
            adapter = self.loaded.get(_owner(handle.namespace))
            indices.append(-1 if adapter is None else adapter.index)
        if max(indices, default=-1) < 0:
            return None
        return np.repeat(np.array(indices, np.int32), counts)

    def batch(self, row_adapters: NDArray[np.int32]) -> LoraBatch:
        """Return the result of `row_adapters` as a batch on the device."""
        grouped = LoraBatch.group(torch.from_numpy(row_adapters))
        return LoraBatch(*to_device((grouped.rows.numpy(), grouped.slots.numpy()), self._kv_manager.device))

    def count(self, handles: Sequence[KvCacheHandle], counts: Sequence[int]) -> None:
        """Count the tokens of a forward that succeeded."""
        for handle, count in zip(handles, counts, strict=True):
            adapter = self.loaded.get(_owner(handle.namespace))
            if adapter is not None:
                adapter.num_tokens += count

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return sizes of the stacks, and each adapter's index, rank, bytes, live sequences and tokens run."""
        with self._lock:
            adapters: dict[str, dict[str, int]] = {}
            for name, adapter in self.loaded.items():
                adapters[name] = {
                    "slot": adapter.index,
                    "rank": adapter.rank,
                    "bytes": adapter.num_bytes,
                    "sequences": len(self._holders(name)),
                    "tokens": adapter.num_tokens,
                }
            reserved_bytes = 0
            for linear in _adaptable_layers(self._network):
                if linear.adapters is not None:
                    reserved_bytes += linear.adapters.a.nbytes + linear.adapters.b.nbytes
            return {
                "max_loras": self.max_loras,
                "max_lora_rank": self.max_rank,
                "free_slots": self.max_loras - len(self.loaded),
                "reserved_bytes": reserved_bytes,
                "adapters": adapters,
            }

    def _check_new(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidInputError(f"name: {shown(name)}, expected a non-empty str")
        if name in self.loaded:
            raise InvalidInputError(f"adapter {name!r}: already loaded")
        if len(self.loaded) == self.max_loras:
            raise InvalidInputError(f"adapter {name!r}: {self.max_loras} are loaded, as many as max_loras allows")
        holders = [handle for handle in self._holders(name) if handle.num_tokens]
        if holders:
            raise InvalidInputError(
                f"adapter {name!r}: the namespace of {len(holders)} sequences without an adapter, first "
                f"{holders[0].cache_id!r}"
            )

    def _check_loaded(self, name: str) -> None:
        if not isinstance(name, str) or name not in self.loaded:
            raise InvalidInputError(f"adapter {shown(name)}: not loaded, expected one of {list(self.loaded)}")

    def _holders(self, name: str) -> list[KvCacheHandle]:
        return [handle for handle in self._kv_manager.handles() if _owner(handle.namespace) == name]

    def _forget_prefixes(self, name: str) -> None:
        for namespace in self._kv_manager.namespaces():
            if _owner(namespace) == name:
                self._kv_manager.forget_namespace(namespace)

    def _with_stamp(self, namespace: Hashable) -> Hashable:
        adapter = self.loaded.get(_owner(namespace))
        if adapter is None:
            return namespace
        return namespace, adapter.stamp

    def _write(self, index: int, changes: dict[tuple[Linear, int], LowRank]) -> None:
        """Write an adapter at an index of every stack; a layer that it does not change gets rank 0."""
        for linear, _ in changes:
            if linear.adapters is None:
                linear.adapters = self._empty_stack(linear)
                self.num_layers += 1
        for linear in _adaptable_layers(self._network):
            stack = linear.adapters
            if stack is None:
                continue
            ranks, scales, first = [0] * len(linear.sizes), [0.0] * len(linear.sizes), 0
            for part, size in enumerate(linear.sizes):
                change = changes.get((linear, part))
                if change is not None:
                    ranks[part], scales[part] = change.rank, change.scale
                    stack.a[index, part, : change.rank] = change.a
                    stack.b[index, : change.rank, first : first + size] = change.b.T
                first += size
            stack.ranks[index] = torch.tensor(ranks, dtype=torch.int32)
            stack.scales[index] = torch.tensor(scales)

    def _empty_stack(self, linear: Linear) -> LoraWeights:
        in_features, out_features, num_parts = linear.in_features, sum(linear.sizes), len(linear.sizes)
        embedding = next(self._network.parameters())
        dtype, device = embedding.dtype, embedding.device
        return LoraWeights(
            a=torch.empty((self.max_loras, num_parts, self.max_rank, in_features), dtype=dtype, device=device),
            b=torch.empty((self.max_loras, self.max_rank, out_features), dtype=dtype, device=device),
            ranks=torch.zeros((self.max_loras, num_parts), dtype=torch.int32, device=device),
            scales=torch.zeros((self.max_loras, num_parts), device=device),
            part_sizes=linear.sizes,
        )


def _owner(namespace: Hashable) -> Any:
    if isinstance(namespace, tuple) and namespace:
        return namespace[0]
    return namespace


def _adaptable_layers(network: Network) -> list[Linear]:
    """Return each layer that has an adaptable projection."""
    layers: dict[Linear, None] = {}
    for linear, _ in _adaptable(network).values():
        layers[linear] = None
    return list(layers)


def _adaptable(network: Network) -> dict[str, tuple[Linear, int]]:
    """Return the layer and part of each adaptable projection, by checkpoint name.

    A draft head has no adaptable projection, nor has a product of too many parts, such as the recurrent layers of OLMo
    Hybrid have.
    """
    projections = {}
    for path, module in network.named_modules():
        if isinstance(module, Linear) and len(module.parts) <= MAX_PARTS and not path.startswith("draft_head."):
            parent = path.rpartition(".")[0].replace(".linear_attn", f".{network.config.recurrent_name}")
            for part, name in enumerate(module.parts):
                if name in TARGET_MODULES:
                    projections[f"model.{parent}.{name}"] = (module, part)
    return projections
