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
    """Accept drafts so that tokens are distributed as if the target alone had drawn them.

    A draft d stays with probability min(1, p(d) / q(d)). The first rejected one is replaced by a token of max(p - q,
    0); if all stay, one more is drawn from p (Leviathan et al., 2023; Chen et al., 2023).

    Args:
        logits: of the target, [num_rows, V], -inf where excluded; each sequence has a row for each draft and one more.
        first_rows: int64 [n], the first row of each sequence.
        drafts: int64 [n, k]; num_drafts: int64 [n], the number of drafts in each row.
        draft_probs: q, float32 [n, k, V]; None if drafts are certain (q(d) = 1).
        uniforms: float64 [n, k]. keys: int64 [n, k + 1, 2], of the noise at each position.

    Returns:
        tokens int64 [n, k + 1], valid up to the one after the accepted drafts, and the number of accepted drafts, [n].
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
        # The residual is 0 only where p and q are equal up to rounding.
        takes_residual = (num_accepted < num_drafts)[:, None] & (residual.sum(-1, keepdim=True) > 0)
        last = torch.where(takes_residual, residual, last)
    final = sample_tokens(last.log(), keys[index, num_accepted], torch.ones_like(last[:, 0]))
    tokens = torch.cat([drafts, drafts.new_zeros(num_seqs, 1)], dim=1)
    tokens[index, num_accepted] = final
    return tokens, num_accepted
