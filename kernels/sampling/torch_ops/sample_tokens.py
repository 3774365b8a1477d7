"""Penalties, filters and draws in PyTorch; on a GPU it waits, because rows with filters are handled apart."""

from __future__ import annotations

import torch

from ..penalties import Penalties
from .greedy_argmax import greedy_argmax
from .noise import exponential

# A token's mass is a multiple of 2^-42: see `kernels.sampling.row_functions`.
_MASS_ONE = 2.0**42
_FLOOR = -31.875 + 2.0**-19
# Noise for the tokens that are left takes a gather and a scatter more than for all: worth it below this share.
_FEW = 0.25


def sample_tokens(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    log_min_p: torch.Tensor | None,
) -> torch.Tensor:
    """PyTorch implementation of `kernels.sampling.sample_tokens`, after penalties."""
    logits, is_drawn = logits.float(), temperature > 0
    if is_drawn.all():
        scores = scaled(logits, temperature)
        if top_k is not None or top_p is not None or log_min_p is not None:
            lowest = lowest_kept(scores, top_k, top_p, log_min_p)
            scores.masked_fill_(scores < lowest[:, None], -torch.inf)
        return _draw(scores, keys)
    tokens = greedy_argmax(logits)
    if is_drawn.any():
        (rows,) = is_drawn.nonzero(as_tuple=True)
        filters: list[torch.Tensor | None] = [top_k, top_p, log_min_p]
        for index, limits in enumerate(filters):
            if limits is not None:
                filters[index] = limits[rows]
        tokens[rows] = sample_tokens(logits[rows], keys[rows], temperature[rows], *filters)
    return tokens


def penalised(logits: torch.Tensor, penalties: Penalties, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of float32 logits with penalties.

    rows: int64, the rows with penalties; None looks for them.
    """
    if rows is None:
        (rows,) = (penalties.rows >= 0).nonzero(as_tuple=True)
    tables = penalties.rows[rows]
    counts, seen, weights = penalties.counts[tables], penalties.seen[tables], penalties.weights[rows]
    return logits.index_copy(0, rows, apply_penalties(logits[rows], counts, seen, weights))


def apply_penalties(
    logits: torch.Tensor, counts: torch.Tensor, seen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return logits [n, V] of rows after repetition, presence and frequency penalties, weights float32 [n, 3].

    counts: occurrences of each token in the row's output. seen: whether it occurs in the output or the prompt.
    """
    repetition, presence, frequency = weights.split(1, dim=-1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    # Products and sums of finite penalties may leave float32: then a token is favoured, or not, as far as it reaches,
    # where infinities of both signs would be NaN.
    largest = torch.finfo(logits.dtype).max
    logits = logits - (frequency * counts).clamp_(-largest, largest) - presence * (counts > 0)
    return logits.clamp_(max=largest)


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return logits less the row's largest, over the temperature; NaN in rows without a choice."""
    # Less the best one's, which changes no probability: so the smallest temperature leaves it finite.
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])


def lowest_kept(
    scores: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, log_min_p: torch.Tensor | None
) -> torch.Tensor:
    """Return the lowest of `scaled` logits that top_k, top_p and min_p keep, float32 [n]; -inf without filters."""
    num_tokens = scores.shape[1]
    if top_k is None:
        limits = torch.full_like(scores[:, 0], num_tokens, dtype=torch.int64)
    else:
        limits = top_k.clamp(max=num_tokens)
    is_cut = limits < num_tokens
    if top_p is not None:
        is_cut = is_cut | (top_p < 1)
    lowest = log_min_p
    if lowest is None:
        lowest = torch.full_like(scores[:, 0], -torch.inf)
    if not is_cut.any():
        return lowest
    (rows,) = is_cut.nonzero(as_tuple=True)
    limits = limits[rows, None]
    if len(rows) < len(scores):  # a copy is saved if all rows are cut
        scores = scores[rows]
    values = scores.topk(int(limits.max())).values
    kept = torch.arange(values.shape[1], device=values.device) < limits
    if top_p is not None:
        masses = (values.exp() * _MASS_ONE).long().masked_fill_(~kept, 0)
        sums = masses.cumsum(-1)
        share = top_p[rows, None].double() * sums[:, -1:].double()
        kept &= ((sums - masses).double() < share) | (top_p[rows, None] >= 1)
    last = values.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)).squeeze(-1).clamp_(min=_FLOOR)
    return lowest.index_copy(0, rows, torch.maximum(lowest[rows], last))


def _draw(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(scores), which are overwritten; -1 if that is undefined."""
    num_tokens = scores.shape[1]
    is_allowed = (scores > -torch.inf).flatten()
    if int(is_allowed.sum()) < _FEW * is_allowed.numel():
        (places,) = is_allowed.nonzero(as_tuple=True)
        rows = places // num_tokens
        flat = scores.view(-1)
        flat[places] -= exponential(keys[rows], places - rows * num_tokens).log_()
    else:
        scores -= exponential(keys[:, None], torch.arange(num_tokens, device=keys.device)).log_()
    best, tokens = scores.max(-1)
    return tokens.masked_fill_(~best.isfinite(), -1)
