"""The expected answer of `PagedAttentionExecutor`, from its formula and without attention code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paged.executors.paged_attention_executor import DECAY, PagedExecutorConfig


def expected_logits(config: PagedExecutorConfig, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [vocab_size] of the last of `tokens`, float64."""
    attend = _one_hot_attention if config.embedding == "one_hot" else _sinusoidal_attention
    logits = torch.zeros(config.vocab_size, dtype=torch.float64)
    for output in (attend, _recurrent_output) if config.recurrent else (attend,):
        for j, value in enumerate(output(config, tokens)):
            logits[j % config.vocab_size] += value
    return logits


def _one_hot_attention(config: PagedExecutorConfig, tokens: Sequence[int]) -> list[float]:
    """Histogram of the tokens for each head: in the query's head, tokens equal to it count exp(1 / sqrt(head_dim))."""
    width = config.num_kv_heads * config.head_dim
    indices = [token % width for token in tokens]
    group = config.num_heads // config.num_kv_heads
    attention = []
    for head in range(config.num_heads):
        first = head // group * config.head_dim
        of_head = range(first, first + config.head_dim)
        heavy = indices[-1] if indices[-1] in of_head else None
        weights = [math.exp(1 / math.sqrt(config.head_dim)) if index == heavy else 1.0 for index in indices]
        for i in of_head:
            hits = sum(weight for weight, index in zip(weights, indices, strict=True) if index == i)
            attention.append(hits / sum(weights))
    return attention


def _sinusoidal_attention(config: PagedExecutorConfig, tokens: Sequence[int]) -> list[float]:
    width = config.num_kv_heads * config.head_dim
    angles = torch.tensor([[(t + 1) * (i + 1) for i in range(width)] for t in tokens], dtype=torch.float32)
    heads = torch.sin(angles).double().view(len(tokens), config.num_kv_heads, config.head_dim)
    attention: list[float] = []
    for head in range(config.num_heads):
        keys = heads[:, head // (config.num_heads // config.num_kv_heads)]
        weights = torch.softmax(keys @ keys[-1] / math.sqrt(config.head_dim), 0)
        attention += (weights @ keys).tolist()
    return attention


def _recurrent_output(config: PagedExecutorConfig, tokens: Sequence[int]) -> list[float]:
    """The state after the last token, for each query head that of its KV head; see `PagedAttentionExecutor`."""
    width = config.num_kv_heads * config.head_dim
    rows = torch.zeros(len(tokens) + 3, width, dtype=torch.float64)
    for at, token in enumerate(tokens, 3):
        if config.embedding == "one_hot":
            rows[at, token % width] = 1
        else:
            rows[at] = torch.sin(torch.tensor([(token + 1) * (i + 1) for i in range(width)], dtype=torch.float32))
    state = torch.zeros(width, dtype=torch.float64)
    for at in range(3, len(rows)):
        state = DECAY * state + rows[at] + rows[at - 1] / 4 + rows[at - 3] / 2
    heads = state.view(config.num_kv_heads, config.head_dim)
    repeated: list[float] = heads.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten().tolist()
    return repeated
