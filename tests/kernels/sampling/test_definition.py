"""The definition's sorts and sums against the rules token by token, both in float64."""

from typing import Any

import pytest
import torch

from paged.kernels.sampling import definition
from paged.kernels.sampling.penalties import Penalties
from tests.kernels.sampling import loops


def problem(seed: int) -> dict[str, Any]:
    """Rows with ties, tokens without a chance, every filter and penalty in some rows."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    num_rows, vocab_size = 6, 1 + seed % 40
    logits = (random(num_rows, vocab_size) * 12).round() / 2
    logits[random(num_rows, vocab_size) < 0.1] = -torch.inf
    seen = random(3, vocab_size) < 0.5
    return {
        "logits": logits,
        "keys": (random(num_rows, 2) * 2**32).long(),
        "temperature": (random(num_rows) * 3).floor() / 2,
        "top_k": (random(num_rows) * 1.2 * vocab_size).long() + 1,
        "top_p": (random(num_rows) * 1.4).clamp(0.01, 1),
        "min_p": (random(num_rows) - 0.7).clamp(min=0),
        "penalties": Penalties(
            (random(num_rows) * 4).long() - 1,
            (random(3, vocab_size) * 3).int() * seen,
            seen,
            random(num_rows, 3) + 0.5,
        ),
    }


@pytest.mark.parametrize("seed", range(60))
def test_sorts_are_the_rule(seed: int) -> None:
    arguments = problem(seed)
    assert definition.sample_tokens(**arguments).tolist() == loops.sample_tokens(**arguments).tolist()
