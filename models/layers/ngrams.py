"""Features of the last tokens, from hashed tables of n-grams in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paged.errors import CheckpointError
from paged.kernels.core.operation import Bound
from paged.kernels.recurrent.causal_conv1d import causal_conv1d
from paged.kernels.recurrent.metadata import RecurrentBatch, RecurrentState
from paged.models.layers.config import DecoderConfig
from paged.models.layers.hyper_connection import StreamsRmsNorm
from paged.models.layers.modules import Linear, empty_parameter
from paged.models.layers.recurrent_config import HASH_NUMBERS, HashedTables, NgramConfig
from paged.models.loading.host_weights import HostWeights
from paged.models.loading.weights import ConvertedDestination, Destinations
from paged.step.metadata import AttentionMetadata


class RowHash:
    """Names a row of each head's table for the last tokens: (id_0 m_0) xor (id_1 m_1) ..., modulo the table's rows."""

    def __init__(self, tables: HashedTables, device: torch.device) -> None:
        self.multipliers = tables.multipliers
        heads_per_order = len(tables.table_sizes) // (tables.order - 1)
        self.sizes = torch.tensor(tables.table_sizes, device=device).split(heads_per_order)
        self.offsets = torch.tensor(tables.table_offsets, device=device).split(heads_per_order)

    def rows(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows, int64 [T, heads]. tokens: int64 [T] each: a token's id, that of the token before, ..."""
        mixed = tokens[0] * self.multipliers[0]
        rows: list[torch.Tensor] = []
        for shift, (sizes, offsets) in enumerate(zip(self.sizes, self.offsets, strict=True), 1):
            mixed = mixed ^ (tokens[shift] * self.multipliers[shift])
            rows.append(mixed[:, None] % sizes + offsets)
        return torch.cat(rows, -1)


class NgramHash:
    """Rows of the tables for the last tokens of each token.

    The ids of earlier tokens come from the cache's rows of a convolution whose taps are 1 and 0. So chunks, decode
    steps, hits of the prefix cache, drafts and graphs find them like every other state. The rows hold float32
    differences to the separator, which are exact for ids below 2^24. Missing tokens are 0 there, and so are separators.
    """

    state: RecurrentState

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self.causal_conv1d = Bound(causal_conv1d)

    def set_state(self, state: RecurrentState) -> None:
        """Take the slots of the token ids."""
        self.state, config, device = state, self.config, state.conv.device
        shifts = config.order - 1
        # Channel s - 1 has the token s positions earlier; the last of `order` taps is the token's own.
        self.taps = torch.eye(shifts, device=device).flip(1)
        self.taps = functional.pad(self.taps, (0, 1))  # [shifts, order]
        self.hash = RowHash(config, device)

    def rows(self, input_ids: torch.Tensor, batch: RecurrentBatch) -> torch.Tensor:
        """Return each head's row for each token, int64 [T, heads]. input_ids: [T]."""
        config = self.config
        differences = (input_ids - config.separator).float()  # [T]
        shifts = config.order - 1
        stored = differences[:, None].repeat(1, shifts)  # [T, shifts]
        earlier = self.causal_conv1d(stored, self.taps, None, self.state, batch=batch, activation=None)
        tokens = earlier.long() + config.separator  # [T, shifts]
        last = [input_ids.long()]
        is_beyond = torch.zeros_like(input_ids, dtype=torch.bool)  # whether a separator was passed
        for shift in range(shifts):
            token = tokens[:, shift].masked_fill(is_beyond, config.separator)
            is_beyond = token == config.separator
            last.append(token)
        return self.hash.rows(last)


