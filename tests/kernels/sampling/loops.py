"""Choices of tokens in float64, token by token: the rules that the definition's sorts and sums hide."""

from __future__ import annotations

import math

import torch

from paged.kernels.sampling.penalties import Penalties
from tests.float64 import f64


def greedy_argmax(
    logits: torch.Tensor, *, token_mask: torch.Tensor | None = None, repetition_penalty: torch.Tensor | None = None
) -> torch.Tensor:
    """Index of the largest logit a row, ties to the smaller index; -1 where no token is left to choose.

    token_mask ([V] or [N, V], bool): False forbids a token. repetition_penalty ([V] or [N, V], above 0): factor a
    token, 1 for none; positive logits are divided by it, others multiplied (Keskar et al., 2019). NaN and -inf are
    never chosen.
    """
    logits = f64(logits)
    rows, vocab_size = logits.shape
    chosen = torch.full((rows,), -1, dtype=torch.int64)
    for row in range(rows):
        best = -math.inf
        for token in range(vocab_size):
            value = float(logits[row, token])
            if token_mask is not None and not bool(token_mask.expand(rows, vocab_size)[row, token]):
                continue
            if repetition_penalty is not None:
                factor = float(repetition_penalty.expand(rows, vocab_size)[row, token])
                value = _repeated(value, factor)
            if value > best:
                best, chosen[row] = value, token
    return chosen


def gumbel(key: tuple[int, int], token: int) -> float:
    """Noise of a token by the two halves of a key: -log(-log(1 - u)), where u is a hash of both (lowbias32, twice)."""
    bits = _lowbias32((token * 0x9E3779B1 + key[0]) & 0xFFFFFFFF)
    u = min((_lowbias32(bits ^ key[1]) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def _lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _repeated(value: float, penalty: float) -> float:
    """Return a logit after a repetition penalty."""
    if value > 0:
        return value / penalty
    return value * penalty


def penalised(values: list[float], counts: list[int], seen: list[bool], weights: list[float]) -> list[float]:
    """Return the logits of a row after repetition, presence and frequency penalties, within float32's range."""
    repetition, presence, frequency = weights
    largest, result = torch.finfo(torch.float32).max, []
    for value, count, was_seen in zip(values, counts, seen, strict=True):
        if was_seen:
            value = _repeated(value, repetition)
        value -= max(-largest, min(largest, frequency * count)) + presence * (count > 0)
        if value > largest:  # not so with NaN
            value = largest
        result.append(value)
    return result


def kept_scores(
    values: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> list[float] | None:
    """Return (logits - max) / temperature of a row, -inf for filtered tokens; None if no token can be drawn.

    Scores are rounded to float32, because that decides ties. A token stays if it ties with the last one of the top_k,
    or if less than top_p of its mass precedes it; a token's mass is 2^42 exp(score), rounded down. With top_k or top_p,
    tokens 31.875 or more below the best are dropped.
    """
    largest = max(values)
    if math.isinf(largest) or any(math.isnan(value) for value in values):
        return None
    scores = torch.tensor([(value - largest) / temperature for value in values], dtype=torch.float64).float().tolist()
    kept = set(range(len(scores)))
    order = sorted(scores, reverse=True)
    limit = min(top_k or len(scores), len(scores))
    is_cut = limit < len(scores) or (top_p is not None and top_p < 1)
    if is_cut:
        kept = {token for token in kept if scores[token] >= order[limit - 1] and scores[token] > -31.875}
    if top_p is not None and top_p < 1:
        masses = [int(2.0**42 * math.exp(score)) for score in order[:limit]]
        before: dict[float, int] = {}
        for place, score in enumerate(order[:limit]):
            before.setdefault(score, sum(masses[:place]))
        kept = {token for token in kept if before[scores[token]] < float(top_p) * float(sum(masses))}
    if min_p:
        kept = {token for token in kept if scores[token] >= math.log(min_p) - 1e-7}
    return [score if token in kept else -math.inf for token, score in enumerate(scores)]


def sample_tokens(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    penalties: Penalties | None = None,
) -> torch.Tensor:
    """The token of every row with the largest sum of score and noise, -1 where there is none; int64 [num_rows]."""
    chosen = []
    filters = []
    for limits in (top_k, top_p, min_p):
        if limits is None:
            filters.append([None] * len(logits))
        else:
            filters.append(limits.tolist())
    for row, values in enumerate(f64(logits).tolist()):
        if penalties is not None and (table := int(penalties.rows[row])) >= 0:
            tables = (penalties.counts[table].tolist(), penalties.seen[table].tolist())
            values = penalised(values, *tables, penalties.weights[row].tolist())
        scores: list[float] | None = [-math.inf if math.isnan(value) else value for value in values]
        if temperature[row] > 0:
            low, high = keys[row].tolist()
            scores = kept_scores(values, float(temperature[row]), *(limits[row] for limits in filters))
            scores = scores and [score + gumbel((low, high), token) for token, score in enumerate(scores)]
        token = -1
        if scores and max(scores) > -math.inf:
            token = scores.index(max(scores))
        chosen.append(token)
    return torch.tensor(chosen, dtype=torch.int64)
