"""From logits to what each item asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.batch import GreedyArgmax, LogitsPolicy, UnifiedBatchItem, VerifyLogits
from paged.kernels.common.checks import check_tensor
from paged.kernels.sampling.greedy_argmax import greedy_argmax


def answer_items(logits: torch.Tensor, items: Sequence[UnifiedBatchItem]) -> list[torch.Tensor | None]:
    """One entry an item, from the logits of the rows that were wanted: None where the chunk is not final."""
    final = [item for item in items if item.is_final_chunk]
    policies = [item.logits_policy for item in final]
    if VerifyLogits not in map(type, policies):
        answers = iter(apply_policies(logits, policies))
    else:
        sizes = [len(item.q_tokens) if isinstance(item.logits_policy, VerifyLogits) else 1 for item in final]
        answers = iter(
            rows if isinstance(item.logits_policy, VerifyLogits) else apply_policies(rows, [item.logits_policy])[0]
            for item, rows in zip(final, logits.split(sizes), strict=True)
        )
    return [next(answers) if item.is_final_chunk else None for item in items]


def apply_policies(logits: torch.Tensor, policies: Sequence[LogitsPolicy]) -> list[torch.Tensor]:
    """One entry a policy: its row of `logits` [n, V], or for GreedyArgmax the best token, all chosen in one call.

    Raises:
        InvalidInputError: a token mask or repetition penalty does not fit.
    """
    answers = list(logits)
    greedy = {row: policy for row, policy in enumerate(policies) if isinstance(policy, GreedyArgmax)}
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
    """[n, V], `neutral` for rows that are None; None where all are."""
    given = [row for row in rows if row is not None]
    for row in given:
        check_tensor(name, row, neutral.shape, (neutral.dtype,), neutral.device)
    return torch.stack([neutral if row is None else row for row in rows]) if given else None
