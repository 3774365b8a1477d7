"""A.X K2 (SK Telecom, 2026): DeepSeek-V3.2 with gates behind its norms and behind each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from paged.models.families.decoder_layer import DecoderLayer
from paged.models.families.deepseek import indexed_latents
from paged.models.families.network import family
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import RmsNorm, empty_parameter
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import Destinations

# Names of transformers 5 -> published names.
_RENAMES = {
    r"_layernorm\.mlp\.fc1\.": "_layernorm.W_down.",
    r"_layernorm\.mlp\.fc2\.": "_layernorm.W_up.",
    r"\.self_attn\.q_gate_proj\.": ".self_attn.q_b_proj.",
}


class GatedNorm(RmsNorm):
    """An RMS norm y times sigmoid(up silu(down y)), a gate of low rank."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.norms)
        self.down = empty_parameter(config.norms.gate_rank, config.hidden_size)  # never packed
        self.up = empty_parameter(config.hidden_size, config.norms.gate_rank)  # never packed

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed and gated, residual), as `RmsNorm.forward`."""
        normed, residual = super().forward(x, residual)
        inner = functional.silu(functional.linear(normed, self.down))  # [T, gate_rank]
        gate = functional.linear(inner, self.up).float().sigmoid()  # [T, hidden_size]
        return (normed * gate).to(normed.dtype), residual

    def destinations(self, prefix: str) -> Destinations:
        gate = {f"{prefix}.W_down.weight": self.down, f"{prefix}.W_up.weight": self.up}
        return super().destinations(f"{prefix}.norm") | gate


class GatedNormLayer(DecoderLayer):
    """A layer with gated norms before attention and before experts; the norm before an MLP is plain."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.before_attention = GatedNorm(config)
        if config.moe[index] is not None:
            self.before_mlp = GatedNorm(config)


def _axk2(hf: HfConfig) -> dict[str, Any]:
    fields = indexed_latents(hf)
    fields["latent"] = replace(fields["latent"], reads_both=True)
    return {**fields, "output_gate": True, "gate_rank": hf.integer("gated_norm_rank")}


# Name in `architectures` of config.json -> family.
AXK2 = {"AXK2ForCausalLM": family("axk2", _axk2, _RENAMES, GatedNormLayer)}
