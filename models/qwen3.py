"""Qwen3 (Yang et al., 2025): Llama with an RMS norm on every query and key head, and windows in some layers."""

from __future__ import annotations

from paged.errors import CheckpointError, UnsupportedError
from paged.models.decoder_config import DecoderConfig, decoder_config
from paged.models.hf_config import HfConfig
from paged.models.llama import Llama


class Qwen3(Llama):
    """Llama with q/k norm; `layer_types` or `max_window_layers` say which layers have a sliding window."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        return decoder_config(hf, windows=_windows(hf), qk_norm=True)


def _windows(hf: HfConfig) -> tuple[int | None, ...]:
    num_layers = hf.integer("num_hidden_layers")
    window = hf.integer("sliding_window", 4096) if hf.flag("use_sliding_window") else None
    kinds = hf.items("layer_types", str)
    if not kinds:
        first = hf.integer("max_window_layers", 28) if window else num_layers
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise CheckpointError(f"{hf.source}: {len(kinds)} layer_types for {num_layers} layers")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(f"{hf.source}: layer type {min(unknown)!r}, known are full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
