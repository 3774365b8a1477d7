"""Multi-token heads: one decoder layer in the target's own checkpoint, which several drafts run repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paged.models.drafts.head import DraftHead
from paged.models.drafts.later_attention import HeadLayer
from paged.models.families.decoder_layer import DecoderLayer
from paged.models.families.hyper_streams import StreamsLayer, StreamsNorm
from paged.models.families.network import Network, quantize
from paged.models.layers.config import DecoderConfig, StreamsConfig
from paged.models.layers.hyper_connection import OpenStreams
from paged.models.layers.modules import Linear, stream_norm
from paged.models.loading.weights import Destinations
from paged.step.metadata import AttentionMetadata, OutputRows


@dataclass(frozen=True)
class HeadNames:
    """Names of a multi-token head's tensors in a checkpoint, and how it combines its inputs.

    Attributes:
        prefix: prefix of all tensors of the head; {} stands for the target's number of layers.
        layer: further prefix of the decoder layer.
        token_norm, hidden_norm, projection: modules that join embedding and hidden state.
        embedding, lm_head: copies of the target's, which may be absent.
        hidden_first: whether the projection takes the hidden state before the embedding.
        normed: whether the head, after its own draft, reads its hidden state after the final norm.
    """

    prefix: str
    layer: str = ""
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    embedding: str = "embed_tokens"
    lm_head: str = "shared_head.head"
    hidden_first: bool = False
    normed: bool = False


# model_type of the target -> the head's tensor names. GLM has the names of DeepSeek-V3 (2024).
MULTI_TOKEN_HEADS: Mapping[str, HeadNames] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), HeadNames("model.layers.{}")),
    "deepseek_v4": HeadNames("mtp.0", norm="norm", embedding="emb.tok_emb", lm_head="head"),
    "hy_v3": HeadNames("model.layers.{}", norm="final_layernorm", normed=True),
    "mimo": HeadNames(
        "model.mtp_layers.0",
        token_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        lm_head="lm_head",
        hidden_first=True,
        normed=True,
    ),
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        HeadNames(
            "mtp",
            "layers.0",
            token_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc",
            norm="norm",
            lm_head="lm_head",
            normed=True,
        ),
    ),
}


class NamedHead(DraftHead):
    """A head in the target's own checkpoint, under the names of `HeadNames`; several drafts run it repeatedly."""

    def __init__(
        self,
        target: Network,
        config: DecoderConfig,
        layer: DecoderLayer,
        names: HeadNames,
        projections: Sequence[Linear],
    ) -> None:
        """config: the target's configuration with one more layer. projections: those that join the inputs."""
        super().__init__(target, config, [layer], config.vocab_size)
        self.names, self.prefix = names, names.prefix.format(config.num_layers - 1)
        self.layer_prefix = f"{self.prefix}.{names.layer}".removesuffix(".")
        self.token_norm, self.hidden_norm = stream_norm(config), stream_norm(config)
        self.projections = nn.ModuleList(projections)
        if config.quantization is not None:
            for projection in projections:
                projection.quantize(self.prefix, config.quantization)
            quantize(layer, self.layer_prefix, config, config.quantization)

    def destinations(self) -> Destinations:
        names, prefix = self.names, self.prefix
        destinations: Destinations = self.layer.destinations(self.layer_prefix)
        for projection in self.projections:
            assert isinstance(projection, Linear)
            destinations |= projection.destinations(prefix)
        norms = {names.token_norm: self.token_norm, names.hidden_norm: self.hidden_norm, names.norm: self.norm}
        for name, norm in norms.items():
            destinations |= norm.destinations(f"{prefix}.{name}")
        for name, copy in ((names.embedding, self.embed_tokens), (names.lm_head, self.lm_head)):
            if copy is not None:
                destinations[f"{prefix}.{name}.weight"] = copy
        return destinations


class MultiTokenHead(NamedHead):
    """A head with one projection of the embedding and the hidden state side by side."""

    def __init__(self, target: Network, config: DecoderConfig, names: HeadNames) -> None:
        """config: the target's configuration with one more layer."""
        projection = Linear(2 * config.hidden_size, {names.projection: config.hidden_size})
        super().__init__(target, config, HeadLayer(config, config.num_layers - 1), names, [projection])

    def forward(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = [self.token_norm(self.embed(input_ids))[0], self.hidden_norm(features)[0]]
        if self.names.hidden_first:
            inputs.reverse()
        (projection,) = self.projections
        joined = projection(torch.cat(inputs, -1))
        normed, stream = self.norm(*self.layer(joined, None, metadata.positions, metadata, outputs))
        if self.names.normed:
            return normed, normed
        return normed, stream


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
