"""Sizes and options of layers that keep a state of fixed size for each sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Shape of a layer's state; its class tells the kind of layer.

    Attributes:
        conv_width: tokens that the convolution reads, its own included.
        num_heads, head_dim: heads of values; 0 for a convolution alone.
        num_key_heads, key_dim: heads of keys and queries, which value heads share in groups.
    """

    conv_width: int
    num_heads: int = 0
    head_dim: int = 0
    num_key_heads: int = 0
    key_dim: int = 0

    @property
    def value_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return self.value_size + 2 * self.key_size

    def parts(self, name: str) -> tuple[int, ...]:
        """Return the sizes, up to a common factor, of what ranks split evenly in a tensor of this name."""
        is_mixed = name in ("conv1d", "in_proj_qkv")
        return (self.key_size, self.key_size, self.value_size) if is_mixed else (self.num_heads,)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(RecurrentConfig):
    """A gated delta net (Yang et al., 2024).

    Attributes:
        by_head: whether a checkpoint stores all parts of a key head together: q, k, v and z in one tensor, b and a in
            another; else each part is whole.
        splits_qkv, splits_conv: whether it stores the projections of q, k and v, and their convolutions, as three
            tensors.
        beta_scale: as in `gated_delta_rule`.
        eps: of the gated norm.
        gate: activation of the gate, "silu" or "sigmoid".
    """

    by_head: bool = False
    splits_qkv: bool = False
    splits_conv: bool = False
    beta_scale: float = 1.0
    eps: float
    gate: str = "silu"


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """Mamba-2 (Dao and Gu, 2024); its groups are the key heads.

    Attributes:
        conv_bias, bias: whether the convolution and the projections have biases.
        dt_limits: as in `mamba2_scan`.
        eps: of the gated norm over each group; None for a gate alone.
        norm_first: whether the gate follows the norm.
        in_factors: factors for z, x, B, C and dt.
        beside_attention: with attention beside it, factors for attention's input and output, and for the output.
    """

    conv_bias: bool
    bias: bool
    dt_limits: tuple[float, float] | None
    eps: float | None
    norm_first: bool = False
    in_factors: tuple[float, ...] = (1.0,) * 5
    beside_attention: tuple[float, ...] = (1.0,) * 3

    def parts(self, name: str) -> tuple[int, ...]:
        mixed = self.value_size, self.key_size, self.key_size
        return {"conv1d": mixed, "in_proj": (self.value_size, *mixed, self.num_heads)}.get(name, (self.num_heads,))


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(RecurrentConfig):
    """A gated convolution alone, as in LFM2 (Liquid AI, 2025).

    Attributes:
        size: channels.
        bias: whether convolution and projections have biases.
    """

    size: int
    bias: bool

    @property
    def channels(self) -> int:
        return self.size

    def parts(self, name: str) -> tuple[int, ...]:
        if name == "in_proj":
            return (self.size,) * 3
        return (self.size,)
