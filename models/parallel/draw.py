"""Tokens drawn where the logits are: a few numbers a row from every rank, in place of its part of the vocabulary."""

from __future__ import annotations

import torch

from paged.kernels.sampling.sample_tokens import sample_tokens
from paged.kernels.sampling.torch_ops.noise import TOKEN_FACTOR, exponential
from paged.models.parallel.ranks import Ranks

_NO_TOKEN = torch.iinfo(torch.int64).max


def draw_tokens(
    ranks: Ranks, logits: torch.Tensor, first: int, temperature: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """What `sample_tokens` draws from the logits of all ranks, int64 [n], on rank 0; on others something.

    Noise is a function of key and token, so every rank finds the best of its tokens, and the best of those wins.

    Args:
        logits: float32 [n, m], of the tokens from `first` on.
        temperature: float32 [n], 0 for the best token.
        keys: int64 [n, 2], as of `sample_tokens`.
    """
    # The noise of token t of a rank is that of first + t: tokens come into it as multiples of a number, modulo 2^32.
    low, high = keys.unbind(-1)
    own_keys = torch.stack(((low + first * TOKEN_FACTOR) & 0xFFFFFFFF, high), -1)
    tokens = sample_tokens(logits, own_keys, temperature)
    own = tokens.clamp(min=0)
    is_drawn = temperature > 0
    noise = exponential(own_keys, own).log().neg().masked_fill(~is_drawn, 0.0)
    best = logits.gather(1, own[:, None]).squeeze(1)
    ids = torch.where(tokens < 0, tokens, tokens + first)
    numbers = torch.stack([part.double() for part in (best, noise, logits.amax(-1), ids)], -1)  # which holds ids
    best, noise, largest, ids = ranks.gather(numbers).view(len(logits), -1, 4).unbind(-1)
    best, noise, largest, ids = best.float(), noise.float(), largest.amax(1, keepdim=True).float(), ids.long()
    scores = (best - largest) / temperature.masked_fill(~is_drawn, 1.0)[:, None] + noise
    scores = torch.where(is_drawn[:, None], scores, best).masked_fill(ids < 0, -torch.inf)
    is_best = (scores == scores.amax(1, keepdim=True)) & (ids >= 0)
    chosen = torch.where(is_best, ids, _NO_TOKEN).amin(1)
    return torch.where(chosen == _NO_TOKEN, -1, chosen)
