"""Llama 4 (Meta, 2025), text alone: attention within chunks, layers that rotate nothing, experts one at a time."""

from __future__ import annotations

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig, QueryGrowth
from paged.models.layers.decoder_config import count_layers, decoder_config, layer_windows, moe_config, rotating_layers
from paged.models.layers.rope_config import rope_config
from paged.models.loading.hf_config import HfConfig


class Llama4(Llama):
    """Layers that rotate see their chunk alone, and have norms of heads without weights; in the others queries grow."""

    model_type = "llama4_text"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.choice("num_experts_per_tok", 1)
        rotates, rope = rotating_layers(hf), rope_config(hf, theta=5e5, interleaved=True)
        growth = QueryGrowth(hf.number("attn_scale", 0.1), hf.integer("floor_scale", 8192), offset=1)
        tuning = hf.value("attn_temperature_tuning")  # published as a number, too
        growth_elsewhere = growth if tuning is None or tuning else None
        norm = "unit" if hf.flag("use_qk_norm", True) else None
        moe = moe_config(
            hf,
            renormalize=False,
            scoring="sigmoid",
            weighs_inputs=True,
            shared_size=hf.integer("intermediate_size"),
            shared_name="shared_expert",
            router_name="router",
            stacked=True,
            transposed=True,
        )
        layers = range(count_layers(hf))
        step = hf.integer("interleave_moe_layer_step", 1)
        sparse = hf.items("moe_layers", int) if hf.value("moe_layers") is not None else layers[step - 1 :: step]
        most = hf.integer("max_position_embeddings")
        # `layer_types` say which layers have chunks, and where there are none, those do that rotate.
        size = hf.optional_integer("attention_chunk_size", 8192) or most
        chunks = layer_windows(hf, size, lambda layer: rotates[layer] == 1, "chunked_attention")
        return decoder_config(
            hf,
            intermediate_size=hf.integer("intermediate_size_mlp", 16384),
            mlp_name="feed_forward",
            moe=tuple(moe if layer in sparse else None for layer in layers),
            rope=tuple(rope if one else None for one in rotates),
            qk_norm=tuple(norm if one else None for one in rotates),
            query_growth=tuple(None if one else growth_elsewhere for one in rotates),
            chunk_size=tuple(chunk if chunk is not None and chunk < most else None for chunk in chunks),
        )
