"""Arrays reach the device whole and aligned, and a buffer waits for the copy out of it before it is written again."""

import itertools
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from paged.staging import _NUM_BUFFERS, FixedCopy, Staging


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
        for array, tensor in zip(arrays, staging.to_device(arrays), strict=True):
            assert tensor.device.type == device.type
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
            np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


def test_earlier_tensors_keep_their_values(device: torch.device) -> None:
    """Also when the ring has gone round, and its buffers have grown in between."""
    staging = Staging(device)
    steps = [step(seed, seed**3 // 1000) for seed in range(3 * _NUM_BUFFERS)]
    sent = [staging.to_device(arrays) for arrays in steps]
    for arrays, tensors in zip(steps, sent, strict=True):
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)


@pytest.mark.parametrize("size", [1, 64])
def test_fixed_copies_arrive_in_the_same_memory(size: int, device: torch.device) -> None:
    """Also when another copy has made a buffer grow, and fewer rows than before leave fills behind them."""
    staging = Staging(device)
    arrays = [np.empty(size, np.int64), np.empty((2, size + 1), np.int32)]
    fixed, later = FixedCopy(staging, arrays), FixedCopy(staging, arrays)
    addresses = [tensor.data_ptr() for tensor in fixed.tensors]
    for seed in range(3 * _NUM_BUFFERS):
        rng, count = np.random.default_rng(seed), seed % (size + 1)
        rows = [rng.integers(1, 99, count), rng.integers(1, 99, (2, count), dtype=np.int32)]
        fixed.send(rows, (0, -1))
        later.send([rows[0] + 1, rows[1]], (7, 7))
        staging.to_device([np.empty(seed**2, np.int32)])
        for tensor, row, fill in zip(fixed.tensors, rows, (0, -1), strict=True):
            values = tensor.cpu().numpy()
            np.testing.assert_array_equal(values[..., :count], row)
            assert (values[..., count:] == fill).all()
    assert [tensor.data_ptr() for tensor in fixed.tensors] == addresses


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The address of every source that is copied, and whether the call returns before the copy has ended."""
    copy, noted = torch.Tensor.copy_, list[tuple[int, bool]]()

    def note(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        noted.append((source.data_ptr(), non_blocking))
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", note)
    return noted


def test_a_buffer_is_written_after_its_last_copy_alone(copies: list[tuple[int, bool]]) -> None:
    calls: list[tuple[str, int, int]] = []
    numbers = itertools.count()

    def new_event() -> Mock:
        """Stands for an event of a GPU: notes what it is asked, and how many copies were made before."""
        event, number = Mock(), next(numbers)
        event.synchronize.side_effect = lambda: calls.append(("wait", number, len(copies)))
        event.record.side_effect = lambda: calls.append(("record", number, len(copies)))
        return event

    staging = Staging(torch.device("cpu"), new_event)
    for seed in range(2 * _NUM_BUFFERS + 1):
        staging.to_device(step(seed, 100))
    ring = [number % _NUM_BUFFERS for number in range(2 * _NUM_BUFFERS + 1)]
    assert copies == [(staging._buffers[number].memory.data_ptr(), True) for number in ring]
    expected = [[("wait", number, i), ("record", number, i + 1)] for i, number in enumerate(ring)]
    assert calls == list(itertools.chain(*expected))


def test_a_copy_is_waited_for_where_nothing_tells_its_end(copies: list[tuple[int, bool]]) -> None:
    Staging(torch.device("cpu")).to_device([np.arange(3)])
    assert [non_blocking for _, non_blocking in copies] == [False]
