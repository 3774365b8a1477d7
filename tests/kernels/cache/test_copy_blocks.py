"""copy_blocks: bit for bit, in every cache, and only where it was asked to."""

import pytest
import torch

from paged import copy_blocks
from tests.kernels.refusals import assert_refuses

PAIRS = [(4, 0), (1, 5), (4, 3)]
COPIED = [4, 1, 2, 4, 4, 1]  # where each of 6 blocks is from then

pytestmark = pytest.mark.usefixtures("backend")


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Every bit pattern, so NaNs of all payloads too."""
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).to(device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("block_shape", "dtype"),
    [
        ((8, 2, 32), torch.float32),
        ((8, 2, 80), torch.bfloat16),
        ((16, 5, 64), torch.float16),  # 10 KB: more than one program a block
        ((7,), torch.float16),  # addresses that 2 bytes divide, no more
        ((3, 5), torch.uint8),
        ((16, 2, 80), torch.float8_e4m3fn),
        ((3, 1), torch.float32),
    ],
)
def test_copies_bits_in_every_cache(block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    caches = [_random_bits((6, *block_shape), dtype, device) for _ in range(3)]
    before = [_bits(cache).clone() for cache in caches]
    copy_blocks(caches, PAIRS)
    assert all(torch.equal(_bits(cache), old[COPIED]) for cache, old in zip(caches, before, strict=True))


def test_interleaved_caches_and_device_pairs(device: torch.device) -> None:
    pool = _random_bits((6, 2, 8, 2, 32), torch.float16, device)
    before = pool.clone()
    pairs = torch.tensor([(7, source, destination) for source, destination in PAIRS], device=device)[:, 1:]
    copy_blocks([pool[:, 1]], pairs)
    assert torch.equal(_bits(pool[:, 0]), _bits(before[:, 0]))
    assert torch.equal(_bits(pool[:, 1]), _bits(before[COPIED, 1]))


def test_pairs_of_an_iterator(device: torch.device) -> None:
    cache = torch.arange(4.0, device=device)
    copy_blocks([cache], iter([(0, 1), (2, 3)]))  # type: ignore[arg-type]
    assert cache.tolist() == [0, 0, 2, 2]


def test_nothing_to_copy(device: torch.device) -> None:
    cache = torch.arange(12.0, device=device).view(3, 4)
    copy_blocks([], PAIRS)
    copy_blocks([cache], [])
    copy_blocks([cache], torch.empty(0, 2, dtype=torch.int64, device=device))
    assert torch.equal(cache, torch.arange(12.0, device=device).view(3, 4))


def test_rejects_what_clashes_lies_outside_or_differs(device: torch.device) -> None:
    cache = torch.zeros(6, 4, 4, device=device)
    beside = torch.zeros(6, 2, 4, 4, device=device)[:, 0]
    assert_refuses(
        copy_blocks,
        {"caches": [cache, cache.clone()], "block_pairs": PAIRS},
        ("block_pairs", [(4, 0), (1, 4)], r"block_pairs\[1\]: destination 4 is a source too"),
        ("block_pairs", torch.tensor([(4, 0), (1, 0)]), r"block_pairs\[1\]: destination 0 appears twice"),
        ("block_pairs", [(0, 6)], r"block_pairs\[0\]: block 6, expected 0 to 5"),
        ("block_pairs", [(-1, 2)], r"block_pairs\[0\]: block -1"),
        ("block_pairs", [(1, 2, 3)], r"block_pairs: \[\(1, 2, 3\)\]"),
        ("block_pairs", torch.tensor(PAIRS, dtype=torch.int32), "block_pairs: dtype"),
        ("caches", [cache, cache[:5]], r"caches\[1\]: shape"),
        ("caches", [cache, beside], r"caches\[1\]: strides"),
        ("caches", [cache.transpose(1, 2)], "expected every block contiguous"),
    )
