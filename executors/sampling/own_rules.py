"""Application of token masks and logits processors to rows of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from paged.executors.requests.request import Completion, State
from paged.executors.requests.token_rules import TokenMask
from paged.kernels.core.checks import check_tensor
from paged.step.staging import to_device

_WORD_BITS = 32


class Span(NamedTuple):
    """Rows of a completion: one more than its drafts."""

    completion: Completion
    first_row: int
    drafts: Sequence[int]


def own_rules(logits: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Apply the rules of these completions; return the logits, or a changed copy.

    Processors run before masks. Masks are filled on the host while the device computes the logits.
    """
    # Skip finished completions, whose tokens are dropped.
    spans = [span for span in spans if span.completion.state is not State.FINISHED]
    if not spans:
        return logits
    logits = logits.clone()
    for completion, first, drafts in spans:
        if completion.logits_processor is not None:
            for row, count in enumerate(range(len(drafts) + 1), first):
                text = [*completion.token_ids, *drafts[:count]]
                changed = completion.logits_processor(text, logits[row].clone())
                check_tensor("logits_processor", changed, logits[row].shape, (logits.dtype,), logits.device)
                logits[row] = changed
    masks: list[tuple[TokenMask, Sequence[int]]] = []
    rows: list[int] = []
    for completion, first, drafts in spans:
        if completion.token_mask is not None:
            masks.append((completion.token_mask, drafts))
            rows += range(first, first + len(drafts) + 1)
    if rows:
        words = torch.full((len(rows), -(-logits.shape[1] // _WORD_BITS)), -1, dtype=torch.int32)
        start = 0
        for mask, drafts in masks:
            _fill(mask, words, start, drafts)
            start += len(drafts) + 1
        # Unpack bytes rather than words, which would take four times the memory.
        index, octets, bits = to_device(
            (np.array(rows), words.numpy().astype("<i4", copy=False).view(np.uint8), np.arange(8, dtype=np.uint8)),
            logits.device,
        )
        is_banned = ((octets[:, :, None] >> bits) & 1).view(len(rows), -1)[:, : logits.shape[1]] == 0
        logits[index] = logits[index].masked_fill_(is_banned, -torch.inf)
    return logits


def _fill(mask: TokenMask, words: torch.Tensor, start: int, drafts: Sequence[int]) -> None:
    """Fill a row for each position. After a draft that the mask forbids, rows allow all tokens; they are not used."""
    mask.fill_next_token_bitmask(words, start)
    accepted = 0
    try:
        for row, draft in enumerate(drafts, start + 1):
            if not mask.accept_token(draft):
                break
            accepted += 1
            if mask.is_terminated():
                break
            mask.fill_next_token_bitmask(words, row)
    finally:
        if accepted:
            mask.rollback(accepted)
