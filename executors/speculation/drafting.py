"""The interface of sources of drafts, and the drafts of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import InvalidInputError
from paged.executors.isolation import attempt, quietly
from paged.executors.requests.request import Completion
from paged.executors.sampling.rows import index_tensor
from paged.executors.sampling.sampler import Drafts
from paged.kernels.common.scalars import shown

_LOG = logging.getLogger("paged")


class Proposer(Protocol):
    """A source of drafts for completions that decode.

    Attributes:
        num_tokens: most drafts for a completion.
        vocab_size: vocabulary of the drafts; None if they are tokens of the text.
    """

    num_tokens: int
    vocab_size: int | None

    def propose(self, completions: Sequence[Completion], limits: Sequence[int]) -> Drafts:
        """Draft at most `limits` tokens for each completion; drafting none is always allowed."""

    def forget(self, completion: Completion) -> None:
        """Drop the state of a completion that has finished or was preempted."""

    def make_room(self, manager: PagedKvCacheManager) -> bool:
        """Free everything held in the target's cache; return False if nothing was held."""


def draft(proposer: Proposer | None, decodes: Sequence[Completion], vocab_size: int) -> Drafts | None:
    """Draft for decoding completions, and set the drafts as their items' next tokens; return None if there are none.

    If a proposer raises or proposes invalid tokens, it forgets these completions; the output does not change.
    """
    if proposer is None or not decodes:
        return None
    limits = [one.request.max_tokens - len(one.token_ids) - 1 for one in decodes]
    warn = partial(_LOG.warning, "no drafts in this step: %s")
    drafts = attempt(warn, _propose, proposer, decodes, limits, vocab_size)
    if drafts is None:
        drafts = Drafts([[] for _ in decodes])
        for completion in decodes:
            quietly(proposer.forget, completion)
    for completion, token_ids in zip(decodes, drafts.token_ids, strict=True):
        completion.follow(token_ids)
    return drafts if any(drafts.token_ids) else None


def _propose(proposer: Proposer, decodes: Sequence[Completion], limits: Sequence[int], vocab_size: int) -> Drafts:
    drafts = proposer.propose(decodes, limits)
    for token_ids, limit in zip(drafts.token_ids, limits, strict=True):
        if len(token_ids) > max(limit, 0) or not all(type(one) is int and 0 <= one < vocab_size for one in token_ids):
            raise InvalidInputError(f"drafts: {shown(token_ids)}, expected at most {limit} ids below {vocab_size}")
    return drafts


def aligned_drafts(drafts: Drafts, decodes: Sequence[Completion], completions: Sequence[Completion]) -> Drafts:
    """Return the drafts of `completions`, in their order; completions without drafts get none."""
    rows = {completion: row for row, completion in enumerate(decodes)}
    chosen = [rows.get(completion, -1) for completion in completions]
    token_ids = [drafts.token_ids[row] if row >= 0 else [] for row in chosen]
    if drafts.probs is None:
        return Drafts(token_ids)
    padded = torch.cat([drafts.probs, torch.zeros_like(drafts.probs[:1])])
    return Drafts(token_ids, padded[index_tensor(chosen, padded.device)])
