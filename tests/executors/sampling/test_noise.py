"""The counter-based noise: uniform, independent of its neighbours, and fixed for good."""

import numpy as np
import torch

from paged.executors.sampling.noise import Stream, hash_seeds, noise_keys, split_keys, uniform
from paged.kernels.sampling import definition as noise
from tests.executors.sampling.completions import chi_square_p
from tests.tolerance import assert_close


def _keys(seeds: list[int], positions: list[int], stream: Stream = Stream.TOKEN) -> torch.Tensor:
    keys = noise_keys(hash_seeds(np.array(seeds, np.uint64)), np.array(positions, np.int64), stream)
    return torch.from_numpy(split_keys(keys))


def exponential(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return noise.exponential(keys[:, None], torch.arange(num_tokens))


def test_is_exponential_in_every_direction() -> None:
    """Over tokens, positions and seeds alike, and over the small numbers that decide."""
    along_tokens = exponential(_keys([7], [0]), 100_000)[0]
    along_positions = exponential(_keys([7] * 100_000, list(range(100_000))), 1)[:, 0]
    along_seeds = exponential(_keys(list(range(100_000)), [3] * 100_000), 2)[:, 1]
    for values in (along_tokens, along_positions, along_seeds):
        shares = (-values.double()).exp()  # uniform
        counts = torch.histc(shares, bins=64, min=0, max=1)
        assert chi_square_p(counts.int().tolist(), [1 / 64] * 64) > 1e-4
        assert abs(float((values < 1e-3).double().mean()) - 1e-3) < 4e-4


def test_neighbours_are_independent() -> None:
    """Pairs from neighbouring positions, seeds, streams and tokens, counted in 8 x 8 bins."""
    seeds, positions = [5] * 20_000, list(range(20_000))
    first = exponential(_keys(seeds, positions), 4)
    others = {
        "position": exponential(_keys(seeds, [position + 1 for position in positions]), 4)[:, 0],
        "seed": exponential(_keys([6] * 20_000, positions), 4)[:, 0],
        "stream": exponential(_keys(seeds, positions, Stream.DRAFT), 4)[:, 0],
        "token": first[:, 1],
    }
    for name, other in others.items():
        pair = torch.stack([(-first[:, 0].double()).exp(), (-other.double()).exp()])
        counts = torch.bincount(((pair * 8).long().clamp(max=7) * torch.tensor([[8], [1]])).sum(0), minlength=64)
        assert chi_square_p(counts.tolist(), [1 / 64] * 64) > 1e-4, name


def test_values_stay_as_they_are() -> None:
    """A seed written down today gives the same text tomorrow, so the numbers may never change."""
    keys = noise_keys(hash_seeds(np.array([0, 1, 2**64 - 1], np.uint64)), np.array([0, 5, 1_000_000]), Stream.TOKEN)
    assert keys.tolist() == [12035550249420947055, 8370401632533425341, 5813018127432269293]
    values = exponential(torch.from_numpy(split_keys(keys)), 150_000)
    assert values.isfinite().all()
    assert (values > 0).all()
    assert_close(values[:, 149_999], torch.tensor([0.6365633606910706, 0.1805904656648636, 0.695057213306427]).double())
    shares = uniform(keys)
    assert ((shares >= 0) & (shares < 1)).all()
