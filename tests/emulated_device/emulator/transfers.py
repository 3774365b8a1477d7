"""Copies between host and device: those in flight, the host memory they use, and who touches it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tests.emulated_device.emulator.memory import Block
from tests.emulated_device.emulator.order import Clock
from tests.emulated_device.emulator.report import place

if TYPE_CHECKING:
    from tests.emulated_device.emulator.device import EmulatedCuda


@dataclass
class _Transfer:
    """A copy that the stream has not come to yet. values: of `host` when the copy was asked for, or for it."""

    host: torch.Tensor
    values: torch.Tensor
    stream: int
    time: int
    place: str
    to_host: bool


class Transfers:
    """Pinned host memory, and the copies under way. What the device sends to it arrives when the host waits for it,
    not before; what the device takes from it has to stay until then."""

    def __init__(self, machine: EmulatedCuda) -> None:
        self._machine = machine
        # Kept for good, so that no address is ever another's.
        self._pinned: dict[int, tuple[Block, torch.UntypedStorage]] = {}
        self._in_flight: list[_Transfer] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a host tensor's memory for pinned."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            block = Block(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), None)
            self._pinned[block.start] = block, storage
            self._machine.memory.add(block)
        return tensor

    def pinned_block(self, tensor: torch.Tensor) -> Block | None:
        """The pinned memory that a host tensor lies in."""
        return self._pinned.get(tensor.untyped_storage().data_ptr(), (None,))[0]

    def send(self, host: torch.Tensor, stream: int, time: int) -> None:
        """A copy out of pinned host memory has begun."""
        self._in_flight.append(_Transfer(host, host.clone(), stream, time, place(), to_host=False))

    def receive(self, host: torch.Tensor, values: torch.Tensor, stream: int, time: int) -> None:
        """A copy into pinned host memory has begun."""
        _bytes(host).fill_(0xFF)
        self._in_flight.append(_Transfer(host, values, stream, time, place(), to_host=True))

    def settle(self, clock: Clock) -> None:
        """The host knows that everything up to here is over."""
        over = [one for one in self._in_flight if clock.get(one.stream, 0) >= one.time]
        self._in_flight = [one for one in self._in_flight if clock.get(one.stream, 0) < one.time]
        for transfer in over:
            self._end(transfer)

    def settle_all(self) -> None:
        """The device is idle, and the host need not know."""
        over, self._in_flight = self._in_flight, []
        for transfer in over:
            self._end(transfer)

    def deliver(self, host: torch.Tensor) -> None:
        """The device reads pinned memory that it may be sending to: its own order sees to that."""
        address = host.untyped_storage().data_ptr()
        for transfer in self._in_flight:
            if transfer.to_host and transfer.host.untyped_storage().data_ptr() == address:
                transfer.host.copy_(transfer.values)

    def host_uses(self, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """PyTorch reads and writes tensors on the host; what NumPy does is only seen by its results."""
        if not self._in_flight:
            return
        changed = {tensor.untyped_storage().data_ptr() for tensor in written}
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            for transfer in self._in_flight:
                if transfer.host.untyped_storage().data_ptr() != address or not _overlap(transfer.host, tensor):
                    continue
                if transfer.to_host:
                    text = f"the copy to it at {transfer.place} was not waited for"
                    self._machine.report.hazard("host memory in flight", text)
                elif address in changed:
                    text = f"overwritten while the copy from it at {transfer.place} was in flight"
                    self._machine.report.hazard("host memory in flight", text)

    def _end(self, transfer: _Transfer) -> None:
        if transfer.to_host:
            transfer.host.copy_(transfer.values)
        elif not torch.equal(_bytes(transfer.host), _bytes(transfer.values)):
            text = "the source of an asynchronous copy was overwritten before the copy was over"
            self._machine.report.hazard("host memory in flight", text, transfer.place)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    def span(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    if one.numel() == 0 or other.numel() == 0:
        return False
    (start, end), (other_start, other_end) = span(one), span(other)
    return start < other_end and other_start < end


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
