"""Gemma 4 (Gemma Team, 2026), text of the dense models alone: keys that are values, and layers with a factor."""

from __future__ import annotations

import torch

from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.common.scalars import shown
from paged.metadata import AttentionMetadata
from paged.models.families.gemma import gemma_fields
from paged.models.families.llama import DecoderLayer, Llama
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder import empty_parameter
from paged.models.layers.decoder_config import decoder_config, layer_windows, read_head_dim
from paged.models.layers.rope_config import ropes_by_kind
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import WeightSlots

_SIZES = ("head_dim", "num_key_value_heads")


class Gemma4Layer(DecoderLayer):
    """What leaves the layer, the residual stream and all, is multiplied by a number of its own."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.layer_scalar = empty_parameter(1)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, residual = super().forward(hidden, residual, positions, metadata)
        assert residual is not None
        return residual.add_(hidden).mul_(self.layer_scalar), None

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {**super().weight_slots(prefix), f"{prefix}.layer_scalar": self.layer_scalar}


class Gemma4(Llama):
    """Layers that see everything have heads of a size of their own, and values that are their keys."""

    model_type = "gemma4_text"
    layer_class = Gemma4Layer

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        windows = layer_windows(hf, hf.integer("sliding_window", 512), lambda layer: (layer + 1) % 6 != 0)
        if hf.section("rope_parameters") is None:
            raise CheckpointError(f"{hf.source}: rope_parameters is missing, expected those of both kinds of layers")
        whole, local = ropes_by_kind(hf, 1e6, 1e4)
        k_eq_v = hf.flag("attention_k_eq_v")
        layers = [_layer(hf, index, sees_all=window is None, k_eq_v=k_eq_v) for index, window in enumerate(windows)]
        return decoder_config(
            hf,
            **gemma_fields(hf) | {"softmax_scale": 1.0, "zero_centred": False},
            window=windows,
            rope=tuple(whole if window is None else local for window in windows),
            head_dim=tuple(read_head_dim(layer) for layer in layers),
            num_kv_heads=tuple(layer.integer("num_key_value_heads") for layer in layers),
            k_eq_v=tuple(k_eq_v and window is None for window in windows),
            qk_norm="head",
            v_norm=True,
        )


def _layer(hf: HfConfig, index: int, *, sees_all: bool, k_eq_v: bool) -> HfConfig:
    """Head sizes of a layer: by `per_layer_config`, as transformers writes it, else by what is said of all that see
    everything.

    Raises:
        UnsupportedError: something else is said of the layer.
    """
    heads = hf.integer("num_global_key_value_heads", hf.integer("num_key_value_heads"))
    everywhere = hf.integer("global_head_dim", 512), heads
    overrides = hf.section("per_layer_config")
    if overrides is None:
        own = dict(zip(_SIZES, everywhere if k_eq_v else everywhere[:1], strict=False)) if sees_all else {}
    else:
        section = overrides.section(str(index))
        own = dict(section.values) if section is not None else {}
    if unknown := own.keys() - set(_SIZES):
        raise UnsupportedError(f"{hf.source}: per_layer_config: {shown(min(unknown))}, known are {', '.join(_SIZES)}")
    return HfConfig({**hf.values, **own}, hf.source)
