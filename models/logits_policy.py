"""Turn logits into the answer that each item's policy asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.kernels.core.checks import check_tensor
from paged.kernels.sampling.greedy_argmax import greedy_argmax
from paged.kernels.sampling.sample_tokens import FILTERS, filter_columns, sample_tokens
from paged.step.batch import DrawToken, GreedyArgmax, LogitsPolicy, UnifiedBatchItem, VerifyLogits
from paged.step.staging import to_device

Rows = torch.Tensor | list[torch.Tensor]
"""Answers of a step's wanted rows: logits [num_rows, V] or tokens int64 [num_rows], or one tensor for each row."""


class Draws(NamedTuple):
    """Arguments of `sample_tokens` for rows that only need tokens.

    Attributes:
        keys: int64 [n, 2].
        temperature: float32 [n].
        filters: numbers of FILTERS, float64 [num_filters, n].
    """

    keys: NDArray[np.int64]
    temperature: NDArray[np.float32]
    filters: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[DrawToken]) -> Draws:
        """Return the draws of the policies."""
        filters = [[kind.number(getattr(row, name)) for row in rows] for name, kind in FILTERS.items()]
        return cls(
            np.array([row.key for row in rows], np.int64).reshape(-1, 2),
            np.array([row.temperature for row in rows], np.float32),
            np.array(filters, np.float64),
        )

    @property
    def num_candidates(self) -> int:
        """Number of best tokens that decide a row's filters, the largest of all rows; 0 without filters."""
        needed: NDArray[Any] = np.zeros(len(self.temperature))
        for kind, numbers in zip(reversed(FILTERS.values()), self.filters[::-1], strict=True):
            num_best = numbers if kind.num_best is None else kind.num_best
            needed = np.where(numbers == kind.keeps_all, needed, num_best)  # the first filter decides
        return int(needed[self.temperature > 0].max(initial=0))

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a token for each row of logits [n, V], int64 [n]."""
        keys, temperature, filters = to_device(self, logits.device)
        if not self.num_candidates:
            return sample_tokens(logits, keys, temperature)
        columns: dict[str, Any] = filter_columns(filters)
        return sample_tokens(logits, keys, temperature, **columns)


def draws_of(policies: Sequence[LogitsPolicy]) -> Draws | None:
    """Return the draws if every policy wants only a token and has no other rules; else None."""
    draws = []
    for policy in policies:
        if policy == GreedyArgmax():
            policy = DrawToken(0.0, (0, 0))
        if not isinstance(policy, DrawToken):
            return None
        draws.append(policy)
    return Draws.of(draws)


def answers_of(logits: torch.Tensor, policies: Sequence[LogitsPolicy]) -> Rows:
    """Return the answer that each policy asks for, from a row of `logits` [n, V] each; tokens alone as one tensor.

    Raises the errors of `apply_policies`.
    """
    drawn = [policy for policy in policies if isinstance(policy, DrawToken)]
    if len(drawn) == len(policies):
        return Draws.of(drawn).choose(logits)
    return apply_policies(logits, policies)


def by_item(items: Sequence[UnifiedBatchItem], rows: Rows) -> list[torch.Tensor | None]:
    """Return each item's answer, None if its chunk is not final. rows: answers of the wanted rows, in order."""
    answers: list[torch.Tensor | None] = []
    start = 0
    for item in items:
        if not item.is_final_chunk:
            answers.append(None)
        elif isinstance(item.logits_policy, VerifyLogits):
            verified = rows[start : start + len(item.q_tokens)]
            start += len(item.q_tokens)
            answers.append(verified if isinstance(verified, torch.Tensor) else torch.stack(verified))
        else:
            answers.append(rows[start])
            start += 1
    return answers


def apply_policies(logits: torch.Tensor, policies: Sequence[LogitsPolicy]) -> list[torch.Tensor]:
    """Return for each policy its row of `logits` [n, V], or its token; all policies of a kind run in one call.

    Raises:
        InvalidInputError: a token mask or repetition penalty has a wrong shape or value.
    """
    answers = list(logits)
    drawn: dict[int, DrawToken] = {}
    greedy: dict[int, GreedyArgmax] = {}
    for row, policy in enumerate(policies):
        if isinstance(policy, DrawToken):
            drawn[row] = policy
        elif isinstance(policy, GreedyArgmax):
            greedy[row] = policy
    if drawn:
        tokens = Draws.of(list(drawn.values())).choose(logits[list(drawn)])
        for row, token in zip(drawn, tokens, strict=True):
            answers[row] = token
    if greedy:
        masks = [policy.token_mask for policy in greedy.values()]
        penalties = [policy.repetition_penalty for policy in greedy.values()]
        tokens = greedy_argmax(
            logits[list(greedy)],
            token_mask=_stacked(
                "token_mask", masks, torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            ),
            repetition_penalty=_stacked("repetition_penalty", penalties, torch.ones_like(logits[0])),
        )
        for row, token in zip(greedy, tokens, strict=True):
            answers[row] = token
    return answers


def _stacked(name: str, rows: Sequence[torch.Tensor | None], neutral: torch.Tensor) -> torch.Tensor | None:
    """Stack rows to [n, V], with `neutral` for None; return None if all are None."""
    stacked = []
    for row in rows:
        if row is None:
            stacked.append(neutral)
        else:
            check_tensor(name, row, neutral.shape, (neutral.dtype,), neutral.device)
            stacked.append(row)
    if all(row is neutral for row in stacked):
        return None
    return torch.stack(stacked)
