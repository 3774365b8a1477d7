"""DSpark, the drafter of DeepSeek-V4.1 (DeepSeek-AI, 2026): its layers draft a block of tokens in one forward.

A block is the newest token and noise tokens behind it, and each of its rows predicts the next token. In every layer, a
row attends to all rows of its block and to a window before it. Keys of the window are projections of the target's
hidden states, so they depend on the tokens up to their position alone, like the target's, and lie in the same blocks of
the cache. Only the logits depend on the drafts before: a product of the embedding of the last draft adds to them.

The formulas are those of vLLM 0.33 (`vllm/models/deepseek_v41/nvidia/dspark.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from paged.kernels.core.operation import Bound
from paged.kernels.layers.linear import linear
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.drafts.confidence_head import ConfidenceHead
from paged.models.drafts.head import DraftHead
from paged.models.families.hyper_streams import StreamsLayer
from paged.models.families.network import Network, quantize
from paged.models.layers.compressed_attention import CompressedAttention
from paged.models.layers.config import DecoderConfig
from paged.models.layers.hyper_connection import OpenStreams
from paged.models.layers.modules import Linear, empty_parameter, stream_norm
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata

# Prefix of all names of the drafter in a checkpoint.
BLOCK_DRAFTER = "mtp."


class BlockAttention(CompressedAttention):
    """Attention of a block's rows to the window before the block, and to the whole block.

    In `forward`, each row is a sequence of its own that ends where its block ends.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        assert config.block_drafter is not None
        self.block_size = config.block_drafter.block_size
        self._attend_to_past, self.attend = self.attend, self._attend_to_block
        self.rotate_on = Bound(rotary_embedding, by=1)

    def write_context(self, features: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Write the keys of a window. features: [T, hidden_size], see `BlockDraftHead.features`."""
        rows = self.down_proj(features)[:, self.sizes.q_rank :]  # [T, D]
        _, slot_mapping = metadata.table(self.table)
        self._write_rows(rows, metadata.positions, slot_mapping)

    def _attend_to_block(
        self, q: torch.Tensor, kv_cache: torch.Tensor, entries: None, *, sliding_window: int, **options: Any
    ) -> torch.Tensor:
        """Return [T, H, D] for whole blocks q [T, H, D]."""
        window = sliding_window + self.block_size
        out: torch.Tensor = self._attend_to_past(q, kv_cache, entries, sliding_window=window, **options)
        # The output was rotated back by the position of the block's last row. Rotate it to the row's own.
        places = torch.arange(self.block_size, device=q.device).flip(0)
        steps_back = places.repeat(len(q) // self.block_size)  # [T]
        self.rotate_on(steps_back, out[..., -self.sizes.rope_dim :], None, self.cos_sin_cache, interleaved=True)
        return out


class _BlockLayer(StreamsLayer):
    compressed_class = BlockAttention


class BlockDraftHead(DraftHead):
    """The drafter in the target's own checkpoint. Its vocabulary, embedding and LM head are the target's.

    Shapes: n blocks of B tokens.
    """

    def __init__(self, target: Network, config: DecoderConfig, *, has_confidence_head: bool = False) -> None:
        """config: the target's configuration with the drafter's layers behind its own."""
        drafter, first = config.block_drafter, target.config.num_layers
        assert drafter is not None
        layers = [_BlockLayer(config, index) for index in range(first, config.num_layers)]
        super().__init__(target, config, layers, config.vocab_size)
        self.embed_tokens = self.lm_head = None
        self.taps, self.block_size, self.noise_token_id = drafter.taps, drafter.block_size, drafter.noise_token_id
        self.main_proj = Linear(len(self.taps) * config.hidden_size, {"main_proj": config.hidden_size})
        self.main_norm = stream_norm(config)
        self.markov_embed = empty_parameter(config.vocab_size, drafter.markov_rank)
        self.markov_head = empty_parameter(config.vocab_size, drafter.markov_rank)
        self.confidence_head: ConfidenceHead | None = None
        if has_confidence_head:
            self.confidence_head = ConfidenceHead(config.hidden_size, drafter.markov_rank)
        if config.quantization is not None:
            self.main_proj.quantize(f"{BLOCK_DRAFTER}0", config.quantization)
            for index, layer in enumerate(layers):
                quantize(layer, f"{BLOCK_DRAFTER}{index}", config, config.quantization)

    def features(self, hidden: torch.Tensor, boundaries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the input of the drafter's keys, [T, hidden_size], from means of the target's streams."""
        means = [boundaries[index].mean(1) for index in self.taps]
        normed: torch.Tensor = self.main_norm(self.main_proj(torch.cat(means, -1)))[0]
        return normed

    def write_context(self, features: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Write every layer's keys of a step of the target."""
        for layer in self.layers:
            assert isinstance(layer, _BlockLayer)
            assert isinstance(layer.self_attn, BlockAttention)
            layer.self_attn.write_context(features, metadata)

    def forward(self, newest: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:  # type: ignore[override]
        """Return hidden states before the final norm, [n, B, hidden_size].

        newest: int64 [n], the first token of each block. metadata: of n * B sequences, see `BlockAttention`.
        """
        input_ids = torch.full((len(newest), self.block_size), self.noise_token_id, device=newest.device)
        input_ids[:, 0] = newest
        hidden, residual = self.embed(input_ids.flatten()), None  # [n * B, hidden_size]
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, metadata.positions, metadata, None)
        assert isinstance(residual, OpenStreams)
        mixed = residual.mixed(residual.closed(hidden))  # [n * B, hidden_size]
        return mixed.view(len(newest), self.block_size, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits without those of the tokens before, float32 [n, vocab_size]. hidden: of `forward`."""
        normed, _ = self.norm(hidden)
        return super().logits(normed)

    def markov_embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings of the tokens before, [n, markov_rank]. token_ids: int64 [n]."""
        return functional.embedding(token_ids, self.markov_embed)

    def markov_logits(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return what the tokens before add to the logits, float32 [n, vocab_size]."""
        return linear(embeddings, self.markov_head).float()

    def destinations(self) -> Destinations:
        first, last = f"{BLOCK_DRAFTER}0", f"{BLOCK_DRAFTER}{len(self.layers) - 1}"
        destinations = self.main_proj.destinations(first) | self.main_norm.destinations(f"{first}.main_norm")
        destinations |= self.norm.destinations(f"{last}.norm")
        destinations[f"{last}.markov_head.embed.weight"] = self.markov_embed
        destinations[f"{last}.markov_head.head.weight"] = self.markov_head
        if self.confidence_head is not None:
            destinations |= self.confidence_head.destinations(f"{last}.confidence_head")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _BlockLayer)
            destinations |= layer.destinations(f"{BLOCK_DRAFTER}{index}")
        return destinations
