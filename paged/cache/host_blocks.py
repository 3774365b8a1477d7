"""Pinned host memory for swapped blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.cache.copy_blocks import BlockCopy
from paged.step.staging import to_device

# Bytes of the largest transfer. A second buffer would hide the gather kernel behind it, but save only 4 % of the time,
# see limits.md.
_STAGED_BYTES = 64 << 20


class HostBlocks:
    """Pinned host memory for blocks. Each block has its parts of all caches side by side, so it moves in one copy.

    On a GPU, a kernel gathers blocks into staging memory or scatters them from there, in chunks. On a CPU, blocks move
    directly. All work runs on a separate stream, and the host does not wait. The kernels run after all earlier and
    before all later work of the current stream. Later work does not wait for copies to the host. A call that fails has
    written only to its targets.
    """

    def __init__(self, caches: torch.Tensor, num_blocks: int) -> None:
        """caches: contiguous [num_caches, device blocks, ...]. num_blocks: number of host blocks, with ids from 1."""
        caches = caches.view(torch.uint8).flatten(2)
        self._device = caches.device
        shape = caches.shape[0], caches.shape[2]
        is_pinned = caches.is_cuda and num_blocks > 0
        self._host = torch.empty((num_blocks + 1, *shape), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        self._stream = torch.cuda.Stream(self._device) if caches.is_cuda else None
        # Allocate on the copy stream, because the allocator reuses memory on the stream that allocated it.
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._staged = self._host
            if caches.is_cuda:
                length = min(num_blocks, max(1, _STAGED_BYTES // max(1, self._host[0].nbytes)))
                self._staged = torch.empty((length, *shape), dtype=torch.uint8, device=self._device)
            self._gather = BlockCopy(caches.unbind(), self._staged.unbind(1))
            self._scatter = BlockCopy(self._staged.unbind(1), caches.unbind())

    def read_addresses(self) -> None:
        """Read the caches' addresses again, after their memory has moved."""
        self._gather.read_addresses()
        self._scatter.read_addresses()

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
        """Return a copy of a host block, after waiting for running copies."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._host[block].numpy().tobytes()

    def write(self, block: int, data: bytes | memoryview) -> None:
        """Fill a host block, after waiting for running copies."""
        if self._stream is not None:
            self._stream.synchronize()
        self._host[block].numpy().ravel()[:] = np.frombuffer(data, np.uint8)

    def _stage(self, pairs: Sequence[tuple[int, int]], host: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Sort pairs by host block; return them with staged instead of host blocks, and the host blocks.

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
        """Return (host memory, staged memory) of each run of neighbouring host blocks in a chunk."""
        borders = [0, *(np.flatnonzero(np.diff(hosts) != 1) + 1).tolist(), len(hosts)]
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start, end in pairwise(borders):
            first, last = int(hosts[start]), int(hosts[end - 1])
            runs.append((self._host[first : last + 1], self._staged[start:end]))
        return runs

    @contextmanager
    def _beside(self) -> Iterator[Callable[[BlockCopy, torch.Tensor], None]]:
        """Make the separate stream current; yield a function that runs a kernel in order with the computing stream."""
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
    """Host blocks of several tensors, which move together. num_block_bytes: bytes of a block over all tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor], num_blocks: int) -> None:
        """tensors, num_blocks: like `caches` and `num_blocks` of `HostBlocks`."""
        self.num_blocks = num_blocks
        self._parts = [HostBlocks(tensor, num_blocks) for tensor in tensors]
        self.num_block_bytes = sum(part.num_block_bytes for part in self._parts)

    def read_addresses(self) -> None:
        """Read the tensors' addresses again, after their memory has moved."""
        for part in self._parts:
            part.read_addresses()

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device block to host block for every pair."""
        for part in self._parts:
            part.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host block to device block for every pair."""
        for part in self._parts:
            part.swap_in(pairs)

    def read(self, block: int) -> bytes:
        """Return a copy of a host block, after waiting for copies to it; any thread may call this."""
        return b"".join(part.read(block) for part in self._parts)

    def write(self, block: int, data: bytes | memoryview) -> None:
        """Fill a host block with a result of `read`, after waiting for copies from it."""
        start = 0
        for part in self._parts:
            part.write(block, data[start : start + part.num_block_bytes])
            start += part.num_block_bytes
