"""Layers over several residual streams, which are one tensor [T, N, hidden_size]; see `HyperConnection`."""

from __future__ import annotations

from typing import Any

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.kernels.layers.streams import MAX_STREAMS
from paged.models.families.decoder_layer import DecoderLayer, rows_of
from paged.models.layers.config import DecoderConfig, GatedStreamsConfig, StreamsConfig
from paged.models.layers.engram import Engram
from paged.models.layers.hyper_connection import GatedResidual, HyperConnection, OpenStreams
from paged.models.layers.modules import RmsNorm
from paged.models.layers.ngrams import NgramLayer
from paged.models.layers.recurrent_config import EngramConfig, NgramConfig
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import Destinations, join_destinations
from paged.step.metadata import AttentionMetadata, OutputRows


class StreamsLayer(DecoderLayer):
    """A layer whose attention and MLP each read a mix of the streams, and add to each of them.

    Some layers first add features of the last tokens to each stream.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        assert config.streams is not None
        self.num_streams = config.streams.count
        self.is_single_pass = isinstance(config.streams, StreamsConfig) and config.streams.single_pass
        moe, ngrams = config.moe[index], config.ngrams[index]
        self.has_experts_by_id = moe is not None and moe.token_table is not None
        self.ple: NgramLayer | None = None
        self.engram: Engram | None = None
        if isinstance(ngrams, NgramConfig):
            self.ple = NgramLayer(config, ngrams)
        elif isinstance(ngrams, EngramConfig):
            self.engram = Engram(config, ngrams, index)
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
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Run the layer as `DecoderLayer.forward`; residual: `OpenStreams`, or None in the first layer.

        The next layer, or the final norm, joins the returned hidden states in the launch that also mixes the streams.

        input_ids: the step's token ids, [T], for a layer that adds features of them or whose experts they choose.
        """
        before: OpenStreams | None = residual
        if before is None:
            before = self.begin(hidden)
        features = self.ple if self.engram is None else self.engram
        if features is not None:
            assert input_ids is not None
            streams = features(before.closed(hidden), input_ids, metadata)
            before = OpenStreams(streams, weights=before.weights)
        output: torch.Tensor | None = hidden
        if before.joins is None:
            output = None

        # Attention, or the recurrent part.
        x, before = self.attention_streams(before, self.before_attention, output)
        attended = self.ranks.sum(self.attend(x, positions, metadata, outputs))
        lora = metadata.lora
        if outputs is not None:
            before, lora = before.rows(outputs.rows), outputs.lora

        # The MLP, or experts.
        x, before = self.mlp_streams(before, self.before_mlp, attended)
        if self.has_experts_by_id:
            assert input_ids is not None
            hidden = self.ffn(x, lora, token_ids=rows_of(input_ids, outputs))
        else:
            hidden = self.ffn(x, lora)
        return self.ranks.sum(hidden), before

    def begin(self, hidden: torch.Tensor) -> OpenStreams:
        """Return the streams before the first layer, which are all the embedded tokens."""
        streams = hidden[:, None].expand(-1, self.num_streams, -1)  # [T, N, hidden_size]
        if not self.is_single_pass:
            return OpenStreams(streams)
        assert isinstance(self.attention_streams, HyperConnection)
        factors = torch.zeros(len(hidden), len(self.attention_streams.base), device=hidden.device)
        factors[:, 0] = 1
        return OpenStreams(streams, weights=factors[:, : self.num_streams])

    @staticmethod
    def stream(hidden: torch.Tensor, residual: Any) -> torch.Tensor:
        """Return the streams, [T, N, hidden_size], that `hidden` has joined."""
        closed: torch.Tensor = residual.closed(hidden)
        return closed

    def set_states(self, kv_manager: PagedKvCacheManager, index: int, num_layers: int) -> None:
        super().set_states(kv_manager, index, num_layers)
        if self.ple is not None:  # see `cache_config` for the layers
            self.ple.set_states(kv_manager.state(2 * num_layers + index), kv_manager.state(3 * num_layers + index))

    def destinations(self, prefix: str) -> Destinations:
        streams = self.attention_streams.destinations(prefix) | self.mlp_streams.destinations(prefix)
        features = join_destinations(prefix, ple=self.ple, engram=self.engram)
        return super().destinations(prefix) | streams | features


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
        normed, _ = super().forward(residual.mixed(joined))
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


def streams_config(hf: HfConfig, **fields: Any) -> StreamsConfig:
    """Return the residual streams of hyper-connections; their number and eps have the same keys in all families."""
    return StreamsConfig(count=hf.integer("hc_mult", maximum=MAX_STREAMS), eps=hf.number("hc_eps"), **fields)
