"""The draft head of a model with several residual streams."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paged.models.families.draft_head import HeadNames
from paged.models.families.hyper_streams import StreamsLayer, StreamsNorm
from paged.models.families.network import Network, quantize
from paged.models.layers.config import DecoderConfig, StreamsConfig
from paged.models.layers.decoder import Linear, stream_norm
from paged.models.layers.draft_head import DraftHead
from paged.models.layers.hyper_connection import OpenStreams
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class StreamsDraftHead(DraftHead):
    """The multi-token head of DeepSeek-V4 (DeepSeek-AI, 2026), in the target's own checkpoint.

    Features are all streams behind the target's last layer, [T, N * hidden_size]. Position 0 has features of 0, as far
    as the window reaches.
    """

    layer: StreamsLayer

    def __init__(self, target: Network, config: DecoderConfig, names: HeadNames) -> None:
        """config: the target's configuration with one more layer."""
        assert isinstance(config.streams, StreamsConfig)
        super().__init__(target, config, StreamsLayer(config, config.num_layers - 1), config.vocab_size)
        self.names, self.prefix, self.num_streams = names, names.prefix, config.streams.count
        self.taps = (config.num_layers - 1,)
        self.norm = StreamsNorm(config)
        self.token_norm, self.hidden_norm = stream_norm(config), stream_norm(config)
        self.token_proj = Linear(config.hidden_size, {"e_proj": config.hidden_size})
        self.hidden_proj = Linear(config.hidden_size, {"h_proj": config.hidden_size})
        if config.quantization is not None:
            for projection in (self.token_proj, self.hidden_proj):
                projection.quantize(self.prefix, config.quantization)
            quantize(self.layer, self.prefix, config, config.quantization)

    def features(self, hidden: torch.Tensor, boundaries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return boundaries[self.taps[0]].flatten(1)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.token_proj(self.token_norm(self.embed(input_ids))[0])  # [T, hidden_size]
        rows = features.view(len(features) * self.num_streams, -1)
        streams = self.hidden_proj(self.hidden_norm(rows)[0]).view(len(features), self.num_streams, -1)
        streams = streams + tokens[:, None]  # [T, N, hidden_size]
        hidden, residual = self.layer(tokens, OpenStreams(streams), metadata.positions, metadata, outputs)
        normed, streams = self.norm(hidden, residual)
        return normed, streams.flatten(1)

    def destinations(self) -> Destinations:
        names, prefix = self.names, self.prefix
        destinations = self.layer.destinations(prefix)
        for projection in (self.token_proj, self.hidden_proj):
            destinations |= projection.destinations(prefix)
        norms = {names.token_norm: self.token_norm, names.hidden_norm: self.hidden_norm, names.norm: self.norm}
        for name, norm in norms.items():
            destinations |= norm.destinations(f"{prefix}.{name}")
        for name, copy in ((names.embedding, self.embed_tokens), (names.lm_head, self.lm_head)):
            if copy is not None:
                destinations[f"{prefix}.{name}.weight"] = copy
        return destinations
