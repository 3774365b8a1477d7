"""RWKV-7, a family without attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from paged.cache.manager import PagedKvCacheManager
from paged.errors import CheckpointError, UnsupportedError
from paged.kernels.core.errors import shown
from paged.models.families.decoder_layer import DecoderLayer, rows_of
from paged.models.families.network import Network
from paged.models.layers.config import DecoderConfig
from paged.models.layers.decoder_config import STATE_POSITIONS, count_layers, decoder_config, without_attention
from paged.models.layers.modules import PlainMlp, RmsNorm, stream_norm
from paged.models.layers.recurrent_config import Rwkv7Config
from paged.models.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from paged.models.loading.hf_config import HfConfig
from paged.models.loading.weights import Destinations, join_destinations
from paged.step.metadata import AttentionMetadata, OutputRows

# Keys of kernels, training and initialisation.
_WITHOUT_EFFECT = ("attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")


class Rwkv7Layer(DecoderLayer):
    """Time mixing and channel mixing. The first layer may normalise the embeddings before both.

    Each mixes its input with the token before. So the last layer also normalises the rows of all tokens for its MLP,
    and drops those without outputs only then.
    """

    mlp_class: type[PlainMlp] = Rwkv7ChannelMix

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.pre_norm: RmsNorm | None = None
        recurrent = cast(Rwkv7Config, config.recurrent[index])
        if recurrent.is_first and recurrent.has_pre_norm:
            self.pre_norm = stream_norm(config)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
        first_values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        time_mix, channel_mix = cast(Rwkv7TimeMix, self.linear_attn), cast(Rwkv7ChannelMix, self.ffn)
        assert metadata.recurrent is not None
        assert self.before_attention is not None
        assert self.before_mlp is not None
        if self.pre_norm is not None:
            hidden, _ = self.pre_norm(hidden)
        hidden, residual = self.before_attention(hidden, residual)
        hidden = self.ranks.sum(time_mix(hidden, metadata, None, first_values))

        hidden, residual = self.before_mlp(hidden, residual)
        hidden = rows_of(channel_mix.shifted(hidden, metadata.recurrent), outputs)
        lora = metadata.lora
        if outputs is not None:
            lora = outputs.lora
        return self.ranks.sum(channel_mix(hidden, lora)), rows_of(residual, outputs)

    def set_states(self, kv_manager: PagedKvCacheManager, index: int, num_layers: int) -> None:
        super().set_states(kv_manager, index, num_layers)
        cast(Rwkv7ChannelMix, self.ffn).shift.set_state(kv_manager.state(num_layers + index))

    def destinations(self, prefix: str) -> Destinations:
        return super().destinations(prefix) | join_destinations(prefix, pre_norm=self.pre_norm)


class Rwkv7(Network):
    """RWKV-7 (Peng et al., 2025), in the layout of flash-linear-attention.

    A published `max_position_embeddings` is that library's default, and the state sets no limit: sequences may have at
    least `STATE_POSITIONS` tokens.
    """

    model_type = "rwkv7"
    layer_class = Rwkv7Layer
    renames = {  # noqa: RUF012
        r"^model\.embeddings\.": "model.embed_tokens.",
        r"\.ffn\.key\.": ".mlp.up_proj.",
        r"\.ffn\.value\.": ".mlp.down_proj.",
        r"\.ffn\.": ".mlp.",
    }

    @classmethod
    def read_config(cls, hf: HfConfig) -> DecoderConfig:
        hf.choice("hidden_act", "sqrelu")
        for key in _WITHOUT_EFFECT:
            hf.value(key)
        if hf.value("attn") is not None:
            raise UnsupportedError(f"{hf.source}: attn = {shown(hf.value('attn'))}, expected null: no layers attend")
        hidden, eps = hf.integer("hidden_size"), hf.number("norm_eps")
        head_dim = _head_dim(hf, hidden)
        num_layers, num_heads = count_layers(hf), hidden // head_dim
        first = Rwkv7Config(
            num_heads=num_heads,
            head_dim=_value_size(hf, hidden, num_layers) // num_heads,
            num_key_heads=num_heads,
            key_dim=head_dim,
            size=hidden,
            is_first=True,
            has_pre_norm=hf.flag("norm_first", True),
            decay_rank=hf.integer("decay_low_rank_dim"),
            erase_rank=hf.integer("a_low_rank_dim"),
            value_rank=hf.integer("v_low_rank_dim"),
            gate_rank=hf.integer("gate_low_rank_dim"),
            eps=head_dim * eps,
            divides_by_sum=hf.flag("fuse_norm", True),
        )
        later = replace(first, is_first=False)
        return decoder_config(
            hf,
            **without_attention(num_heads, head_dim),
            max_position_embeddings=max(hf.integer("max_position_embeddings"), STATE_POSITIONS),
            recurrent=(first, *[later] * (num_layers - 1)),
            recurrent_name="attn",
            intermediate_size=_intermediate_size(hf, hidden),
            gated=False,
            activation="relu2",
            eps=eps,
            subtracts_mean=True,
            bias=hf.flag("norm_bias", True),
            before_attention="attn_norm",
            before_mlp="ffn_norm",
        )

    def layer_inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return memory for the first layer's values, which later layers mix with theirs."""
        layer = self.own_config.recurrent[0]
        assert layer is not None
        first_values = hidden.new_empty(len(hidden), layer.value_size)
        return [(first_values,)] * len(self.layers)


def _head_dim(hf: HfConfig, hidden: int) -> int:
    """Return the size of a head. `head_dim` decides; if it is null, `num_heads` does."""
    num_heads = hf.optional_integer("num_heads")
    if hf.values.get("head_dim", hf.defaults["head_dim"]) is not None:
        head_dim = hf.integer("head_dim")
    elif num_heads is not None:
        hf.value("head_dim")
        head_dim = max(1, hidden // num_heads)
    else:
        raise CheckpointError(f"{hf.source}: neither head_dim nor num_heads, expected one")
    if hidden % head_dim:
        raise CheckpointError(f"{hf.source}: hidden_size {hidden} is not a multiple of head_dim {head_dim}")
    return head_dim


def _value_size(hf: HfConfig, hidden: int, num_layers: int) -> int:
    """Return the elements of all values of a token, from `value_dim`: a number, or one for each layer."""
    value = hf.value("value_dim")
    sizes: list[int] = []
    if isinstance(value, list):
        sizes = hf.items("value_dim", int)
    elif value is not None:
        sizes = [hf.integer("value_dim")] * num_layers
    else:
        sizes = [hidden] * num_layers
    if len(sizes) != num_layers or any(size < hidden or size % hidden for size in sizes):
        raise CheckpointError(
            f"{hf.source}: value_dim = {shown(value)}, expected multiples of hidden_size {hidden} for {num_layers} "
            "layers"
        )
    if len(set(sizes)) > 1:
        raise UnsupportedError(f"{hf.source}: value_dim = {shown(value)}, expected the same size in all layers")
    return sizes[0]


def _intermediate_size(hf: HfConfig, hidden: int) -> int:
    """Return the size of channel mixing: as given, or `hidden_ratio` times the hidden size in multiples of 32."""
    size = hf.optional_integer("intermediate_size")
    ratio = 4.0
    if hf.value("hidden_ratio") is not None:
        ratio = hf.number("hidden_ratio")
    if size is not None:
        return size
    return 32 * -(-int(hidden * ratio) // 32)


# Name in `architectures` of config.json -> family.
RWKV = {"RWKV7ForCausalLM": Rwkv7}
