"""Command R7B and Command A (Cohere, 2024 and 2025): parallel attention and MLP behind one layer norm."""

from __future__ import annotations

from typing import Any

import torch

from paged.metadata import AttentionMetadata, OutputRows
from paged.models.families.llama import DecoderLayer, family, rows_of
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import by_window, periodic_windows
from paged.models.layers.rope import rope_config
from paged.models.loading.hf_config import HfConfig


class ParallelLayer(DecoderLayer):
    """Attention and MLP with the same input; both are added to the residual stream."""

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


def _cohere2(hf: HfConfig) -> dict[str, Any]:
    """Three of four layers have a window and rotate; every fourth has neither."""
    windows = periodic_windows(hf, hf.integer("sliding_window_pattern"))
    return {
        "window": windows,
        "rope": by_window(windows, None, rope_config(hf, interleaved=True)),
        "logits_scale": hf.number("logit_scale"),
        "eps": hf.number("layer_norm_eps"),
        "subtracts_mean": True,
        "before_mlp": None,
    }


Cohere2 = family("cohere2", _cohere2, layer_class=ParallelLayer)
