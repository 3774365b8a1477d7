"""Options of attention that a few families have. Each is an object, so `Attention.forward` stays plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from paged.kernels.core.operation import Bound
from paged.kernels.layers.rms_norm import rms_norm
from paged.kernels.layers.rotary_embedding import rotary_embedding
from paged.models.layers.attention_config import AttentionConfig
from paged.models.layers.config import DecoderConfig
from paged.models.layers.modules import Linear, RmsNorm, empty_parameter
from paged.models.layers.rope import RopeConfig, rope_axes
from paged.models.loading.weights import Destinations
from paged.step.metadata import EmbeddedRows

# Queries [T, Hq, D], keys [T, Hkv, D], values [T, Hkv, Dv] and the rotary table [positions, rotated].
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class HeadsOption(nn.Module):
    """A change of queries, keys, values or the rotary table before they are rotated and written."""

    def make_constants(self, device: torch.device) -> None:
        """Make constants on the device."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor
    ) -> Heads:
        """Return the changed `Heads`. positions: each token's row in `rotation`, [T]."""
        raise NotImplementedError

    def destinations(self, prefix: str) -> Destinations:
        """Return the option's tensors in a checkpoint, by name. prefix: name of the attention module."""
        return {}


class WidthNorm(HeadsOption):
    """RMS norms of queries and of keys over all heads together, on all ranks (OLMo 2, 2024).

    mean_of_ranks: averages a tensor over ranks in place, if every rank has as many heads; None on one rank.
    """

    mean_of_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        layer = config.attention[index]
        self.eps = config.norms.eps
        self.q_norm = RmsNorm(layer.num_heads * layer.head_dim, config.norms)
        self.k_norm = RmsNorm(layer.num_kv_heads * layer.head_dim, config.norms)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor
    ) -> Heads:
        wide_q, wide_k = q.flatten(1), k.flatten(1)  # [T, Hq * D], [T, Hkv * D]
        if self.mean_of_ranks is None:
            wide_q, _ = self.q_norm(wide_q)
            wide_k, _ = self.k_norm(wide_k)
        else:
            squares = [x.float().square().mean(-1, keepdim=True) for x in (wide_q, wide_k)]
            q_mean, k_mean = self.mean_of_ranks(torch.stack(squares))  # one all-reduce
            wide_q = self._scaled(wide_q, q_mean, self.q_norm.weight)
            wide_k = self._scaled(wide_k, k_mean, self.k_norm.weight)
        return wide_q.view(q.shape), wide_k.view(k.shape), v, rotation

    def _scaled(self, x: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of x [T, width] with its mean square [T, 1]."""
        return (x.float() * (mean + self.eps).rsqrt() * weight).to(x.dtype)

    def destinations(self, prefix: str) -> Destinations:
        return self.q_norm.destinations(f"{prefix}.q_norm") | self.k_norm.destinations(f"{prefix}.k_norm")


class HeadLayerNorm(HeadsOption):
    """Layer norms of query and of key heads, with weights for each head (Command R+, 2024)."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        layer = config.attention[index]
        self.eps = config.norms.eps
        self.q_weight = empty_parameter(layer.num_heads, layer.head_dim)
        self.k_weight = empty_parameter(layer.num_kv_heads, layer.head_dim)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor
    ) -> Heads:
        return self._normed(q, self.q_weight), self._normed(k, self.k_weight), v, rotation

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the norm of heads [T, H, D] with weights [H, D]."""
        normed = functional.layer_norm(heads.float(), heads.shape[-1:], eps=self.eps)
        return (normed * weight).to(heads.dtype)

    def destinations(self, prefix: str) -> Destinations:
        return {f"{prefix}.q_norm.weight": self.q_weight, f"{prefix}.k_norm.weight": self.k_weight}


class ValueScale(HeadsOption):
    """A factor for values (MiMo-V2, 2025)."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.factor = config.attention[index].value_scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor
    ) -> Heads:
        return q, k, v * self.factor, rotation


