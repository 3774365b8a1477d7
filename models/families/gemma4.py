"""Gemma 4 (Gemma Team, 2026), text only.

It has two head sizes, layers that read other layers' keys and values, experts beside the MLP, and a separate input for
each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from paged.errors import CheckpointError
from paged.kernels.core.operation import Bound
from paged.kernels.layers.silu_and_mul import silu_and_mul
from paged.models.families.decoder_layer import DecoderLayer, rows_of
from paged.models.families.dense import gemma_fields
from paged.models.families.network import Network
from paged.models.layers.config import DecoderConfig, MoeConfig
from paged.models.layers.decoder_config import (
    by_window,
    decoder_config,
    for_kind,
    layer_windows,
    moe_config,
    own_values,
    read_head_dim,
)
from paged.models.layers.modules import Linear, RmsNorm, empty_parameter, stream_norm
from paged.models.layers.rope import ropes_by_window
from paged.models.layers.sparse_moe import SparseMoe
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import Destinations, join_destinations
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.step.metadata import AttentionMetadata, OutputRows

_SIZES = ("head_dim", "num_key_value_heads")


class _Experts(nn.Module):
    """Experts beside the MLP that read the residual stream; the experts and their router each have their own norm."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = SparseMoe(config, moe)
        self.before_router, self.before_experts = stream_norm(config), stream_norm(config)
        self.after_mlp, self.after_experts = stream_norm(config), stream_norm(config)
        self.router_scale = config.hidden_size**-0.5

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return the sum of `hidden`, the MLP's output, and the experts' output, all [R, hidden_size]."""
        routed_by = self.before_router(residual)[0].mul_(self.router_scale)
        routed = ranks.sum(self.moe(self.before_experts(residual)[0], routed_by=routed_by))
        out: torch.Tensor = self.after_mlp(hidden)[0]
        return out.add_(self.after_experts(routed)[0])

    def destinations(self, prefix: str) -> Destinations:
        return {
            **self.moe.destinations(prefix),
            f"{prefix}.router.scale": self.before_router.weight,
            **self.before_experts.destinations(f"{prefix}.pre_feedforward_layernorm_2"),
            **self.after_mlp.destinations(f"{prefix}.post_feedforward_layernorm_1"),
            **self.after_experts.destinations(f"{prefix}.post_feedforward_layernorm_2"),
        }


class _OwnInput(nn.Module):
    """A layer's separate input: gated by the residual stream, projected and normalised."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation, size = config.activation, config.layer_input_size
        self.gate = Linear(config.hidden_size, {"per_layer_input_gate": size})
        self.projection = Linear(size, {"per_layer_projection": config.hidden_size})
        self.norm, self.silu_and_mul = stream_norm(config), Bound(silu_and_mul)

    def forward(self, residual: torch.Tensor, layer_input: torch.Tensor) -> torch.Tensor:
        """Return the addend to the residual stream, [R, hidden_size]. layer_input: [R, layer_input_size]."""
        gate = self.gate(residual)  # [R, layer_input_size]
        gated = self.silu_and_mul(torch.cat((gate, layer_input), -1), activation=self.activation)
        normed: torch.Tensor = self.norm(self.projection(gated))[0]
        return normed

    def destinations(self, prefix: str) -> Destinations:
        norm = self.norm.destinations(f"{prefix}.post_per_layer_input_norm")
        return self.gate.destinations(prefix) | self.projection.destinations(prefix) | norm


class Gemma4Layer(DecoderLayer):
    """A layer that multiplies its complete output, residual stream included, by a factor."""

    experts: _Experts | None

    def __init__(self, config: DecoderConfig, index: int) -> None:
        moe = config.moe[index]
        super().__init__(replace(config, moe=(None,) * config.num_layers), index)  # experts run beside the MLP
        self.layer_scalar = empty_parameter(1)
        if moe is not None:
            self.experts = _Experts(config, moe)
        self.own_input: _OwnInput | None = None
        if config.layer_input_size:
            self.own_input = _OwnInput(config)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
        layer_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """layer_input: this layer's separate input, [num_tokens, layer_input_size]."""
        hidden, residual = super().forward(hidden, residual, positions, metadata, outputs)
        assert residual is not None
        residual.add_(hidden)
        if self.own_input is not None and layer_input is not None:
            residual.add_(self.own_input(residual, rows_of(layer_input, outputs)))
        return residual.mul_(self.layer_scalar), None

    @staticmethod
    def num_sums(config: DecoderConfig, index: int) -> int:
        return 2 if config.moe[index] is None else 3

    def destinations(self, prefix: str) -> Destinations:
        parts = join_destinations(prefix, self.experts, self.own_input, layer_scalar=self.layer_scalar)
        return super().destinations(prefix) | parts


