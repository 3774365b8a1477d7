"""Rows of logits with filters and penalties: random ones, and those at the edges."""

from __future__ import annotations

from typing import Any

import torch

from paged import Penalties

NAN, INF = float("nan"), float("inf")


def random_rows(num_rows: int, vocab_size: int, device: torch.device, *, seed: int) -> dict[str, Any]:
    """Arguments of `sample_tokens`: every third row has ties, every seventh is greedy."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    logits = torch.randn(num_rows, vocab_size, generator=generator) * (0.2 + 7 * rand(num_rows, 1))
    logits[::3] = (logits[::3] * 2).round() / 2
    temperature = 0.05 + 2 * rand(num_rows)
    temperature[1::7] = 0
    top_k = (1 + rand(num_rows) ** 3 * 1.3 * vocab_size).long()
    top_p = torch.where(rand(num_rows) < 0.3, 1.0, rand(num_rows).clamp(min=1e-6))
    min_p = torch.where(rand(num_rows) < 0.6, 0.0, 0.3 * rand(num_rows))
    counts = (rand(4, vocab_size) * 1.4).int()
    weights = torch.stack([0.5 + rand(num_rows), rand(num_rows) - 0.5, rand(num_rows) - 0.3], 1)
    rows = (rand(num_rows) * 6 - 2).floor().clamp(min=-1).long()
    penalties = Penalties(rows, counts, (counts > 0) | (rand(4, vocab_size) < 0.3), weights)
    keys = torch.randint(0, 1 << 32, (num_rows, 2), generator=generator)
    tensors = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    moved = {name: tensor.to(device) for name, tensor in {"logits": logits, "keys": keys, **tensors}.items()}
    return {**moved, "penalties": Penalties(*(tensor.to(device) for tensor in vars(penalties).values()))}


def demanding_rows(device: torch.device) -> dict[str, Any]:
    """Eight rows without ties, of which filters and penalties leave few tokens."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, 300, generator=generator) * 2
    logits[4:6] = torch.rand(2, 300, generator=generator) * 4
    seen = torch.rand(2, 300, generator=generator) < 0.95
    counts = (seen & (torch.rand(2, 300, generator=generator) < 0.95)).int() * 2
    weights = torch.tensor([[1.0, 0.0, 0.0]] * 6 + [[1.0, 9.0, 0.0], [9.0, 0.0, 4.0]])
    tensors = {
        "logits": logits,
        "keys": torch.randint(0, 1 << 32, (8, 2), generator=generator),
        "temperature": torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]),
        "top_k": torch.tensor([250, 40, 300, 100, 300, 300, 300, 300]),
        "top_p": torch.tensor([0.5, 1.0, 0.9, 0.97, 1.0, 0.3, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.9, 0.6, 0.0, 0.0]),
    }
    rows = torch.tensor([-1] * 6 + [0, 1])
    penalties = Penalties(*(tensor.to(device) for tensor in (rows, counts, seen, weights)))
    return {**{name: tensor.to(device) for name, tensor in tensors.items()}, "penalties": penalties}


# (logits, temperature, top_k, top_p, min_p) and the tokens that may come; -1 for none.
SPECIAL: dict[str, tuple[list[float], float, int, float, float, set[int]]] = {
    "NaN": ([NAN, 1.0, 2.0], 1.0, 9, 1.0, 0.0, {-1}),
    "NaN, filtered": ([0.0, NAN, 2.0], 1.0, 2, 0.5, 0.1, {-1}),
    "NaN, greedy": ([NAN, 1.0, 2.0, 2.0], 0.0, 1, 0.5, 0.0, {2}),
    "inf": ([INF, 1.0], 1.0, 9, 1.0, 0.0, {-1}),
    "inf, greedy": ([1.0, INF], 0.0, 9, 1.0, 0.0, {1}),
    "all -inf": ([-INF, -INF], 1.0, 9, 0.5, 0.0, {-1}),
    "all -inf, greedy": ([-INF, -INF], 0.0, 9, 0.5, 0.0, {-1}),
    "one finite": ([-INF, -3e38, -INF], 2.0, 9, 0.9, 0.0, {1}),
    "top_k beyond what is finite": ([-INF, 1.0, -INF, 1.0], 1.0, 3, 1.0, 0.0, {1, 3}),
    "top_k of 1": ([1.0, 3.0, 2.9], 9.0, 1, 1.0, 0.0, {1}),
    "top_k of 1, a tie": ([3.0, 1.0, 3.0], 1.0, 1, 1.0, 0.0, {0, 2}),
    "top_p of the top_k alone": ([0.0, 0.0, -0.1, -0.1], 1.0, 2, 0.51, 0.0, {0, 1}),
    "top_p before the tie": ([0.0, 0.0, -0.1, -0.1], 1.0, 3, 0.6, 0.0, {0, 1}),
    "half of four equals": ([1.0, 1.0, 1.0, 1.0], 1.0, 9, 0.5, 0.0, {0, 1, 2, 3}),
    "half of two pairs, exactly": ([0.0, 0.0, -INF, -INF], 1.0, 9, 0.5, 0.0, {0, 1}),
    "tiny top_p": ([1.0, 1.0, 0.999999], 1.0, 9, 2.0**-126, 0.0, {0, 1}),
    "top_p below 1": ([0.0, -10.0], 1.0, 9, 1 - 2.0**-24, 0.0, {0, 1}),
    "min_p of 1": ([1.0, 2.0, 2.0], 5.0, 9, 1.0, 1.0, {1, 2}),
    "a tiny temperature": ([1.0, 1.0 + 2.0**-23, 0.0], 2.0**-126, 9, 0.9, 0.0, {1}),
    "a huge temperature": ([1e30, -1e30, 0.0], 3e38, 2, 1.0, 0.0, {0, 2}),
    "far apart": ([0.0, -40.0, -80.0, -1e9], 1.0, 3, 1.0, 0.0, {0}),
}