class NgramTables(HostWeights):
    """The tables of all heads, in host memory; a GPU reads the rows of a step over its bus."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = empty_parameter(config.num_rows, config.head_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all heads side by side, [T, size]. rows: int64 [T, heads]."""
        return functional.embedding(rows, self.seen["weight"]).flatten(1)

    def destinations(self, prefix: str) -> Destinations:
        destinations: Destinations = {}
        config = self.config
        if config.num_parts:
            part_rows = -(-config.num_rows // config.num_parts)
            for index, part in enumerate(self.weight.split(part_rows)):
                destinations[f"{prefix}.ngram_embedding.shard_{index}.weight"] = part
        else:
            destinations[f"{prefix}.ngram_embedding.weight"] = self.weight
        numbers = dict(zip(HASH_NUMBERS, (config.multipliers, config.table_sizes, config.table_offsets), strict=True))
        for name in self.config.stored_hash:
            destinations[f"{prefix}.{name}"] = _expected(f"{prefix}.{name}", numbers[name])
        return destinations


class NgramLayer(nn.Module):
    """What a layer adds to each residual stream: values of the last tokens, gated by the stream.

    It is the per-layer embedding of Qwen4-Exp (Qwen, 2026).
    Shapes: T tokens, N streams, D hidden size.
    """

    state: RecurrentState

    def __init__(self, config: DecoderConfig, ngrams: NgramConfig) -> None:
        super().__init__()
        assert config.streams is not None
        self.config, count = ngrams, config.streams.count
        wide = count * config.hidden_size
        self.sizes = [wide, config.hidden_size]
        self.hash = NgramHash(ngrams)
        self.tables = NgramTables(ngrams)
        self.kv_proj = Linear(ngrams.size, dict(zip(("key_proj", "value_proj"), self.sizes, strict=True)))
        self.key_norm, self.query_norm = StreamsRmsNorm(config, count), StreamsRmsNorm(config, count)
        self.conv_norm = StreamsRmsNorm(config, count)
        by_tap = torch.empty(ngrams.span, wide)  # taps between those of the checkpoint are 0
        self.conv_weight = nn.Parameter(by_tap.t(), requires_grad=False)  # [N * D, span]
        self.causal_conv1d = Bound(causal_conv1d)

    def set_states(self, rows: RecurrentState, tokens: RecurrentState) -> None:
        """Take the slots of the convolution's rows and of the token ids."""
        self.state = rows
        self.hash.set_state(tokens)
        self.tables.see_from(rows.conv.device)

    def forward(self, streams: torch.Tensor, input_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Return the streams [T, N, D] with the features of the tokens [T]."""
        batch = metadata.recurrent
        assert batch is not None
        rows = self.hash.rows(input_ids, batch)
        keys, values = self.kv_proj(self.tables(rows)).split_with_sizes(self.sizes, -1)  # [T, N * D], [T, D]
        keys, _ = self.key_norm(keys.view_as(streams))
        queries, _ = self.query_norm(streams)
        gated = stream_gates(keys, queries) * values[:, None]  # [T, N, D]
        normed, _ = self.conv_norm(gated)
        convolved = self.causal_conv1d(normed.flatten(1), self.conv_weight, None, self.state, batch=batch)
        features: torch.Tensor = gated + convolved.view_as(gated)
        return streams + features

    def destinations(self, prefix: str) -> Destinations:
        destinations = self.kv_proj.destinations(prefix) | self.tables.destinations(f"{prefix}.ple_embedding")
        for name, norm in (("key", self.key_norm), ("query", self.query_norm), ("conv", self.conv_norm)):
            destinations |= norm.destinations(f"{prefix}.norm_{name}")
        weight, order = self.conv_weight, self.config.order

        def spread(taps: torch.Tensor) -> Any:
            weight.zero_()
            return weight[:, ::order].copy_(taps[:, 0])

        shape = torch.Size([len(weight), 1, self.config.conv_width])
        destinations[f"{prefix}.conv1d.weight"] = ConvertedDestination(shape, weight.dtype, spread)
        return destinations


def stream_gates(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return how much of a value each stream takes, [T, N, 1]. keys, queries: normalised, [T, N, D]."""
    scores = (keys * queries).sum(-1, keepdim=True) / math.sqrt(keys.shape[-1])
    return (scores.abs().clamp_min(1e-6).sqrt() * scores.sign()).sigmoid()


def _expected(name: str, numbers: tuple[int, ...]) -> ConvertedDestination:
    """Return a destination that compares the stored numbers of a hash with those of config.json."""

    def compare(stored: torch.Tensor) -> Any:
        if stored.tolist() != list(numbers):
            raise CheckpointError(f"{name}: {stored.tolist()}, expected {list(numbers)} by config.json")

    return ConvertedDestination(torch.Size([len(numbers)]), torch.int64, compare)
