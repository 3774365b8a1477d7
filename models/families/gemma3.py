"""Gemma 3 (Gemma Team, 2025), text alone: norms before and after attention and MLP, and two kinds of layers."""

from __future__ import annotations

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import UnsupportedError
from paged.kernels.common.scalars import shown
from paged.metadata import AttentionMetadata
from paged.models.families.llama import DecoderLayer, Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder import RmsNorm
from paged.models.layers.decoder_config import decoder_config, known_activation, layer_windows
from paged.models.layers.rope import RopeConfig, scaled_rope
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import WeightSlots


class Gemma3Layer(DecoderLayer):
    """What attention and MLP add to the residual stream is normed too."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.pre_feedforward_layernorm = RmsNorm(config.hidden_size, config.norms)
        self.post_feedforward_layernorm = RmsNorm(config.hidden_size, config.norms)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, metadata)
        hidden, _ = self.post_attention_layernorm(hidden)
        hidden, residual = self.pre_feedforward_layernorm(hidden, residual)
        hidden = self.mlp(hidden, metadata.lora)
        hidden, _ = self.post_feedforward_layernorm(hidden)
        return hidden, residual

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {
            **super().weight_slots(prefix),
            **self.pre_feedforward_layernorm.weight_slots(f"{prefix}.pre_feedforward_layernorm"),
            **self.post_feedforward_layernorm.weight_slots(f"{prefix}.post_feedforward_layernorm"),
        }


class Gemma3(Llama):
    """Most layers have a window and one rotation, every sixth sees everything and has another."""

    model_type = "gemma3_text"
    layer_class = Gemma3Layer

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        period = hf.integer("sliding_window_pattern", 6)
        windows = layer_windows(
            hf, hf.optional_integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0
        )
        whole, local = _ropes(hf)
        return decoder_config(
            hf,
            window=windows,
            rope=tuple(whole if window is None else local for window in windows),
            softmax_scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            activation=known_activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", True),
            qk_norm="head",
            zero_centred=True,
        )

    def bind(self, kv_manager: PagedKvCacheManager, max_seq_len: int) -> None:
        super().bind(kv_manager, max_seq_len)
        # Rounded to the type of the weights, to 34 from 33.94 in bfloat16 for 1,152: so the models were trained.
        self.embed_scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.embed_tokens.dtype).item()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self.embed_scale


def _ropes(hf: HfConfig) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers that see everything, and of the others; scalings as published before transformers 5 are the first
    ones' alone."""
    parameters = hf.section("rope_parameters") or HfConfig({}, hf.source)
    whole, local = (
        parameters.section(kind) or HfConfig({}, hf.source) for kind in ("full_attention", "sliding_attention")
    )
    if unknown := sorted(parameters.values.keys() - parameters.read_keys):
        raise UnsupportedError(f"{parameters.source}: {shown(unknown[0])} is not said for a type of layers")
    scaling = hf.section("rope_scaling") or HfConfig({}, hf.source)
    if "type" in scaling.values and "rope_type" not in scaling.values:  # which transformers leaves unread here alone
        raise UnsupportedError(f"{scaling.source}: type {shown(scaling.value('type'))}, expected it as rope_type")
    whole = HfConfig({**whole.values, **scaling.values}, hf.source)
    theta, local_theta = hf.number("rope_theta", 1e6), hf.number("rope_local_base_freq", 1e4)
    return scaled_rope(hf, whole, theta), scaled_rope(hf, local, local_theta)
