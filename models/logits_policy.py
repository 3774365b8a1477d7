"""From logits to the answer that each item's policy asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paged.batch import DrawToken, GreedyArgmax, LogitsPolicy, UnifiedBatch, VerifyLogits
from paged.kernels.common.checks import check_tensor
from paged.kernels.sampling.greedy_argmax import greedy_argmax
from paged.kernels.sampling.sample_tokens import sample_tokens
from paged.staging import to_device

# More than any vocabulary's size.
_ALL = int(np.iinfo(np.int64).max)


class Draws(NamedTuple):
    """Arguments of `sample_tokens`, with its shapes and dtypes, for rows that only need tokens."""

    keys: NDArray[np.int64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]

    @classmethod
    def of(cls, rows: Sequence[DrawToken]) -> Draws:
        """Return the draws of the policies."""
        return cls(
            np.array([row.key for row in rows], np.int64).reshape(-1, 2),
            np.array([row.temperature for row in rows], np.float32),
            np.array([row.top_k or _ALL for row in rows], np.int64),
            np.array([row.top_p for row in rows], np.float32),
            np.array([row.min_p for row in rows], np.float32),
        )

    @property
    def num_candidates(self) -> int:
        """Number of best tokens that decide a row's filters; 0 without filters."""
        needed = np.where(self.top_k < _ALL, self.top_k, np.where(self.top_p < 1, _ALL, self.min_p > 0))
        return int(needed[self.temperature > 0].max(initial=0))

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a token for each row of logits [n, V], int64 [n]."""
        keys, temperature, top_k, top_p, min_p = to_device(self, logits.device)
        if not self.num_candidates:
            return sample_tokens(logits, keys, temperature)
        return sample_tokens(logits, keys, temperature, top_k=top_k, top_p=top_p, min_p=min_p)


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


def answer_batch(logits: torch.Tensor, batch: UnifiedBatch) -> list[torch.Tensor | None] | torch.Tensor:
    """Return one answer for each item, from the logits of the wanted rows; None if its chunk is not final."""
    if batch.is_stacked and batch.columns.wants_logits:
        return logits
    final = [item for item in batch.items if item.is_final_chunk]
    policies = [item.logits_policy for item in final]
    if VerifyLogits not in set(map(type, policies)):
        return by_item(apply_policies(logits, policies), batch)
    answers: list[torch.Tensor] = []
    start = 0
    for item in final:
        if isinstance(item.logits_policy, VerifyLogits):
            end = start + len(item.q_tokens)
            answers.append(logits[start:end])
        else:
            end = start + 1
            answers += apply_policies(logits[start:end], [item.logits_policy])
        start = end
    return by_item(answers, batch)


def by_item(answers: Iterable[torch.Tensor], batch: UnifiedBatch) -> list[torch.Tensor | None]:
    """Return for each item of a batch its answer, None if its chunk is not final. answers: of the final chunks."""
    remaining = iter(answers)
    answers_of_items: list[torch.Tensor | None] = []
    for item in batch.items:
        answers_of_items.append(next(remaining) if item.is_final_chunk else None)
    return answers_of_items


def apply_policies(logits: torch.Tensor, policies: Sequence[LogitsPolicy]) -> list[torch.Tensor]:
    """Return for each policy its row of `logits` [n, V], or its token; policies of a kind run in one call.

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
