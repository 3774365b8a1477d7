"""Arrays reach the device whole and aligned, and a buffer waits for the copy out of it before it is written again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paged.staging import _NUM_BUFFERS, Staging


class Device:
    """Stands for the events of a GPU: the copies it has been given, and those it was waited for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.events: list[Event] = []

    def new_event(self) -> Event:
        self.events.append(Event(self, len(self.events)))
        return self.events[-1]


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def record(self) -> None:
        self.device.calls.append(("record", self.number))

    def synchronize(self) -> None:
        self.device.calls.append(("wait", self.number))


def step(seed: int, size: int) -> list[np.ndarray]:
    """What a step sends: several dtypes and shapes, one of them empty, one not contiguous."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(-(1 << 60), 1 << 60, size),
        rng.integers(0, 1 << 30, (size, 3), dtype=np.int32),
        np.empty(0, np.int64),
        rng.integers(0, 1 << 30, (3, size + 1), dtype=np.int32)[:, :size],
        rng.random(size) < 0.5,
    ]


@pytest.mark.parametrize("size", [0, 1, 7, 64, 10_000])
def test_arrays_arrive(size: int, device: torch.device) -> None:
    staging = Staging(device)
    for seed in range(2 * _NUM_BUFFERS):
        arrays = step(seed, size)
        tensors = staging.to_device(arrays)
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.device.type == device.type
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
            np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


def test_earlier_tensors_keep_their_values(device: torch.device) -> None:
    """Also when the ring has gone round, and its buffers have grown in between."""
    staging = Staging(device)
    sent = [
        (arrays, staging.to_device(arrays))
        for seed in range(5 * _NUM_BUFFERS)
        for arrays in [step(seed, seed**3 // 200)]
    ]
    for arrays, tensors in sent:
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_a_buffer_is_written_after_its_last_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Device()
    staging = Staging(torch.device("cpu"), fake.new_event)
    buffers = staging._buffers
    copy = torch.Tensor.copy_

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        (number,) = (i for i, buffer in enumerate(buffers) if buffer.memory.data_ptr() == source.data_ptr())
        fake.calls.append(("copy", number))
        assert non_blocking
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    for seed in range(2 * _NUM_BUFFERS + 1):
        staging.to_device(step(seed, 100))
    ring = [number % _NUM_BUFFERS for number in range(2 * _NUM_BUFFERS + 1)]
    assert fake.calls == [(call, number) for number in ring for call in ("wait", "copy", "record")]


def test_buffers_are_used_again_and_grow_by_doubling() -> None:
    staging = Staging(torch.device("cpu"))
    memory = []
    for size in (10, 10, 50_000, 10):
        for _ in range(_NUM_BUFFERS):
            staging.to_device([np.zeros(size, np.int64)])
        memory.append([(buffer.memory.data_ptr(), len(buffer.memory)) for buffer in staging._buffers])
    small, again, grown, kept = memory
    assert small == again
    assert grown == kept
    assert {size for _, size in small} == {1 << 16}
    assert {size for _, size in grown} == {1 << 19}
    assert len({address for address, _ in grown}) == _NUM_BUFFERS


def test_a_copy_is_waited_for_where_nothing_tells_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(torch.device("cpu"))
    copy, blocking = torch.Tensor.copy_, []

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        blocking.append(not non_blocking)
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    staging.to_device([np.arange(3)])
    assert blocking == [True]
