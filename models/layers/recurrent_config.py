"""Sizes and options of layers that keep a state of fixed size for each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Shape of a layer's state; the subclass tells the kind of layer.

    Attributes:
        conv_width: number of tokens that the convolution reads, the current one included.
        num_heads, head_dim: heads of values; 0 for a convolution alone.
        num_key_heads, key_dim: heads of keys and queries; several value heads share one.
        decays_channels, rank: as in `RecurrentSpec`.
        shifts_mlp: whether the layer's MLP also has rows of such a convolution.
    """

    conv_width: int
    num_heads: int = 0
    head_dim: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    decays_channels: bool = False
    rank: int = 1
    shifts_mlp: bool = False

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
        """Return relative sizes of the parts of the tensor of this name; ranks split each part evenly."""
        is_mixed = name in ("conv1d", "in_proj_qkv")
        return (self.key_size, self.key_size, self.value_size) if is_mixed else (self.num_heads,)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(RecurrentConfig):
    """A gated delta net (Yang et al., 2024).

    Attributes:
        by_head: whether a checkpoint stores all parts of a key head together: q, k, v and z in one tensor, b and a in
            another. Otherwise each part of all heads is contiguous.
        splits_qkv, splits_conv: whether a checkpoint stores the projections of q, k and v, and their convolutions, as
            three tensors.
        beta_scale: as in `gated_delta_rule`.
        eps: eps of the gated norm.
        gate: activation of the gate, "silu" or "sigmoid".
    """

    by_head: bool = False
    splits_qkv: bool = False
    splits_conv: bool = False
    beta_scale: float = 1.0
    eps: float
    gate: str = "silu"


@dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig(RecurrentConfig):
    """Kimi delta attention (Moonshot AI, 2025): a gated delta net with a decay for each channel of a key.

    Attributes:
        lower_bound: as in `gated_delta_rule`.
        decay_rank, gate_rank: inner size of the two projections that make the decay and the output gate; None for one
            projection.
        eps: eps of the gated norm.
        splits_conv: whether a checkpoint stores the convolutions of q, k and v as three tensors.
        wide_rates: whether a checkpoint stores the decay rates of heads as [1, 1, num_heads, 1].
    """

    decays_channels: bool = True
    lower_bound: float | None
    decay_rank: int | None
    gate_rank: int | None
    eps: float
    splits_conv: bool = True
    wide_rates: bool = False


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(RecurrentConfig):
    """Mamba-2 (Dao and Gu, 2024); its groups are the key heads.

    Attributes:
        conv_bias, bias: whether the convolution and the projections have biases.
        dt_limits: as in `mamba2_scan`.
        eps: eps of the gated norm over each group; None for a gate without a norm.
        norm_first: whether the gate follows the norm.
        in_factors: factors for z, x, B, C and dt.
        beside_attention: factors for attention in the same layer: for its input, for its output, and for the output of
            Mamba-2. 1 without attention.
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
        size: number of channels.
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


@dataclass(frozen=True, kw_only=True)
class Rwkv7Config(RecurrentConfig):
    """Time mixing of RWKV-7 (Peng et al., 2025), whose input is shifted by a token.

    Attributes:
        size: hidden size; each channel is shifted.
        is_first: whether it is the first layer. Values of later layers are mixed with the first layer's.
        has_pre_norm: whether embeddings are normalised before the first layer.
        decay_rank, erase_rank, value_rank, gate_rank: inner sizes of the pairs of projections that make the decay, the
            rate of erasing, the share of the first layer's values, and the gate.
        eps: eps of the norm of each head's output.
        divides_by_sum: whether keys are divided by sqrt(sum of squares + 1e-6); otherwise by their norm, at least
            1e-12.
        stacks_shifts: whether a checkpoint stores the weights of all shifts as one tensor.
    """

    conv_width: int = 2
    decays_channels: bool = True
    rank: int = 2
    shifts_mlp: bool = True
    size: int
    is_first: bool
    has_pre_norm: bool
    decay_rank: int
    erase_rank: int
    value_rank: int
    gate_rank: int
    eps: float
    divides_by_sum: bool
    stacks_shifts: bool = False

    @property
    def channels(self) -> int:
        return self.size


# Numbers of a hash that a checkpoint may store beside its tables.
HASH_NUMBERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


@dataclass(frozen=True, kw_only=True)
class HashedTables:
    """Tables of n-grams. For each n from 2 to `order`, several heads hash the last n tokens to a row of their table.

    Attributes:
        order: largest n.
        size: elements of a token's rows of all heads.
        table_sizes: rows that each head's hash may name; the heads of n = 2 come first.
        multipliers: factors of the hash for a token, the token before it, and so on.
        num_rows: rows of all tables in one tensor.
    """

    order: int
    size: int
    table_sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    num_rows: int

    @property
    def head_size(self) -> int:
        """Elements of a row."""
        return self.size // len(self.table_sizes)

    @property
    def num_table_elements(self) -> int:
        """Elements of all tables."""
        return self.num_rows * self.head_size

    @property
    def table_offsets(self) -> tuple[int, ...]:
        """First row of each head's table."""
        return tuple(accumulate(self.table_sizes[:-1], initial=0))


@dataclass(frozen=True, kw_only=True)
class NgramConfig(HashedTables):
    """Features of a token and those before it: the per-layer embedding of Qwen4-Exp (Qwen, 2026).

    Attributes:
        conv_width: taps of the causal convolution, which are `order` tokens apart.
        num_parts: parts of the tables' tensor in a checkpoint; 0 if it is whole.
        separator: token that ends a text. Tokens before it do not count, and it stands for missing tokens.
        stored_hash: those of `HASH_NUMBERS` that a checkpoint stores; they must equal the numbers given here.
    """

    conv_width: int
    num_parts: int
    separator: int
    stored_hash: tuple[str, ...] = ()

    @property
    def span(self) -> int:
        """Tokens from the convolution's first tap to its last."""
        return (self.conv_width - 1) * self.order + 1


@dataclass(frozen=True, kw_only=True)
class EngramConfig(HashedTables):
    """Features of a token and those before it, hashed by what their texts have in common: Engram (DeepSeek-AI, 2026).

    Attributes:
        num_ids: number of ids that the tokens have in the hash, see `shared_ids`.
        pad_token_id: token that stands for missing tokens.
    """

    num_ids: int
    pad_token_id: int
