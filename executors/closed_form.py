"""Expected answer of `PagedAttentionExecutor`, from its formula, without attention code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paged.executors.paged_attention_executor import DECAY, PagedExecutorConfig


def expected_logits(config: PagedExecutorConfig, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits of the last of `tokens`, float64 [vocab_size]."""
    if config.embedding == "one_hot":
        outputs = [_one_hot_attention(config, tokens)]
    else:
        outputs = [_sinusoidal_attention(config, tokens)]
    if config.recurrent:
        outputs.append(_recurrent_output(config, tokens))
    logits = torch.zeros(config.vocab_size, dtype=torch.float64)
    for output in outputs:
        for j, value in enumerate(output):
            logits[j % config.vocab_size] += value
    return logits


def _one_hot_attention(config: PagedExecutorConfig, tokens: Sequence[int]) -> list[float]:
    """Return each head's normalised histogram of tokens. Tokens equal to the query weigh exp(1 / sqrt(head_dim))."""
    width = config.num_kv_heads * config.head_dim
    indices = [token % width for token in tokens]
    group = config.num_heads // config.num_kv_heads
    attention: list[float] = []
    for head in range(config.num_heads):
        first = head // group * config.head_dim
        of_head = range(first, first + config.head_dim)
        equal_weight = 1.0
        if indices[-1] in of_head:
            equal_weight = math.exp(1 / math.sqrt(config.head_dim))
        hits = dict.fromkeys(of_head, 0.0)
        total = 0.0
        for index in indices:
            weight = equal_weight if index == indices[-1] else 1.0
            total += weight
            if index in of_head:
                hits[index] += weight
        attention += [hit / total for hit in hits.values()]
    return attention


def _sinusoidal_attention(config: PagedExecutorConfig, tokens: Sequence[int]) -> list[float]:
    width = config.num_kv_heads * config.head_dim
    heads = _sinusoids(tokens, width).view(len(tokens), config.num_kv_heads, config.head_dim)
    attention: list[float] = []
    for head in range(config.num_heads):
        keys = heads[:, head // (config.num_heads // config.num_kv_heads)]
        weights = torch.softmax(keys @ keys[-1] / math.sqrt(config.head_dim), 0)
        attention += (weights @ keys).tolist()
    return attention


def _sinusoids(tokens: Sequence[int], width: int) -> torch.Tensor:
    """Return the embeddings [num_tokens, width]: the sine in float32, converted to float64."""
    angles = (torch.tensor(tokens)[:, None] + 1) * torch.arange(1, width + 1)
    return torch.sin(angles.float()).double()


def _recurrent_output(config: PagedExecutorConfig, tokens: Sequence[int]) -> list[float]:
    """Return the recurrent output after the last token for each query head; see `PagedAttentionExecutor`."""
    width = config.num_kv_heads * config.head_dim
    rows = torch.zeros(len(tokens) + 3, width, dtype=torch.float64)
    if config.embedding == "one_hot":
        for at, token in enumerate(tokens, 3):
            rows[at, token % width] = 1
    else:
        rows[3:] = _sinusoids(tokens, width)
    state = torch.zeros(width, dtype=torch.float64)
    for at in range(3, len(rows)):
        state = DECAY * state + rows[at] + rows[at - 1] / 4 + rows[at - 3] / 2
    heads = state.view(config.num_kv_heads, config.head_dim)
    repeated: list[float] = heads.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten().tolist()
    return repeated
