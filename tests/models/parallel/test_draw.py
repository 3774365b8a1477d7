"""Tokens drawn on shards are those drawn from the whole."""

from __future__ import annotations

import pytest
import torch

from paged.kernels.sampling.sample_tokens import sample_tokens
from paged.models.parallel.draw import draw_tokens
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share


class _OneByOne(Ranks):
    """Ranks that run one after the other in this process, the first one last."""

    sent: list[torch.Tensor]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent.insert(0, x)
        return x if self.rank else torch.cat(self.sent, -1)


def _drawn(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, size: int) -> torch.Tensor:
    sent: list[torch.Tensor] = []
    found = logits
    for rank in reversed(range(size)):
        ranks = _OneByOne(Share(rank, size))
        ranks.sent = sent
        rows = ranks.share.vocabulary(logits.shape[1])
        found = draw_tokens(ranks, logits[:, rows.start : rows.stop], rows.start, temperature, keys)
    return found


@pytest.mark.parametrize(
    ("size", "rows", "backend"),
    [(2, 12, "triton"), (2, 64, "torch"), (3, 64, "torch"), (4, 64, "torch")],
    indirect=["backend"],
)
def test_as_from_the_whole(size: int, rows: int, backend: str) -> None:
    logits = torch.randn(rows, 131) * 3
    logits[5, :100], logits[6], logits[7] = -torch.inf, -torch.inf, 0.25
    temperature = torch.tensor([0.0, 0.3, 1.0, 5.0]).repeat(rows // 4)
    keys = torch.randint(1 << 32, (rows, 2))
    expected = sample_tokens(logits, keys, temperature)
    assert len(expected.unique()) > 5
    assert int(expected[6]) == -1
    assert _drawn(logits, temperature, keys, size).tolist() == expected.tolist()


def test_of_equal_tokens_the_first(backend: str) -> None:
    logits, keys = torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int64)
    logits[0, 7] = logits[0, 33] = logits[1, 31] = logits[1, 39] = 1
    assert _drawn(logits, torch.zeros(2), keys, 2).tolist() == [7, 31]


def test_nan_leaves_nothing_to_draw(backend: str) -> None:
    logits, keys = torch.zeros(2, 40), torch.zeros(2, 2, dtype=torch.int64)
    logits[:, 25] = torch.nan
    logits[1, 26] = 1
    temperature = torch.tensor([1.0, 0.0])
    assert _drawn(logits, temperature, keys, 2).tolist() == sample_tokens(logits, keys, temperature).tolist()
