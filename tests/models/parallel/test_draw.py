"""Tokens drawn on shards are those drawn from the whole."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from threading import Barrier, Lock
from typing import Any

import pytest
import torch

from paged.models.logits_policy import Draws, answers_of
from paged.models.parallel.draw import candidates_of, draw_tokens
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.step.batch import DrawToken
from tests.deadline import HANG_S


class _Together(Ranks):
    """A rank among threads of this process, of which one runs at a time, as Triton's interpreter asks for."""

    def __init__(self, share: Share, barrier: Barrier, turn: Lock, sent: list[torch.Tensor]) -> None:
        super().__init__(share)
        self._barrier, self._turn, self._sent, self.num_sent = barrier, turn, sent, list[int]()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.num_sent.append(x.shape[1])
        self._sent[self.rank] = x
        self._turn.release()
        self._barrier.wait(HANG_S)
        found = torch.cat(self._sent, -1)
        self._barrier.wait(HANG_S)
        self._turn.acquire()
        return found

    gather_everywhere = gather


def _drawn(logits: torch.Tensor, draws: Draws, size: int, num_candidates: int = 0) -> tuple[torch.Tensor, list[int]]:
    """Tokens, and how many numbers of a row a rank has sent."""
    barrier, turn, sent = Barrier(size), Lock(), [logits] * size

    def draw(rank: int) -> tuple[torch.Tensor, list[int]]:
        ranks = _Together(Share(rank, size), barrier, turn, sent)
        rows = ranks.share.vocabulary(logits.shape[1])
        parameters = map(torch.from_numpy, draws)
        own = logits[:, rows.start : rows.stop]
        with turn:
            return draw_tokens(ranks, own, rows.start, *parameters, num_candidates=num_candidates), ranks.num_sent

    with ThreadPoolExecutor(size) as pool:
        return next(iter(pool.map(draw, range(size))))


def _draws(count: int, *, heats: Sequence[float] = (0.0, 0.3, 1.0, 5.0), **filters: Sequence[float]) -> Draws:
    """Noise by chance, and of every parameter one value a row, in turn."""
    keys = torch.randint(1 << 32, (count, 2)).tolist()
    turns = {name: cycle(values) for name, values in filters.items()}
    policies = []
    for (low, high), heat in zip(keys, cycle(heats), strict=False):
        own: dict[str, Any] = {name: next(values) for name, values in turns.items()}
        policies.append(DrawToken(heat, (low, high), **own))
    return Draws.of(policies)


@pytest.mark.parametrize(
    ("size", "rows", "backend"),
    [(2, 12, "triton"), (2, 64, "torch"), (3, 64, "torch"), (4, 64, "torch")],
    indirect=["backend"],
)
def test_as_from_the_whole(size: int, rows: int, backend: str) -> None:
    logits = torch.randn(rows, 131) * 3
    logits[5, :100], logits[6], logits[7] = -torch.inf, -torch.inf, 0.25
    draws = _draws(rows)
    expected = draws.choose(logits)
    assert len(expected.unique()) > 5
    assert int(expected[6]) == -1
    found, sent = _drawn(logits, draws, size)
    assert found.tolist() == expected.tolist()
    assert sent == [4]


@pytest.mark.parametrize("backend", ["torch"], indirect=True)  # in the interpreter this takes minutes
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("step", [2.0**-20, 0.5], ids=["distinct", "ties"])
def test_filters_leave_the_tokens_of_the_whole(size: int, step: float, backend: str) -> None:
    """The cycles have no common length, so that all values meet."""
    rows = 256
    logits = (torch.randn(rows, 131) * 3 / step).round() * step
    logits[5, :100], logits[6], logits[7], logits[8, 30] = -torch.inf, -torch.inf, 0.25, torch.nan
    for filters in (
        {"top_k": (1, 2, 7, 20, 50), "top_p": (1.0, 0.9, 0.5), "min_p": (0.0, 0.1, 0.0, 0.02, 0.0, 0.9, 0.0)},
        {"top_k": (0, 3, 31), "min_p": (0.0, 0.05, 0.3, 1.0, 0.0)},
        {"min_p": (0.0, 0.05, 0.3, 1.0, 0.01)},
    ):
        draws = _draws(rows, heats=(0.3, 1.0, 0.0, 5.0, 1.0, 1.0, 2.0, 1.0, 0.7, 1.0, 1.5), **filters)
        most = 50 if "top_p" in filters else 31 if "top_k" in filters else 1
        assert draws.num_candidates == most
        candidates = candidates_of(most, size, 10_000)
        assert candidates is not None
        assert candidates in range(most, most + 16)
        found, sent = _drawn(logits, draws, size, candidates)
        assert found.tolist() == draws.choose(logits).tolist()
        assert sent == [candidates, 4]
        assert found.tolist() != _drawn(logits, draws, size)[0].tolist()


def test_what_filters_need_is_not_sent_where_logits_are_less() -> None:
    assert _draws(4).num_candidates == 0
    assert candidates_of(0, 8, 100) == 0
    whole_row = _draws(4, top_k=(20, 0), top_p=(0.9,)).num_candidates
    assert candidates_of(whole_row, 2, 1 << 20) is None
    assert _draws(4, heats=(0.0,), top_p=(0.9,)).num_candidates == 0
    assert candidates_of(20, 8, 7 * 32 * 4) is None
    assert candidates_of(20, 8, 7 * 32 * 4 + 1) == 32
    assert candidates_of(500, 16, 1 << 20) is None


def test_of_equal_tokens_the_first(backend: str) -> None:
    logits = torch.zeros(2, 40)
    logits[0, 7] = logits[0, 33] = logits[1, 31] = logits[1, 39] = 1
    assert _drawn(logits, _draws(2, heats=(0.0,)), 2)[0].tolist() == [7, 31]


def test_nan_leaves_nothing_to_draw(backend: str) -> None:
    logits = torch.zeros(2, 40)
    logits[:, 25] = torch.nan
    logits[1, 26] = 1
    draws = _draws(2, heats=(1.0, 0.0))
    assert _drawn(logits, draws, 2)[0].tolist() == draws.choose(logits).tolist()


def test_more_best_tokens_than_a_table_can_count() -> None:
    logits = torch.randn(3, 50)
    policies = [DrawToken(1.0, (7, 8), top_p=0.5), DrawToken(1.0, (7, 8), top_k=sys.maxsize, top_p=0.5)]
    for row in logits:
        without, beyond = answers_of(row.repeat(2, 1), policies)
        assert without == beyond
