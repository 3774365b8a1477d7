"""Drafts of a step, and the ones among them that belong to the completions that ran."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged.executors.proposer import Proposer
from paged.executors.request import Completion
from paged.executors.sampler import Drafts
from paged.executors.sampling_rows import index_tensor


def draft(proposer: Proposer | None, decodes: Sequence[Completion]) -> Drafts | None:
    """Drafts for what decodes, set as their items' next tokens; None where there are none."""
    if proposer is None or not decodes:
        return None
    limits = [one.request.max_tokens - len(one.output.token_ids) - 1 for one in decodes]
    drafts = proposer.propose(decodes, limits)
    for completion, token_ids in zip(decodes, drafts.token_ids, strict=True):
        completion.follow(token_ids)
    return drafts if any(drafts.token_ids) else None


def aligned_drafts(drafts: Drafts, decodes: Sequence[Completion], completions: Sequence[Completion]) -> Drafts:
    """Those of `completions`, in their order; completions that were not drafted for have none."""
    places = {completion: place for place, completion in enumerate(decodes)}
    chosen = [places.get(completion, -1) for completion in completions]
    token_ids = [drafts.token_ids[place] if place >= 0 else [] for place in chosen]
    if drafts.probs is None:
        return Drafts(token_ids)
    padded = torch.cat([drafts.probs, torch.zeros_like(drafts.probs[:1])])
    return Drafts(token_ids, padded[index_tensor(chosen, padded.device)])
