"""The draft head of a model with several residual streams."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paged.models.families.draft_head import HeadNames, NamedHead
from paged.models.families.hyper_streams import StreamsLayer, StreamsNorm
from paged.models.families.network import Network
from paged.models.layers.config import DecoderConfig, StreamsConfig
from paged.models.layers.hyper_connection import OpenStreams
from paged.models.layers.modules import Linear
from paged.step.metadata import AttentionMetadata, OutputRows


class StreamsDraftHead(NamedHead):
    """The multi-token head of DeepSeek-V4 (DeepSeek-AI, 2026), in the target's own checkpoint.

    Features are all streams behind the target's last layer, [T, N * hidden_size]. Position 0 has features of 0, as far
    as the window reaches.
    """

    def __init__(self, target: Network, config: DecoderConfig, names: HeadNames) -> None:
        """config: the target's configuration with one more layer."""
        assert isinstance(config.streams, StreamsConfig)
        size = config.hidden_size
        projections = [Linear(size, {"e_proj": size}), Linear(size, {"h_proj": size})]
        super().__init__(target, config, StreamsLayer(config, config.num_layers - 1), names, projections)
        self.num_streams = config.streams.count
        self.taps = (config.num_layers - 1,)
        self.norm = StreamsNorm(config)

    def features(self, hidden: torch.Tensor, boundaries: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return boundaries[self.taps[0]].flatten(1)

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_proj, hidden_proj = self.projections
        tokens = token_proj(self.token_norm(self.embed(input_ids))[0])  # [T, hidden_size]
        rows = features.view(len(features) * self.num_streams, -1)
        streams = hidden_proj(self.hidden_norm(rows)[0]).view(len(features), self.num_streams, -1)
        streams = streams + tokens[:, None]  # [T, N, hidden_size]
        hidden, residual = self.layer(tokens, OpenStreams(streams), metadata.positions, metadata, outputs)
        normed, streams = self.norm(hidden, residual)
        return normed, streams.flatten(1)
