"""Gemma 3 (Gemma Team, 2025), text alone: norms before and after attention and MLP, and two kinds of layers."""

from __future__ import annotations

import torch

from paged.errors import UnsupportedError
from paged.kv_cache_manager import PagedKvCacheManager
from paged.metadata import AttentionMetadata
from paged.models.decoder_config import DecoderConfig, decoder_config, known_activation, layer_windows
from paged.models.hf_config import HfConfig
from paged.models.layers import RmsNorm
from paged.models.llama import DecoderLayer, Llama
from paged.models.rope import RopeConfig, rope_config
from paged.models.weights import WeightSlots

# Settings of config.json that change what is computed, and are not known here.
_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3Layer(DecoderLayer):
    """What attention and MLP add to the residual stream is normed too."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.pre_feedforward_layernorm = RmsNorm(config.hidden_size, config)
        self.post_feedforward_layernorm = RmsNorm(config.hidden_size, config)

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

    layer_class = Gemma3Layer

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        for key in _REFUSED:
            if hf.values.get(key):
                raise UnsupportedError(f"{hf.source}: {key} = {hf.values[key]!r} is not supported")
        period = hf.integer("sliding_window_pattern", 6)
        windows = layer_windows(hf, hf.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0)
        whole, local = _ropes(hf)
        return decoder_config(
            hf,
            windows=windows,
            ropes=tuple(whole if window is None else local for window in windows),
            softmax_scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            activation=known_activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
            tie_word_embeddings=hf.flag("tie_word_embeddings", True),
            qk_norm=True,
            zero_centred_norms=True,
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
    whole = rope_config(hf, theta=1e6, layer_type="full_attention")
    if hf.section("rope_parameters") is None:
        return whole, RopeConfig(hf.number("rope_local_base_freq", 1e4))
    return whole, rope_config(hf, theta=1e4, layer_type="sliding_attention")
