"""A decoder layer: attention or a recurrent part, and an MLP or experts, on the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn

from paged.cache.manager import PagedKvCacheManager
from paged.models.layers.attention import Attention, SharedKvAttention
from paged.models.layers.compressed_attention import CompressedAttention
from paged.models.layers.config import DecoderConfig
from paged.models.layers.kimi_delta import KimiDelta
from paged.models.layers.latent_attention import LatentAttention
from paged.models.layers.modules import GatedMlp, Linear, PlainMlp, RmsNorm, stream_norm
from paged.models.layers.recurrent import GatedDeltaNet, Mamba2, RecurrentLayer, ShortConv
from paged.models.layers.recurrent_config import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    Mamba2Config,
    Rwkv7Config,
    ShortConvConfig,
)
from paged.models.layers.rwkv7 import Rwkv7TimeMix
from paged.models.layers.shared_entries import SharedEntriesAttention
from paged.models.layers.sparse_moe import SparseMoe
from paged.models.loading.weights import Destinations, join_destinations
from paged.models.parallel.ranks import Ranks
from paged.step.metadata import AttentionMetadata, OutputRows

_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")
_RECURRENT_LAYERS: Mapping[type, Callable[..., RecurrentLayer]] = {
    GatedDeltaConfig: GatedDeltaNet,
    KimiDeltaConfig: KimiDelta,
    Mamba2Config: Mamba2,
    Rwkv7Config: Rwkv7TimeMix,
    ShortConvConfig: ShortConv,
}


class DecoderLayer(nn.Module):
    """Attention or a recurrent part, and an MLP, on one residual stream, with the norms that the configuration names.

    A layer may lack either part, and then has no norms for it.

    Attributes:
        ranks: processes that each hold a share of both parts; their results are summed.
        experts: experts beside the MLP, which read the residual stream, as in Gemma 4; None for no such experts.
    """

    ranks = Ranks()
    attention_class: type[Attention] = Attention
    latent_class: type[LatentAttention] = LatentAttention
    compressed_class: type[CompressedAttention] = CompressedAttention
    mlp_class: type[PlainMlp] = PlainMlp
    experts: nn.Module | None
    before_attention: RmsNorm | None
    after_attention: RmsNorm | None
    before_mlp: RmsNorm | None
    after_mlp: RmsNorm | None

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.residual_scale, self.mlp_name = config.residual_scale, config.mlp_name
        self.recurrent_name = config.recurrent_name
        self.self_attn: Attention | CompressedAttention | LatentAttention | None = None
        if config.attends[index]:
            self.self_attn = self._attention(config, index)
        self.linear_attn: RecurrentLayer | None = None
        recurrent = config.recurrent[index]
        if recurrent is not None:
            self.linear_attn = _RECURRENT_LAYERS[type(recurrent)](config, recurrent)
        moe, size = config.moe[index], config.intermediate_size[index]
        self.has_mlp = moe is not None or size > 0
        self.experts = None
        if moe is not None:
            self.add_module(self.mlp_name, SparseMoe(config, moe))
        elif size > 0:
            mlp = GatedMlp if config.gated else self.mlp_class
            self.add_module(self.mlp_name, mlp(config, size))
        # Name of a norm in this class -> its name in checkpoints; None for a norm that the layer lacks.
        self.norm_names: dict[str, str | None] = dict.fromkeys(_NORMS)
        if config.attends[index] or recurrent is not None:
            self.norm_names["before_attention"] = config.norms.before_attention
            self.norm_names["after_attention"] = config.norms.after_attention
        if self.has_mlp:
            self.norm_names["before_mlp"] = config.norms.before_mlp
            self.norm_names["after_mlp"] = config.norms.after_mlp
        for attribute, name in self.norm_names.items():
            norm = None
            if name is not None:
                norm = stream_norm(config)
            setattr(self, attribute, norm)

    def _attention(self, config: DecoderConfig, index: int) -> Attention | CompressedAttention | LatentAttention:
        layer = config.attention[index]
        if layer.latent is not None:
            return self.latent_class(config, index)
        if layer.compressed is not None:
            if layer.compressed.sharing is not None:
                return SharedEntriesAttention(config, index)
            return self.compressed_class(config, index)
        if layer.shares_kv_with is not None:
            return SharedKvAttention(config, index)
        return self.attention_class(config, index)

    @property
    def ffn(self) -> GatedMlp | SparseMoe:
        """The MLP or experts; the attribute has their checkpoint name, so that adapters find it."""
        return cast("GatedMlp | SparseMoe", getattr(self, self.mlp_name))

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer on (hidden, residual) and return both; hidden is not yet added to the residual stream.

        Both are [T, hidden_size]. If residual is None, hidden is the residual stream. With `outputs`, only their rows
        are returned.
        """
        # Attention, or the recurrent part.
        attention, norm = self.self_attn, self.before_attention  # local: looking up a module takes 0.7 us
        if attention is not None or self.linear_attn is not None:
            if norm is None:
                hidden, residual = _enter_without_norm(hidden, residual)
            else:
                hidden, residual = norm(hidden, residual)
            if self.linear_attn is None and attention is not None:
                hidden = attention(hidden, positions, metadata, outputs)
            else:
                hidden = self.attend(hidden, positions, metadata, outputs)
            if self.ranks.size > 1:
                hidden = self.ranks.sum(hidden)
            if self.after_attention is not None:
                hidden, _ = self.after_attention(hidden)
            if self.residual_scale != 1:
                hidden = hidden.mul_(self.residual_scale)
        elif outputs is not None:
            hidden = hidden[outputs.rows]
        lora = metadata.lora
        if outputs is not None:
            lora = outputs.lora
            if residual is not None:
                residual = residual[outputs.rows]
        if not self.has_mlp:
            return hidden, residual

        # The MLP, or experts.
        norm = self.before_mlp
        if norm is None:
            hidden, residual = _enter_without_norm(hidden, residual)
        else:
            hidden, residual = norm(hidden, residual)
        hidden = getattr(self, self.mlp_name)(hidden, lora)
        if self.ranks.size > 1:
            hidden = self.ranks.sum(hidden)
        if self.experts is not None:
            hidden = self.experts(hidden, residual, self.ranks)
        if self.after_mlp is not None:
            hidden, _ = self.after_mlp(hidden)
        if self.residual_scale != 1:
            hidden = hidden.mul_(self.residual_scale)
        return hidden, residual

    def attend(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        outputs: OutputRows | None,
    ) -> torch.Tensor:
        """Return the output of attention, or of the recurrent part if the layer has one, for normalised `hidden`."""
        if self.linear_attn is not None:
            return cast(torch.Tensor, self.linear_attn(hidden, metadata, outputs))
        assert self.self_attn is not None
        return cast(torch.Tensor, self.self_attn(hidden, positions, metadata, outputs))

    @property
    def has_invariant_rows(self) -> bool:
        """See `Network.has_invariant_rows`."""
        attention = self.self_attn
        if type(self).forward is not DecoderLayer.forward or self.experts is not None or not self.has_mlp:
            return False
        if type(attention) is not Attention or not self.ffn.has_invariant_rows:
            return False
        if attention.options or attention.gate_proj is not None or attention.config.output_gate:
            return False
        if attention.indexer is not None:
            return False
        return all(module.has_invariant_rows for module in self.modules() if isinstance(module, Linear))

    @staticmethod
    def stream(hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return a copy of the residual stream, from what `forward` takes and returns."""
        return hidden.clone() if residual is None else hidden + residual

    def set_states(self, kv_manager: PagedKvCacheManager, index: int, num_layers: int) -> None:
        """Give the recurrent part its slots in the cache. index: of the layer among num_layers."""
        if self.linear_attn is not None:
            self.linear_attn.set_state(kv_manager.state(index))

    @staticmethod
    def num_sums(config: DecoderConfig, index: int) -> int:
        """Return the number of all-reduces in a layer."""
        mixes = config.attends[index] or config.recurrent[index] is not None
        return mixes + (config.moe[index] is not None or config.intermediate_size[index] > 0)

    def destinations(self, prefix: str) -> Destinations:
        norms: dict[str, RmsNorm] = {}
        for attribute, name in self.norm_names.items():
            if name is not None:
                norms[name] = getattr(self, attribute)
        parts = join_destinations(prefix, self_attn=self.self_attn, **norms)
        if self.has_mlp:
            parts |= self.ffn.destinations(f"{prefix}.{self.mlp_name}")
        return parts | join_destinations(prefix, **{self.recurrent_name: self.linear_attn})


def rows_of(tensor: torch.Tensor, outputs: OutputRows | None) -> torch.Tensor:
    """Return the rows of a tensor that the layer computes after its attention."""
    return tensor if outputs is None else tensor[outputs.rows]


def _enter_without_norm(hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `hidden` to the residual stream; return the input of attention or an MLP, and the stream."""
    if residual is not None:
        hidden = residual.add_(hidden)
    return hidden.clone(), hidden  # a copy: an MLP may overwrite its input