class ValueNorm(HeadsOption):
    """An RMS norm of each value head, without weights (Gemma 4, 2026)."""

    weight: torch.Tensor

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.size, self.eps = config.attention[index].v_head_dim, config.norms.eps
        self.rms_norm = Bound(rms_norm)

    def make_constants(self, device: torch.device) -> None:
        self.weight = torch.ones(self.size, device=device)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor
    ) -> Heads:
        return q, k, self.rms_norm(v, self.weight, self.eps), rotation


class RotateFirst(HeadsOption):
    """The rotation, placed before the norms of heads (Hunyuan, 2025). It returns a table that rotates nothing."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = layer = config.attention[index]
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.rotary_embedding = Bound(rotary_embedding, by=1)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor
    ) -> Heads:
        self.rotary_embedding(positions, q, k, rotation, interleaved=self.interleaved)  # in place
        return q, k, v, rotation[:, :0]


def heads_options(config: DecoderConfig, index: int) -> list[HeadsOption]:
    """Return the options of a layer, in the order in which they apply."""
    layer = config.attention[index]
    options: list[HeadsOption] = []
    if layer.qk_norm == "width":
        options.append(WidthNorm(config, index))
    if layer.qk_norm == "layer":
        options.append(HeadLayerNorm(config, index))
    if layer.value_scale != 1:
        options.append(ValueScale(config, index))
    if layer.v_norm:
        options.append(ValueNorm(config, index))
    if layer.norm_after_rope:
        options.append(RotateFirst(config, index))
    return options


class HeadGate(Linear):
    """The projection of a layer's input to a gate for each head's output."""

    def __init__(self, hidden_size: int, layer: AttentionConfig) -> None:
        super().__init__(hidden_size, {"g_proj": layer.num_heads * layer.head_gate_size})
        self.num_heads, self.activation = layer.num_heads, layer.head_gate

    def heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the factors for the heads' outputs, [T, Hq, head_gate_size]."""
        gate: torch.Tensor = self(hidden).unflatten(-1, (self.num_heads, -1))
        if self.activation == "softplus":
            factors = functional.softplus(gate.float())
        else:
            factors = gate.float().sigmoid()
        return factors.to(hidden.dtype)


class LogPositionGrowth(nn.Module):
    """Learned growth of query heads with the position p: factor scale ln(p + 1) + bias (Mistral Large 4, 2026)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.scale, self.bias = empty_parameter(num_heads), empty_parameter(num_heads)

    def forward(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return queries times their factors. q: [R, H, D]. positions: [R]."""
        logarithms = (positions + 1).float().log()[:, None]  # [R, 1]
        factors = logarithms * self.scale.float() + self.bias.float()  # [R, H]
        return (q * factors[..., None]).to(q.dtype)

    def destinations(self, prefix: str) -> Destinations:
        return {f"{prefix}.scale": self.scale, f"{prefix}.bias": self.bias}


class AxesRotation:
    """Rotation by several positions of a token: its time, row and column in a picture (Qwen2-VL, 2024)."""

    def __init__(self, rope: RopeConfig, table: torch.Tensor) -> None:
        """table: the layer's rotary table, float32 [positions, rotated]."""
        self._axes, self._table = rope_axes(rope).to(table.device), table

    def of_step(self, embeds: EmbeddedRows, rope_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of each token, [T, rotated], and each token's row in them, [T].

        The first layer with this table computes them and keeps them in `embeds` for the other layers.

        rope_positions: int64 [3, T].
        """
        key = id(self._table)
        if key not in embeds.rotations:
            device = rope_positions.device
            columns = torch.arange(len(self._axes), device=device)
            rows = torch.arange(rope_positions.shape[1], device=device)
            rotation = self._table[rope_positions[self._axes].T, columns].contiguous()
            embeds.rotations[key] = rotation, rows
        return embeds.rotations[key]
