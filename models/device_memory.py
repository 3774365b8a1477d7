"""Device memory of a model, which the model frees while it sleeps."""

from __future__ import annotations

import torch
from torch import nn

from paged.cache.manager import PagedKvCacheManager
from paged.errors import ModelAsleepError
from paged.models.families.network import Network
from paged.models.loading.huge_pages import move_to_huge_pages
from paged.models.step_graphs import StepGraphs


class DeviceMemory:
    """Weights, KV cache and graphs of a model. A sleep keeps the tensor objects, but changes their addresses.

    On a CPU, weights that are rounded or unpacked for its products (`CpuProducts`) stay.

    level: 0 while the model can run. Asleep: 1 if the weights are in host memory, 2 if they are dropped.
    """

    def __init__(
        self, network: Network, kv_manager: PagedKvCacheManager, graphs: StepGraphs, num_positions: int
    ) -> None:
        self.level = 0
        self._network, self._kv_manager, self._graphs, self._num_positions = network, kv_manager, graphs, num_positions
        self._was_captured = False
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self._host: list[torch.Tensor] = []
        network.set_caches(kv_manager, num_positions)

    def check_awake(self) -> None:
        """Raise ModelAsleepError if the model sleeps."""
        if self.level:
            method = "wake" if self.level == 1 else "update_weights"
            raise ModelAsleepError(f"the model sleeps at level {self.level}; call {method} first")

    def sleep(self, level: int) -> None:
        """Free the memory; no sequence may be live."""
        on_host = _is_on_host(self._network.embed_tokens)
        freed: list[tuple[torch.UntypedStorage, int]] = []
        if level == 2 or not on_host:  # at level 1, weights stay in host memory
            storages: dict[int, torch.UntypedStorage] = {}
            for parameter in self._network.parameters():
                is_kept = parameter.is_mkldnn or _is_on_host(parameter) != on_host  # those of `HostWeights`
                if not is_kept:
                    storage = parameter.untyped_storage()
                    storages[storage.data_ptr()] = storage
            freed = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        self._host = []
        if level == 1:
            self._host = [_bytes(storage).to("cpu", copy=True) for storage, _ in freed]
        self._was_captured, self._freed, self.level = self._graphs.are_captured, freed, level
        self._graphs.clear()
        self._kv_manager.clear_prefix_cache()
        self._kv_manager.tensors.release()
        for storage, _ in freed:
            storage.resize_(0)
        if level == 2:
            _drop_packed(self._network)
        if not on_host:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate the memory again, and copy the weights back after level 1; if memory is short, allocate none."""
        try:
            for storage, size in self._freed:
                storage.resize_(size)
            self._kv_manager.tensors.restore()
        except BaseException:
            for storage, _ in self._freed:
                storage.resize_(0)
            raise
        for (storage, _), held in zip(self._freed, self._host, strict=False):
            _bytes(storage).copy_(held)
        self._freed, self._host = [], []

    def resume(self) -> None:
        """Renew everything that holds addresses, so that the model can run."""
        if self._network.embed_tokens.is_cpu:
            move_to_huge_pages(self._network.weight_tensors())  # after level 2, weights have new memory, in small pages
        self._network.set_caches(self._kv_manager, self._num_positions)
        if self._was_captured:
            self._graphs.capture()
        self.level = 0


def _is_on_host(weight: torch.Tensor) -> bool:
    return weight.is_cpu


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _drop_packed(network: Network) -> None:
    """Replace weights in a CPU's order, which have no storage to free, by empty weights of the same kind."""
    for module in network.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_mkldnn:
                setattr(module, name, nn.Parameter(torch.zeros(1).to_mkldnn(), requires_grad=False))
    network.drop_packed_embedding()
