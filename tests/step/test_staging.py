"""Arrays reach the device whole and aligned. tests/emulated_device shows that a buffer waits for the copy out of it."""

import numpy as np
import pytest
import torch

from paged.step.staging import _NUM_BUFFERS, FixedCopy, Staging


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
