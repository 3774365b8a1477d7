"""Mistral Large 4 (Mistral AI, 2026), text only: sparse latent attention whose layers may share latents."""

from __future__ import annotations

from dataclasses import replace

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.families.deepseek import indexed_attention, indexer_types
from paged.models.families.network import Network
from paged.models.families.sigmoid_experts import by_mlp_layer_types, grouped_experts
from paged.models.layers.attention_config import LatentConfig
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import count_layers, decoder_config, for_kind, rotating_layers
from paged.models.layers.learned_rotation import LearnedRotation
from paged.models.layers.rope import RopeConfig, rope_config
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import Destinations
from paged.models.parallel.share import Share

# Name in published files -> name in transformers.
_RENAMES = {
    r"^tok_embeddings\.": "model.embed_tokens.",
    r"^lerope\.": "model.rotary_emb.",
    r"^layers\.": "model.layers.",
    r"^norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"^(model\.layers\.\d+)\.attention_norm\.": r"\1.input_layernorm.",
    r"^(model\.layers\.\d+)\.ffn_norm\.": r"\1.post_attention_layernorm.",
    r"^(model\.layers\.\d+)\.attention\.": r"\1.self_attn.",
    r"\.self_attn\.wq\.": ".self_attn.q_proj.",
    r"\.self_attn\.wkv_a_with_mqa\.": ".self_attn.kv_a_proj_with_mqa.",
    r"\.self_attn\.wkv_b\.": ".self_attn.kv_b_proj.",
    r"\.self_attn\.kv_a_norm\.": ".self_attn.kv_a_layernorm.",
    r"\.self_attn\.wo\.": ".self_attn.o_proj.",
    r"\.ssmax_scaling\.s$": ".softmax_scaling.scale",
    r"\.ssmax_scaling\.b$": ".softmax_scaling.bias",
    r"^(model\.layers\.\d+)\.feed_forward\.": r"\1.mlp.",
    r"^(model\.layers\.\d+)\.(gate|experts|shared_experts)\.": r"\1.mlp.\2.",
    r"(\.mlp\.(?:.+\.)?)w1\.": r"\1gate_proj.",
    r"(\.mlp\.(?:.+\.)?)w2\.": r"\1down_proj.",
    r"(\.mlp\.(?:.+\.)?)w3\.": r"\1up_proj.",
}


class MistralLarge4(Network):
    """Latents without a rotation in every fourth layer, learned frequencies in the others."""

    model_type = "mistral_large4_text"
    renames = _RENAMES

    def __init__(self, config: DecoderConfig, share: Share | None = None) -> None:
        super().__init__(config, share)
        rotated = max((layer.rotated_dim for layer in config.attention), default=0)
        self.rotation = LearnedRotation(rotated // 2)

    def rotary_table(self, rope: RopeConfig | None, size: int, max_positions: int) -> torch.Tensor:
        table = super().rotary_table(rope, size, max_positions)
        if rope is not None:
            self.rotation.fill(rope, size, table)
        return table

    def destinations(self) -> Destinations:
        return super().destinations() | self.rotation.destinations("model.rotary_emb")

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.choice("norm_topk_prob", True)
        hf.choice("q_lora_rank")
        fields = indexed_attention(hf, interleaved=True, reads_hidden=True)
        latent: LatentConfig = replace(fields.pop("latent"), eps=hf.number("rms_norm_eps"), learned_growth=True)
        rotates = rotating_layers(hf)
        if not any(rotates):
            raise UnsupportedError(f"{hf.source}: no_rope_layers {shown(rotates)}, expected a layer that rotates")
        latents: list[LatentConfig] = []
        for is_rotating, kind in zip(rotates, indexer_types(hf), strict=True):
            sizes = latent
            if not is_rotating:
                sizes = replace(sizes, nope_dim=latent.nope_dim + latent.rope_dim, rope_dim=0)
            if kind == "shared":
                sizes = replace(sizes, index=None, shares_choice=True)
            latents.append(sizes)
        head_dims = tuple(sizes.rank + sizes.rope_dim for sizes in latents)
        experts = grouped_experts(hf, sums_two_best=True, float32_router=True)
        return decoder_config(
            hf,
            **fields | {"head_dim": head_dims},
            latent=tuple(latents),
            rope=for_kind(rotates, 1, rope_config(hf, interleaved=True)),
            shares_kv_with=_sources(hf, rotates),
            moe=by_mlp_layer_types(hf, experts),
            logits_softcap=hf.softcap("final_logit_softcapping"),
        )


def _sources(hf: HfConfig, rotates: list[int]) -> tuple[int | None, ...]:
    """Return for each layer the layer whose latents it reads, or None if it has its own.

    transformers keeps the latents of two layers for later ones: of the last layer that rotates, and of the last that
    does not, among the layers whose latents others read.

    Raises:
        CheckpointError: there are not as many sources as layers, or a source is not an earlier layer with latents.
        UnsupportedError: a source is another layer than transformers reads.
    """
    num_layers = count_layers(hf)
    layers = hf.items("kv_source_layers", int) or list(range(num_layers))
    if len(layers) != num_layers:
        raise CheckpointError(f"{hf.source}: kv_source_layers {shown(layers)}, expected one for each of {num_layers}")
    sources: list[int | None] = []
    kept: dict[int, int] = {}  # whether layers rotate -> the last layer whose latents others read
    for layer, source in enumerate(layers):
        if not 0 <= source <= layer or layers[source] != source:
            raise CheckpointError(
                f"{hf.source}: kv_source_layers: layer {layer} reads layer {source}, expected an earlier layer with "
                "latents of its own"
            )
        if source == layer:
            sources.append(None)
            if layer in layers[layer + 1 :]:
                kept[rotates[layer]] = layer
            continue
        if kept.get(rotates[layer]) != source:
            raise UnsupportedError(
                f"{hf.source}: kv_source_layers: layer {layer} reads layer {source}, supported is the last layer with "
                f"latents for others that rotates alike, {kept.get(rotates[layer])}"
            )
        sources.append(source)
    return tuple(sources)
