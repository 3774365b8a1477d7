"""Rejection sampling of drafts, for all sequences at once on the device, without a sync."""

from __future__ import annotations

import torch

from paged.kernels.sampling.sample_tokens import sample_tokens


def rejection_sample(
    logits: torch.Tensor,
    first_rows: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or replace drafts so that tokens have the distribution of the target alone.

    A draft d is accepted with probability min(1, p(d) / q(d)). The first rejected draft is replaced by a token drawn
    from max(p - q, 0). If all drafts are accepted, one more token is drawn from p (Leviathan et al., 2023; Chen et al.,
    2023).

    Args:
        logits: logits of the target, [num_rows, V], -inf for excluded tokens; each sequence has a row for each draft
            and one more.
        first_rows: int64 [n], first row of each sequence.
        drafts: int64 [n, k]. num_drafts: int64 [n], number of drafts of each sequence.
        draft_probs: q, float32 [n, k, V]; None if drafts are certain (q(d) = 1).
        uniforms: float64 [n, k], random numbers. keys: int64 [n, k + 1, 2], noise keys of each position.

    Returns:
        tokens int64 [n, k + 1], valid for the accepted drafts and one more token; number of accepted drafts [n].
    """
    num_seqs, width = drafts.shape
    probs = logits.softmax(-1)
    columns = torch.arange(width, device=logits.device)
    is_draft = columns < num_drafts[:, None]
    rows = first_rows[:, None] + torch.minimum(columns, num_drafts[:, None])
    p = probs[rows, drafts]
    if draft_probs is None:
        q = torch.ones_like(p)
    else:
        q = draft_probs.gather(-1, drafts[..., None]).squeeze(-1)
    accepted = (uniforms * q < p) & is_draft
    num_accepted = accepted.cumprod(1).sum(1)

    index = torch.arange(num_seqs, device=logits.device)
    last = probs[first_rows + num_accepted]
    if width:
        rejected = torch.minimum(num_accepted, num_drafts - 1).clamp_(min=0)
        if draft_probs is None:
            proposed = torch.zeros_like(last).scatter_(1, drafts[index, rejected][:, None], 1.0)
        else:
            proposed = draft_probs[index, rejected]
        residual = (last - proposed).clamp_(min=0)
        # The residual can be 0 only if p and q are equal up to rounding.
        takes_residual = (num_accepted < num_drafts)[:, None] & (residual.sum(-1, keepdim=True) > 0)
        last = torch.where(takes_residual, residual, last)
    final = sample_tokens(last.log(), keys[index, num_accepted], torch.ones_like(last[:, 0]))
    tokens = torch.cat([drafts, drafts.new_zeros(num_seqs, 1)], dim=1)
    tokens[index, num_accepted] = final
    return tokens, num_accepted
