"""Layers over several residual streams, which are one tensor [T, N, hidden_size]; see `HyperConnection`."""

from __future__ import annotations

from typing import Any

import torch

from paged.models.families.network import DecoderLayer, rows_of
from paged.models.layers.config import DecoderConfig, GatedStreamsConfig, StreamsConfig
from paged.models.layers.decoder import RmsNorm
from paged.models.layers.hyper_connection import GatedResidual, HyperConnection, OpenStreams
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class StreamsLayer(DecoderLayer):
    """A layer whose attention and MLP each read a mix of the streams, and add to each of them."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        assert config.streams is not None
        self.num_streams = config.streams.count
        self.attention_streams: HyperConnection | GatedResidual
        self.mlp_streams: HyperConnection | GatedResidual
        if isinstance(config.streams, GatedStreamsConfig):
            self.attention_streams = GatedResidual(config, config.streams, "attn_hyper_connection")
            self.mlp_streams = GatedResidual(config, config.streams, "mlp_hyper_connection")
        else:
            self.attention_streams = HyperConnection(config, config.streams, "hc_attn")
            self.mlp_streams = HyperConnection(config, config.streams, "hc_ffn")

    def forward(
        self,
        hidden: torch.Tensor,
        residual: Any,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
        token_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run the layer as `DecoderLayer.forward`; residual: `OpenStreams`, or None in the first layer.

        The next layer, or the final norm, joins the returned hidden states in the launch that also mixes the streams.

        token_ids: [T], if they choose the layer's experts.
        """
        before: OpenStreams | None = residual
        output: torch.Tensor | None = hidden
        if before is None:
            before = self.begin(hidden)
        if before.joins is None:
            output = None

        # Attention, or the recurrent part.
        x, streams = self.attention_streams(before, self.before_attention, output)
        attended = self.attend(x, positions, metadata, outputs)
        if self.ranks.size > 1:
            attended = self.ranks.sum(attended)
        lora = metadata.lora
        if outputs is not None:
            streams, lora = streams.rows(outputs.rows), outputs.lora

        # The MLP, or experts.
        x, streams = self.mlp_streams(streams, self.before_mlp, attended)
        ffn = getattr(self, self.mlp_name)
        if token_ids is None:
            hidden = ffn(x, lora)
        else:
            hidden = ffn(x, lora, token_ids=rows_of(token_ids, outputs))
        if self.ranks.size > 1:
            hidden = self.ranks.sum(hidden)
        return hidden, streams

    def begin(self, hidden: torch.Tensor) -> OpenStreams:
        """Return the streams before the first layer, which are all the embedded tokens."""
        return OpenStreams(hidden[:, None].expand(-1, self.num_streams, -1))

    @staticmethod
    def stream(hidden: torch.Tensor, residual: Any) -> torch.Tensor:
        """Return the streams, [T, N, hidden_size], that `hidden` has joined."""
        closed: torch.Tensor = residual.closed(hidden)
        return closed

    def destinations(self, prefix: str) -> Destinations:
        streams = self.attention_streams.destinations(prefix) | self.mlp_streams.destinations(prefix)
        return super().destinations(prefix) | streams


class StreamsNorm(RmsNorm):
    """The final norm: of the mean of all streams, or of their sum with its own weights or those of the last part."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.norms)
        assert isinstance(config.streams, StreamsConfig)
        self.head: HyperConnection | None = None
        if config.streams.has_head:
            self.head = HyperConnection(config, config.streams, "hc_head", is_head=True)

    def forward(self, x: torch.Tensor, residual: Any = None) -> tuple[torch.Tensor, Any]:
        """Return (normed, streams). residual: `OpenStreams`, which x joins."""
        if self.head is not None:
            normed, streams = self.head(residual, self, x)
            return normed, streams.streams
        joined = residual.closed(x)
        if residual.weights is None:
            mixed = joined.mean(1)
        else:
            mixed = (residual.weights.unsqueeze(-1) * joined).sum(1).to(joined.dtype)
        normed, _ = super().forward(mixed)
        return normed, joined

    def destinations(self, prefix: str) -> Destinations:
        destinations = super().destinations(prefix)
        if self.head is not None:
            destinations |= self.head.destinations(prefix.rpartition(".")[0])
        return destinations


class StreamsMix(GatedResidual):
    """The final mix of all streams, which contains their norm."""

    def __init__(self, config: DecoderConfig) -> None:
        assert isinstance(config.streams, GatedStreamsConfig)
        super().__init__(config, config.streams, is_last=True)

    def forward(self, x: torch.Tensor, residual: Any = None) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        """Return (mixed, streams), as `StreamsNorm.forward`."""
        mixed, streams = super().forward(residual, None, x)
        return mixed, streams.streams
