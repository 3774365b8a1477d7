"""Granite (IBM, 2024), dense and with experts: Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import decoder_config, moe_config
from paged.models.loading.hf_config import HfConfig


class Granite(Llama):
    """Llama with multipliers."""

    model_type = "granite"

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, mlp_bias=hf.flag("mlp_bias"), **_multipliers(hf))


class GraniteMoe(Llama):
    """Granite with experts in every layer, whose weights sum to 1 for each token."""

    model_type = "granitemoe"
    # As published; experts and router are under those of transformers' own names, too.
    renames = MappingProxyType(
        {
            r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
            r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
            r"\.block_sparse_moe\.router\.layer\.": ".mlp.router.",
            r"\.block_sparse_moe\.": ".mlp.",
            r"\.shared_mlp\.input_linear\.": ".mlp.shared_experts.gate_up_proj.",
            r"\.shared_mlp\.output_linear\.": ".mlp.shared_experts.down_proj.",
        }
    )

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        shared_size = hf.integer("shared_intermediate_size", 0, least=0)
        moe = moe_config(hf, renormalize=True, router_name="router", stacked=True, shared_size=shared_size)
        return decoder_config(hf, moe=moe, fused_mlp=True, **_multipliers(hf))


class GraniteMoeShared(GraniteMoe):
    """Beside the experts stands an MLP for all tokens."""

    model_type = "granitemoeshared"


def _multipliers(hf: HfConfig) -> dict[str, Any]:
    return {
        "softmax_scale": hf.number("attention_multiplier", 1.0),
        "embedding_scale": hf.number("embedding_multiplier", 1.0),
        "residual_scale": hf.number("residual_multiplier", 1.0),
        "logits_scale": 1 / hf.number("logits_scaling", 1.0),
    }
