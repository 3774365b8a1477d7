"""Interface of draft sources, and drafting for a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError, PagedError
from paged.executors.isolation import attempt, quietly
from paged.executors.requests.request import NO_TOKEN, Completion
from paged.executors.sampling.rows import index_tensor
from paged.executors.sampling.sampler import Drafts, Sampler
from paged.kernels.core.errors import shown

_LOG = logging.getLogger("paged")


class Proposer(Protocol):
    """Source of drafts for decoding completions.

    Attributes:
        num_tokens: maximum number of drafts for a completion.
        vocab_size: vocabulary size of the drafts; None if drafts are copied from the text.
    """

    num_tokens: int
    vocab_size: int | None

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        """Draft at most `limits[i]` tokens for completion i; fewer or none are always allowed."""

    def forget(self, completion: Completion) -> None:
        """Drop the state of a completion that has finished or was preempted."""

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        """Free everything held in the target's cache; return False if nothing was held."""


class Drafter:
    """Drafts for the completions of a step.

    If a proposer raises or proposes invalid tokens, it has to forget its completions. The output does not change.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, manager: PagedKvCacheManager | None) -> None:
        self._proposer, self._vocab_size, self._manager = proposer, vocab_size, manager

    def draft(self, decodes: Sequence[Completion]) -> Drafts | None:
        """Set the completions' chunks to their newest tokens and drafts; return the drafts, or None."""
        limits = [completion.request.max_tokens - len(completion.token_ids) - 1 for completion in decodes]
        warn = partial(_LOG.warning, "no drafts in this step: %s")
        drafts = attempt(warn, _propose, self._proposer, decodes, limits, self._vocab_size)
        if drafts is None:
            drafts = Drafts.empty(len(decodes))
            for completion in decodes:
                self.forget(completion)
        for completion, token_ids in zip(decodes, drafts.token_ids, strict=True):
            completion.follow(token_ids)
        return drafts if any(drafts.token_ids) else None

    def forget(self, completion: Completion) -> None:
        """Drop the state of a completion that has ended or was preempted."""
        quietly(self._proposer.forget, completion)

    def make_room(self) -> bool:
        """Free the drafts' blocks in the target's cache; return False if there are none."""
        if self._manager is None:
            return False
        warn = partial(_LOG.warning, "drafts gave no room: %s")
        return bool(attempt(warn, self._proposer.make_room, self._manager))


def _propose(proposer: Proposer, decodes: Sequence[Completion], limits: Sequence[int], vocab_size: int) -> Drafts:
    drafts = proposer.propose(decodes, limits)
    for token_ids, limit in zip(drafts.token_ids, limits, strict=True):
        are_ids = all(type(token) is int and 0 <= token < vocab_size for token in token_ids)
        if len(token_ids) > max(limit, 0) or not are_ids:
            raise InvalidInputError(f"drafts: {shown(token_ids)}, expected at most {limit} ids below {vocab_size}")
    return drafts


def cut_limits(completions: Sequence[Completion], limits: Sequence[int], *, num_tokens: int, longest: int) -> list[int]:
    """Return the number of drafts of each completion: its limit, cut by `num_tokens` and by the maximum length.

    The last draft is not run, so it may lie one position beyond the maximum length.
    """
    cut = []
    for completion, limit in zip(completions, limits, strict=True):
        cut.append(min(limit, num_tokens, longest + 1 - completion.num_tokens))
    return cut


def draw(
    sampler: Sampler,
    completions: Sequence[Completion],
    limits: Sequence[int],
    active: Sequence[int],
    run: Callable[[Sequence[int], torch.Tensor | None], torch.Tensor],
    *,
    min_probability: float = 0.0,
    confidences: Callable[[], torch.Tensor | None] | None = None,
) -> tuple[Drafts, list[int]]:
    """Draw `limits` drafts (one or more each), token by token, for the completions with indices `active`.

    Returns all drafts, and how many to verify of each completion: those that are accepted, together with all drafts
    before, with a probability of at least `min_probability`.

    run: maps indices of n completions and their last drafts (int64 [n] on the device, None at first) to the logits [n,
    V] of their next drafts. confidences: the estimated probabilities of acceptance, float32 [n], of the drafts that
    `run` has just returned. Without them, the estimate is the largest probability of the logits.

    Raises:
        PagedError: all logits of a row are NaN or -inf.
    """
    drawn, device = active, sampler.device
    width = max(limits[row] for row in drawn)
    drafts = torch.full((len(completions), width), NO_TOKEN, dtype=torch.int64, device=device)
    probs: torch.Tensor | None = None
    estimates: torch.Tensor | None = None
    if min_probability > 0:
        estimates = torch.ones(drafts.shape, device=device)
    index, newest = index_tensor(active, device), None
    for position in range(width):
        logits = run(active, newest)
        tokens, shares = sampler.propose(logits, [completions[row] for row in active], drafts[index, :position])
        drafts[index, position] = tokens
        if shares is not None:
            if probs is None:
                probs = shares.new_zeros(len(completions), width, shares.shape[1])
            probs[index, position] = shares
        if estimates is not None:
            estimates[index, position] = _estimate(logits, confidences)
        following = [row for row in active if position + 1 < limits[row]]
        if following != active:
            active, index = following, index_tensor(following, device)
        newest = drafts[index, position]
    token_ids = Drafts.empty(len(completions)).token_ids
    num_verified = [0] * len(completions)
    columns = drafts
    if estimates is not None:
        is_verified = (estimates.cumprod(1) >= min_probability).cumprod(1)  # [n, width]
        columns = torch.cat([drafts, is_verified.sum(1, keepdim=True)], 1)  # one tensor, because each copy waits
    table = columns.tolist()
    for row in drawn:
        token_ids[row] = table[row][: limits[row]]
        num_verified[row] = limits[row]
        if min(token_ids[row]) < 0:
            raise PagedError(f"the draft model returned no token for {completions[row]!r}")
        if estimates is not None:
            num_verified[row] = min(limits[row], table[row][width])
    return Drafts(token_ids, probs), num_verified


def _estimate(logits: torch.Tensor, confidences: Callable[[], torch.Tensor | None] | None) -> torch.Tensor:
    """Return the estimated probabilities that the drafts drawn from logits [n, V] are accepted, float32 [n].

    An estimate depends on the drafts before, never on the draft itself. Rejection sampling is exact if a verified draft
    has the distribution that it was drawn from; without the drafts of low probability it would have another. In greedy
    requests, the largest probability is that of the draft.
    """
    if confidences is not None:
        estimates = confidences()
        if estimates is not None:
            return estimates
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def aligned_drafts(drafts: Drafts, decodes: Sequence[Completion], completions: Sequence[Completion]) -> Drafts:
    """Return drafts in the order of `completions`, empty for completions without drafts."""
    rows = {completion: row for row, completion in enumerate(decodes)}
    chosen = []
    token_ids = []
    for completion in completions:
        row = rows.get(completion, -1)
        chosen.append(row)
        token_ids.append(drafts.token_ids[row] if row >= 0 else [])
    if drafts.probs is None:
        return Drafts(token_ids)
    padded = torch.cat([drafts.probs, torch.zeros_like(drafts.probs[:1])])
    return Drafts(token_ids, padded[index_tensor(chosen, padded.device)])
