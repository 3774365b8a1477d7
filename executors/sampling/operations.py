"""From logits to tokens, all rows of a batch at once on the logits' device: no step here waits for the device.

Logits are float32 [n, V] everywhere; functions ending in `_` change them in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.kernels.sampling.sample_tokens import sample_tokens


@dataclass(frozen=True)
class TokenRules:
    """Which tokens may come, and by how much they are favoured; (row, token) pairs on the device, int64 [m] each.

    allowed: in `allowed_rows`, those that occur here, each once, only these tokens stay.
    bias: float32 [m], added to the logits of `biased`. banned: these never come.
    """

    allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    allowed_rows: torch.Tensor | None = None
    biased: tuple[torch.Tensor, torch.Tensor] | None = None
    bias: torch.Tensor | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None


def apply_rules_(logits: torch.Tensor, rules: TokenRules) -> torch.Tensor:
    """Apply masks and biases; what is masked becomes -inf."""
    if rules.allowed is not None and rules.allowed_rows is not None:
        kept = logits[rules.allowed]
        # Not by the pairs: a row that allows 150,000 tokens would be filled as many times, which takes 16 s.
        logits.index_fill_(0, rules.allowed_rows, -torch.inf)
        logits[rules.allowed] = kept
    if rules.biased is not None and rules.bias is not None:
        logits.index_put_(rules.biased, rules.bias, accumulate=True)
    if rules.banned is not None:
        logits[rules.banned] = -torch.inf
    return logits


def rejection_sample(
    logits: torch.Tensor,
    first_rows: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafts so that tokens are distributed as if the target alone had drawn them (Leviathan et al., 2023; Chen
    et al., 2023): a draft d stays with probability min(1, p(d) / q(d)); the first that does not is replaced by a token
    of max(p - q, 0); where all stay, one more is drawn from p.

    Args:
        logits: of the target, [num_rows, V], -inf where excluded: of each sequence a row for each draft and one more.
        first_rows: int64 [n]. drafts: int64 [n, k]; num_drafts: int64 [n], how many of a row count.
        draft_probs: q, float32 [n, k, V]; None where drafts are certain (q(d) = 1).
        uniforms: float64 [n, k]. keys: int64 [n, k + 1, 2], of the noise at each position.

    Returns:
        tokens int64 [n, k + 1], of which the accepted drafts and the one after them count; how many were accepted, [n].
    """
    num, width = drafts.shape
    probs = logits.softmax(-1)
    columns = torch.arange(width, device=logits.device)
    is_draft = columns < num_drafts[:, None]
    rows = first_rows[:, None] + torch.minimum(columns, num_drafts[:, None])
    p = probs[rows, drafts]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(-1, drafts[..., None]).squeeze(-1)
    accepted = (uniforms * q < p) & is_draft
    num_accepted = accepted.cumprod(1).sum(1)

    index = torch.arange(num, device=logits.device)
    last = probs[first_rows + num_accepted]
    if width:
        rejected = torch.minimum(num_accepted, num_drafts - 1).clamp_(min=0)
        if draft_probs is None:
            proposed = torch.zeros_like(last).scatter_(1, drafts[index, rejected][:, None], 1.0)
        else:
            proposed = draft_probs[index, rejected]
        left = (last - proposed).clamp_(min=0)
        # Nothing is left only where p and q are equal but for rounding.
        is_residual = (num_accepted < num_drafts)[:, None] & (left.sum(-1, keepdim=True) > 0)
        last = torch.where(is_residual, left, last)
    final = sample_tokens(last.log(), keys[index, num_accepted], torch.ones_like(last[:, 0]))
    tokens = torch.cat([drafts, drafts.new_zeros(num, 1)], dim=1)
    tokens[index, num_accepted] = final
    return tokens, num_accepted