class _LayerInputs(nn.Module):
    """The separate inputs of all layers: an embedding of the token plus a projection of its hidden state."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.size, width = config.layer_input_size, config.num_layers * config.layer_input_size
        self.embedding = empty_parameter(config.layer_input_vocab_size, width)
        self.projection = Linear(config.hidden_size, {"per_layer_model_projection": width})
        self.projection_scale = config.hidden_size**-0.5
        self.norm = RmsNorm(self.size, config.norms)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, num_layers, layer_input_size]."""
        looked_up = functional.embedding(input_ids, self.embedding).mul_(self.size**0.5)
        projected = self.projection(hidden).mul_(self.projection_scale).unflatten(-1, (-1, self.size))
        both: torch.Tensor = self.norm(projected)[0].add_(looked_up.view(projected.shape))
        return both.mul_(2**-0.5)

    def destinations(self, prefix: str) -> Destinations:
        return {
            f"{prefix}.embed_tokens_per_layer.weight": self.embedding,
            **self.projection.destinations(prefix),
            **self.norm.destinations(f"{prefix}.per_layer_projection_norm"),
        }


class Gemma4(Network):
    """Layers without a window have another head size, and may use their keys as values."""

    model_type = "gemma4_text"
    layer_class = Gemma4Layer

    def __init__(self, config: DecoderConfig, share: Share | None = None) -> None:
        super().__init__(config, share)
        self.own_inputs = _LayerInputs(config) if config.layer_input_size else None

    def layer_inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        if self.own_inputs is None:
            return super().layer_inputs(input_ids, hidden)
        inputs = self.own_inputs(self.embedded_ids(input_ids), hidden)  # [num_tokens, num_layers, layer_input_size]
        return [(layer_input,) for layer_input in inputs.unbind(1)]

    def destinations(self) -> Destinations:
        return super().destinations() | join_destinations("model", self.own_inputs)

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.choice("use_bidirectional_attention", "vision")  # acts inside a picture, and text has none
        windows = layer_windows(hf, hf.integer("sliding_window"), lambda layer: (layer + 1) % 6 != 0)
        windows = (*windows[:-1], None)  # transformers gives the last layer no window, whatever its type
        ropes = ropes_by_window(hf, hf.number("rope_theta"))
        k_eq_v = hf.flag("attention_k_eq_v")
        head_dims: list[int] = []
        num_kv_heads: list[int] = []
        for index, window in enumerate(windows):
            layer = _layer(hf, index, sees_all=window is None, k_eq_v=k_eq_v)
            head_dims.append(read_head_dim(layer))
            num_kv_heads.append(layer.integer("num_key_value_heads"))
        sources = _sources(hf, windows)
        size = widened = hf.integer("intermediate_size")
        if hf.flag("use_double_wide_mlp"):
            widened = 2 * size
        input_size, vocab_size = hf.integer("hidden_size_per_layer_input", minimum=0), hf.integer("vocab_size")
        input_vocab_size = hf.integer("vocab_size_per_layer_input")
        if input_size and input_vocab_size < vocab_size:
            raise CheckpointError(
                f"{hf.source}: vocab_size_per_layer_input {input_vocab_size}, expected at least {vocab_size}"
            )
        moe = None
        if hf.flag("enable_moe_block"):
            moe = moe_config(
                hf,
                size_key="moe_intermediate_size",
                top_k_key="top_k_experts",
                renormalize=True,
                router_name="router.proj",
                expert_scale="router.per_expert_scale",
            )
        return decoder_config(
            hf,
            **gemma_fields(hf),
            softmax_scale=1.0,
            layer_input_size=input_size,
            layer_input_vocab_size=input_vocab_size,
            window=windows,
            rope=by_window(windows, *ropes),
            head_dim=tuple(head_dims),
            num_kv_heads=tuple(num_kv_heads),
            shares_kv_with=sources,
            intermediate_size=for_kind(sources, None, size, otherwise=widened),
            moe=moe,
            k_eq_v=by_window(windows, k_eq_v, windowed=False),
            qk_norm="head",
            v_norm=True,
        )


def _sources(hf: HfConfig, windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return for each layer the layer whose keys and values it reads, or None if it has its own.

    Each of the last `num_kv_shared_layers` reads the last layer before them with the same window.

    Raises:
        CheckpointError: there is no layer to read.
    """
    first = len(windows) - hf.integer("num_kv_shared_layers", 0, minimum=0, maximum=len(windows) - 1)
    latest: dict[int | None, int] = {}
    for layer, window in enumerate(windows[:first]):
        latest[window] = layer
    sources: list[int | None] = [None] * first
    for layer, window in enumerate(windows[first:], first):
        if window not in latest:
            raise CheckpointError(
                f"{hf.source}: no layer has keys and values for layer {layer}, one of the last num_kv_shared_layers, "
                "which read another layer's"
            )
        sources.append(latest[window])
    return tuple(sources)


def _layer(hf: HfConfig, index: int, *, sees_all: bool, k_eq_v: bool) -> HfConfig:
    """Return a layer's head sizes, from transformers' `per_layer_config` or from the fields of global layers.

    Raises:
        UnsupportedError: per_layer_config sets another value.
    """
    heads = hf.integer("num_global_key_value_heads", hf.integer("num_key_value_heads"))
    head_dim = hf.integer("global_head_dim")
    sizes = own_values(hf, index, _SIZES)
    if hf.value("per_layer_config") is None and sees_all:
        sizes["head_dim"] = head_dim
        if k_eq_v:
            sizes["num_key_value_heads"] = heads
    return hf.overridden(sizes)
