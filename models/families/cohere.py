"""Cohere's Command and Aya (2024 and 2025): parallel attention and MLP behind one layer norm."""

from __future__ import annotations

from typing import Any

import torch

from paged.models.families.decoder_layer import DecoderLayer, rows_of
from paged.models.families.network import family
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import by_window, periodic_windows
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig
from paged.step.metadata import AttentionMetadata, OutputRows


class ParallelLayer(DecoderLayer):
    """Attention and MLP with the same input; both results are added to the residual stream."""

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.before_attention is not None
        hidden, residual = self.before_attention(hidden, residual)
        attended = self.attend(hidden, positions, metadata, outputs)
        hidden, residual = rows_of(hidden, outputs), rows_of(residual, outputs)
        lora = metadata.lora if outputs is None else outputs.lora
        return self.ranks.sum(attended.add_(self.ffn(hidden, lora))), residual

    @staticmethod
    def num_sums(config: DecoderConfig, index: int) -> int:
        return 1


def _cohere(hf: HfConfig) -> dict[str, Any]:
    """Command R and Aya (Cohere, 2024): every layer rotates and sees all tokens; Command R+ norms its heads."""
    norm = None
    if hf.flag("use_qk_norm"):
        norm = "layer"
    return dict(**_fields(hf), rope=rope_config(hf, interleaved=True), qk_norm=norm)


def _cohere2(hf: HfConfig) -> dict[str, Any]:
    """Command R7B and Command A (Cohere, 2025).

    Three of four layers have a window and rotate; every fourth layer sees all tokens and does not rotate.
    """
    windows = periodic_windows(hf, hf.integer("sliding_window_pattern"))
    ropes = by_window(windows, None, rope_config(hf, interleaved=True))
    return dict(**_fields(hf), window=windows, rope=ropes)


def _fields(hf: HfConfig) -> dict[str, Any]:
    """Return the fields that both families share."""
    return {
        "logits_scale": hf.number("logit_scale"),
        "eps": hf.number("layer_norm_eps"),
        "subtracts_mean": True,
        "before_mlp": None,
    }


# Name in `architectures` of config.json -> family.
COHERE = {
    "CohereForCausalLM": family("cohere", _cohere, layer_class=ParallelLayer),
    "Cohere2ForCausalLM": family("cohere2", _cohere2, layer_class=ParallelLayer),
}
