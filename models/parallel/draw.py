"""Draw tokens on several ranks: each rank sends a few numbers per row instead of its part of the logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from paged.kernels.sampling.definition import TOKEN_FACTOR, exponential
from paged.kernels.sampling.sample_tokens import (
    FILTERS,
    filter_columns,
    filter_logits,
    lowest_by_best,
    sample_tokens,
)
from paged.models.parallel.ranks import Ranks

_NO_TOKEN = torch.iinfo(torch.int64).max
# A rank's number of candidates is rounded up to a multiple of 16, so that fewer kernels are compiled.
CANDIDATES = 16
# Limit of candidates over all ranks, because one kernel program handles a row's candidates.
_MOST_CANDIDATES = 4096


def candidates_of(count: int, num_ranks: int, logits_bytes: int) -> int | None:
    """Return the number of candidates that each rank sends if `count` best tokens decide a row's filters.

    Return None if a rank's logits of the row take fewer bytes.
    """
    padded = -(-count // CANDIDATES) * CANDIDATES
    sent = (num_ranks - 1) * padded * torch.float32.itemsize
    if num_ranks * padded > _MOST_CANDIDATES or sent >= logits_bytes:
        return None
    return padded


def draw_tokens(
    ranks: Ranks,
    logits: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    filters: torch.Tensor,
    *,
    num_candidates: int = 0,
) -> torch.Tensor:
    """Draw the token that `sample_tokens` would draw from the logits of all ranks, int64 [n]; valid on rank 0 only.

    Noise is a function of key and token. So each rank finds its best token, and the best of these tokens wins.

    Args:
        logits: float32 [n, m], logits of the tokens from `first` on.
        keys, temperature: as in `sample_tokens`.
        filters: numbers of FILTERS, float64 [num_filters, n].
        num_candidates: at least the number of best tokens that decide the filters; 0 if the filters keep all.
    """
    if num_candidates:
        logits = _filtered(ranks, logits, num_candidates, temperature, filter_columns(filters))
    # Token t of this rank is token first + t of the vocabulary and needs that token's noise. Shift the keys for this,
    # because noise adds a multiple of the token id to the key, modulo 2^32.
    low, high = keys.unbind(-1)
    own_keys = torch.stack(((low + first * TOKEN_FACTOR) & 0xFFFFFFFF, high), -1)
    tokens = sample_tokens(logits, own_keys, temperature)
    columns = tokens.clamp(min=0)
    is_drawn = temperature > 0
    noise = exponential(own_keys, columns).log().neg().masked_fill(~is_drawn, 0.0)
    best = logits.gather(1, columns[:, None]).squeeze(1)
    ids = torch.where(tokens < 0, tokens, tokens + first)
    numbers = torch.stack([part.double() for part in (best, noise, logits.amax(-1), ids)], -1)  # float64 holds ids
    best, noise, largest, ids = ranks.gather(numbers).view(len(logits), -1, 4).unbind(-1)
    best, noise, largest, ids = best.float(), noise.float(), largest.amax(1, keepdim=True).float(), ids.long()
    scores = (best - largest) / temperature.masked_fill(~is_drawn, 1.0)[:, None] + noise
    scores = torch.where(is_drawn[:, None], scores, best).masked_fill(ids < 0, -torch.inf)
    is_best = (scores == scores.amax(1, keepdim=True)) & (ids >= 0)
    chosen = torch.where(is_best, ids, _NO_TOKEN).amin(1)
    return torch.where(chosen == _NO_TOKEN, -1, chosen)


def _filtered(
    ranks: Ranks,
    logits: torch.Tensor,
    num_candidates: int,
    temperature: torch.Tensor,
    filters: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return the logits with -inf for filtered tokens.

    With a filter that counts tokens, tokens below the lowest kept one of all ranks' candidates are filtered. Without
    it, tokens are filtered by the best token.
    """
    best_here = logits.topk(min(num_candidates, logits.shape[1])).values
    padding = num_candidates - best_here.shape[1]
    best = ranks.gather_everywhere(functional.pad(best_here, (0, padding), value=-torch.inf))
    kept = filter_logits(best, temperature, **filters)
    lowest = kept.masked_fill(kept == -torch.inf, torch.inf).amin(1, keepdim=True)
    is_counted = torch.zeros_like(temperature, dtype=torch.bool)
    for name, kind in FILTERS.items():
        if kind.num_best is None:
            is_counted |= filters[name] <= num_candidates
    lowest = torch.where(is_counted[:, None], lowest, lowest_by_best(filters)[:, None])
    is_greedy = temperature[:, None] == 0
    scores = (logits - best.amax(1, keepdim=True)).div_(temperature[:, None].masked_fill(is_greedy, 1.0))
    return logits.masked_fill((scores < lowest) & ~is_greedy, -torch.inf)
