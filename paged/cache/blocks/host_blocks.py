"""Pinned host memory for blocks, and its copies to and from the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.cache.copy_blocks import BlockCopy
from paged.staging import to_device

# Largest transfer. 64 MB take 1.2 ms on PCIe 5 (55 GB/s), much more than the kernel's 40 us (read and written at 3.3
# TB/s) and a copy's start, 10 us. A second buffer to hide these would gain 4 %.
_STAGED_BYTES = 64 << 20


class HostBlocks:
    """Pinned memory for blocks, each with its part of every cache side by side, so that neighbours move in one copy.

    On the device a kernel gathers blocks into staging memory, or scatters them from it, in chunks. All work is on its
    own stream, and the host does not wait. The kernels run after all earlier work of the current stream and before all
    later work; later work does not wait for the copies to the host. A call that fails has written only to its targets.
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
        staged_pairs, hosts = self._stage(pairs, host=1)
        with self._beside() as run:
            for chunk in self._chunks(hosts):
                run(self._gather, staged_pairs[chunk])
                for on_host, staged in self._runs(hosts[chunk]):
                    on_host.copy_(staged, non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host block to device block for every pair. The first chunk is sent while the current forward runs."""
        staged_pairs, hosts = self._stage(pairs, host=0)
        with self._beside() as run:
            for chunk in self._chunks(hosts):
                for on_host, staged in self._runs(hosts[chunk]):
                    staged.copy_(on_host, non_blocking=True)
                run(self._scatter, staged_pairs[chunk])

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
        firsts = hosts.tolist()
        return [
            (self._host[firsts[start] : firsts[end - 1] + 1], self._staged[start:end])
            for start, end in pairwise(borders)
        ]

    @contextmanager
    def _beside(self) -> Iterator[Callable[[BlockCopy, torch.Tensor], None]]:
        """Make the own stream current; yield a function that runs a kernel ordered with the other stream's work."""
        if self._stream is None:
            yield BlockCopy.__call__
            return
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
