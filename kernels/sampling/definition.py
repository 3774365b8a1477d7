"""Choices of tokens as formulas; see `kernels.layers.definition` for what a definition is.

Random numbers are a function of key and token, without state between draws. On a GPU `sample_tokens` waits for the
device, because it handles rows with temperature 0 and rows with filters apart.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from .penalties import Penalties

# Tokens of a group. PyTorch's amax uses vectors and its argmax does not: finding the best group first takes a fifth of
# the time.
_GROUP = 64
# The 32-bit finaliser "lowbias32" (C. Wellons, hash-prospector). Signed products wrap around like unsigned ones.
_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))
TOKEN_FACTOR = 0x9E3779B1 - (1 << 32)
# A token's mass is a multiple of 2^-42, see `kernels.sampling.row_functions`.
_MASS_ONE = 2.0**42
_FLOOR = -31.875 + 2.0**-19
# Below this share of tokens, noise for the kept tokens alone is faster, although it needs a gather and a scatter.
_FEW = 0.25


def greedy_argmax(
    logits: torch.Tensor,
    *,
    token_mask: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the index of the largest logit of each row, ties to the smaller index; -1 if no token can be chosen."""
    values = logits.to(compute)
    if repetition_penalty is not None:
        values = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    if token_mask is not None:
        values = values.masked_fill(~token_mask, -torch.inf)
    tokens, best = _largest(values)
    if best.isnan().any():  # replace NaN only if there is one, because the copy takes as long as the rest
        tokens, best = _largest(values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    return tokens.masked_fill_(best == -torch.inf, -1)


def _largest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first index of each row's largest value, and the value. NaN is larger than all numbers."""
    num_missing = -values.shape[1] % _GROUP
    if num_missing:
        values = functional.pad(values, (0, num_missing), value=-torch.inf)
    groups = values.unflatten(1, (-1, _GROUP))
    group = groups.amax(-1).argmax(-1)  # the first of equal groups
    best, within = groups[torch.arange(len(groups), device=groups.device), group].max(-1)
    return group * _GROUP + within, best


def sample_tokens(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
    compute: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the token of each row with the largest sum of score and noise, -1 if there is none.

    Scores are (logits - max) / temperature, rounded to float32, because this rounding decides ties. Noise is -log(E)
    with E from `exponential`, so tokens are drawn from softmax(scores) (the Gumbel-max trick). Rows with temperature 0
    take the largest logit.
    """
    logits = logits.to(compute)
    if penalties is not None:
        logits = penalised(logits, penalties)
    is_drawn = temperature > 0
    if is_drawn.all():
        scores = scaled(logits, temperature)
        if top_k is not None or top_p is not None or min_p is not None:
            lowest = lowest_kept(scores, top_k, top_p, min_p, compute)
            scores.masked_fill_(scores < lowest[:, None], -torch.inf)
        return _draw(scores.to(compute), keys)
    tokens = greedy_argmax(logits, compute=compute)
    if is_drawn.any():
        (rows,) = is_drawn.nonzero(as_tuple=True)
        tokens[rows] = sample_tokens(
            logits[rows],
            keys[rows],
            temperature[rows],
            top_k=None if top_k is None else top_k[rows],
            top_p=None if top_p is None else top_p[rows],
            min_p=None if min_p is None else min_p[rows],
            compute=compute,
        )
    return tokens


def penalised(logits: torch.Tensor, penalties: Penalties, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of logits with penalties, in their dtype.

    rows: int64, the rows with penalties; None finds them.
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

    counts: occurrences of each token in the row's output.
    seen: whether a token occurs in the output or the prompt.
    """
    repetition, presence, frequency = weights.to(logits.dtype).split(1, dim=-1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    # Clamp to float32: infinities of both signs would add up to NaN.
    largest = torch.finfo(torch.float32).max
    logits = logits - (frequency * counts).clamp_(-largest, largest) - presence * (counts > 0)
    return logits.clamp_(max=largest)


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - the row's largest) / temperature in float32; NaN in rows without a choice."""
    # Subtract the largest logit first, so that the smallest temperature leaves its score finite.
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None]).float()


def lowest_kept(
    scores: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    compute: torch.dtype,
) -> torch.Tensor:
    """Return the lowest of `scaled` logits that top_k, top_p and min_p keep, float32 [n]; -inf without filters.

    A token stays if it ties with the last token of the top_k, or if less than top_p of the mass of the top_k precedes
    it. A token's mass is 2^42 exp(score), rounded down. With top_k or top_p, tokens 31.875 or more below the best are
    dropped.
    """
    num_tokens = scores.shape[1]
    if top_k is None:
        limits = torch.full_like(scores[:, 0], num_tokens, dtype=torch.int64)
    else:
        limits = top_k.clamp(max=num_tokens)
    is_cut = limits < num_tokens
    if top_p is not None:
        is_cut = is_cut | (top_p < 1)
    if min_p is None:
        lowest = torch.full_like(scores[:, 0], -torch.inf)
    else:
        lowest = min_p.log()
    if not is_cut.any():
        return lowest
    (rows,) = is_cut.nonzero(as_tuple=True)
    limits = limits[rows, None]
    if len(rows) < len(scores):  # save a copy if all rows are cut
        scores = scores[rows]
    values = scores.topk(int(limits.max())).values
    kept = torch.arange(values.shape[1], device=values.device) < limits
    if top_p is not None:
        masses = (values.to(compute).exp() * _MASS_ONE).long().masked_fill_(~kept, 0)
        sums = masses.cumsum(-1)
        share = top_p[rows, None].double() * sums[:, -1:].double()
        kept &= ((sums - masses).double() < share) | (top_p[rows, None] >= 1)
    last = values.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)).squeeze(-1).clamp_(min=_FLOOR)
    return lowest.index_copy(0, rows, torch.maximum(lowest[rows], last))


def _draw(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token a row from softmax(scores); -1 if it is undefined. Overwrites scores."""
    num_tokens = scores.shape[1]
    is_allowed = (scores > -torch.inf).flatten()
    if int(is_allowed.sum()) < _FEW * is_allowed.numel():
        (places,) = is_allowed.nonzero(as_tuple=True)
        rows = places // num_tokens
        flat = scores.view(-1)
        flat[places] -= exponential(keys[rows], places - rows * num_tokens, scores.dtype).log_()
    else:
        scores -= exponential(keys[:, None], torch.arange(num_tokens, device=keys.device), scores.dtype).log_()
    best, tokens = scores.max(-1)
    return tokens.masked_fill_(~best.isfinite(), -1)


def exponential(keys: torch.Tensor, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return exponentially distributed numbers of mean 1: -log(1 - u), where u is a hash of key and token.

    tokens: int64.
    keys: int64 [..., 2], two 32-bit halves each. The shapes of tokens and keys broadcast.
    """
    low, high = keys.to(torch.int32).unbind(-1)
    bits = _mix32_(tokens.to(torch.int32) * TOKEN_FACTOR + low)
    bits = _mix32_(bits.bitwise_xor_(high))
    # The token with the smallest number wins, and log1p keeps small numbers precise. The largest number stays finite,
    # because a token that is the only allowed one must win with any number.
    uniform = bits.view(torch.uint32).to(dtype).add_(0.5).mul_(-(2.0**-32))
    return uniform.clamp_(min=2.0**-24 - 1).log1p_().neg_()


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """Mix the bits of int32 numbers in place."""
    first, second = _FACTORS
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(first)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(second)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
