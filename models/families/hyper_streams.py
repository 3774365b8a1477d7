"""Layers over several residual streams, which are one tensor [T, N, hidden_size]; see `HyperConnection`."""

from __future__ import annotations

import torch

from paged.models.families.network import DecoderLayer, rows_of
from paged.models.layers.config import DecoderConfig, GatedStreamsConfig, StreamsConfig
from paged.models.layers.decoder import RmsNorm
from paged.models.layers.hyper_connection import GatedMix, GatedResidual, HyperConnection
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
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
        token_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer as `DecoderLayer.forward`; residual: the streams, or None in the first layer.

        The returned hidden states are part of the streams already.

        token_ids: [T], if they choose the layer's experts.
        """
        streams = residual
        if streams is None:
            streams = self.begin(hidden)

        # Attention, or the recurrent part.
        mixed, streams = self.attention_streams(streams, self.before_attention)
        attended = self.attend(mixed.x, positions, metadata, outputs)
        if self.ranks.size > 1:
            attended = self.ranks.sum(attended)
        lora = metadata.lora
        if outputs is not None:
            streams, mixed, lora = streams[outputs.rows], mixed.rows(outputs.rows), outputs.lora

        # The MLP, or experts.
        mixed, streams = self.mlp_streams(streams, self.before_mlp, attended, mixed)
        ffn = getattr(self, self.mlp_name)
        if token_ids is None:
            hidden = ffn(mixed.x, lora)
        else:
            hidden = ffn(mixed.x, lora, token_ids=rows_of(token_ids, outputs))
        if self.ranks.size > 1:
            hidden = self.ranks.sum(hidden)
        return hidden, mixed.join(hidden, streams)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the streams before the first layer, which are all the embedded tokens."""
        return hidden[:, None].expand(-1, self.num_streams, -1)

    @staticmethod
    def stream(hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return a copy of all streams, which contain `hidden` already."""
        assert residual is not None
        return residual.clone()

    def destinations(self, prefix: str) -> Destinations:
        streams = self.attention_streams.destinations(prefix) | self.mlp_streams.destinations(prefix)
        return super().destinations(prefix) | streams


class StreamsNorm(RmsNorm):
    """The final norm, of the mean of all streams or of their weighted sum."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.norms)
        assert isinstance(config.streams, StreamsConfig)
        self.head: HyperConnection | None = None
        if config.streams.has_head:
            self.head = HyperConnection(config, config.streams, "hc_head", is_head=True)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed, residual). residual: [T, N, hidden_size], which contains x already."""
        assert residual is not None
        if self.head is not None:
            mixed, _ = self.head(residual, self)
            return mixed.x, residual
        normed, _ = super().forward(residual.mean(1))
        return normed, residual

    def destinations(self, prefix: str) -> Destinations:
        destinations = super().destinations(prefix)
        if self.head is not None:
            destinations |= self.head.destinations(prefix.rpartition(".")[0])
        return destinations


class StreamsMix(GatedMix):
    """The final mix of all streams, which contains their norm."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mixed, residual). residual: [T, N, hidden_size], which contains x already."""
        assert residual is not None
        mixed, _ = self.mix(residual)
        return mixed, residual
