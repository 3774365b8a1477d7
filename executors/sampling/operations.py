"""From logits to tokens, all rows of a batch at once on the logits' device: no step here waits for the device.

Logits are float32 [n, V] everywhere; functions ending in `_` change them in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged.executors.sampling.noise import exponential


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


@dataclass(frozen=True)
class Filters:
    """Filters of rows that are drawn at random: float32 [n, 1], `top_k` int64 [n, 1]; None where no row asks for it.

    limit: the largest top_k, or V where a row with a top_p has none. is_whole: bool [n, 1], rows with neither.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    is_whole: torch.Tensor | None = None
    limit: int = 0


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


def apply_penalties(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Logits of rows whose outputs hold each token `output_counts` times, [n, V]; penalties are float32 [n, 1]."""
    in_output = output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_output | in_prompt, repeated, logits)
    # Products and sums of finite penalties may leave float32: then a token is favoured, or not, as far as it reaches,
    # where infinities of both signs would be NaN.
    most = torch.finfo(logits.dtype).max
    logits = logits - (frequency * output_counts).clamp_(-most, most) - presence * in_output
    return logits.clamp_(max=most)


def filter_(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Temperature, then top_k, top_p and min_p: what they leave out becomes -inf. Ties with the last one kept stay, so
    that the result does not depend on the order in which a sort leaves equal values.
    """
    # Less the best one's, which changes no probability: so the smallest temperature leaves it finite.
    logits -= logits.amax(-1, keepdim=True)
    logits /= filters.temperature
    threshold = None
    if filters.top_k is not None or filters.top_p is not None:
        values = logits.topk(filters.limit).values
        kept = torch.ones_like(values, dtype=torch.bool)
        if filters.top_k is not None:
            kept = torch.arange(filters.limit, device=logits.device) < filters.top_k
        if filters.top_p is not None:
            # In float64, as the rounding of a float32 sum depends on `limit`, which other rows may set.
            shares = values.double().masked_fill(~kept, -torch.inf).softmax(-1)
            kept = kept & (shares.cumsum(-1) - shares < filters.top_p)
        # A row without a valid token keeps none of them; `draw` says so.
        threshold = values.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
        if filters.is_whole is not None:
            threshold = threshold.masked_fill(filters.is_whole, -torch.inf)
    if filters.min_p is not None:
        lowest = filters.min_p.log()
        threshold = lowest if threshold is None else torch.maximum(threshold, lowest)
    return logits if threshold is None else logits.masked_fill_(logits < threshold, -torch.inf)


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(logits), int64 [n], by keys int64 [n, 2]; -1 where that is undefined."""
    best, tokens = (logits - exponential(keys, logits.shape[-1]).log_()).max(-1)
    return tokens.masked_fill_(~best.isfinite(), -1)


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
    final = draw(last.log(), keys[index, num_accepted])
    tokens = torch.cat([drafts, drafts.new_zeros(num, 1)], dim=1)
    tokens[index, num_accepted] = final
    return tokens, num_accepted
