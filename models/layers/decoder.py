"""The layers decoders are made of. Each knows the checkpoint names of the parameter slices it holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from paged.kernels.attention.paged_attention import paged_attention
from paged.kernels.cache.qk_norm_rope_and_cache import qk_norm_rope_and_cache
from paged.kernels.common.torch_ops.linear import linear, pack
from paged.kernels.layers.rms_norm import fused_add_rms_norm, rms_norm
from paged.kernels.layers.silu_and_mul import silu_and_mul
from paged.kernels.lora.add_lora import add_lora
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.lora.weights import LoraWeights
from paged.metadata import AttentionMetadata
from paged.models.layers.config import DecoderConfig, NormConfig
from paged.models.loading.weights import WeightSlots

# Rows of an MLP at once on a CPU: what lies between the products of 2,048 rows comes as fresh pages in every layer,
# 120,000 faults and a tenth of the time of a prompt at 100M parameters.
_CPU_ROWS = 512


def empty_parameter(*shape: int) -> nn.Parameter:
    """Memory for a weight that is loaded, never trained."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def _in_storage_of_its_own(cache: torch.Tensor) -> torch.Tensor:
    """The same memory for compilers: a cache that is a part of a larger storage, inductor copies out of it and back
    before and after every write."""
    return from_dlpack(cache.view(torch.uint8)).view(cache.dtype)  # not every DLPack knows 8-bit floats


class Linear(nn.Module):
    """One product for several projections of the same input; `parts` maps their checkpoint names to output sizes.

    adapters: low-rank changes of it, for the rows of a batch that have some.
    """

    adapters: LoraWeights | None = None

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(parts.values())
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Output features of each part."""
        return tuple(self.parts.values())

    def forward(self, x: torch.Tensor, lora: LoraBatch | None = None) -> torch.Tensor:
        out = linear(x, self.weight, self.bias)
        return out if lora is None or self.adapters is None else add_lora(out, x, self.adapters, lora)

    def pack(self) -> None:
        """Let a CPU multiply faster, in the same memory; see `pack`."""
        self.weight = nn.Parameter(pack(self.weight), requires_grad=False)

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots: WeightSlots = {}
        start = 0
        for name, size in self.parts.items():
            slots[f"{prefix}.{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = self.bias[start : start + size]
            start += size
        return slots


class _OnePlus:
    """Takes norm weights that are stored less 1."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.shape, self.dtype = weight, weight.shape, weight.dtype

    def copy_(self, stored: torch.Tensor) -> None:
        self.weight.copy_(stored).add_(1)


class RmsNorm(nn.Module):
    """RMS norm; with a residual stream, of its sum with x.

    Weights that are stored less 1 are float32 in models of any type. 1 + weight rounded to bfloat16 moves the logits of
    a small random model by 0.4 to 0.6 %, half of what all its other roundings do; in float32 it is what transformers
    multiplies by, bit for bit.
    """

    def __init__(self, size: int, config: NormConfig) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps, self.is_zero_centred = config.eps, config.zero_centred

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, residual). With a residual both arguments are changed in place; without, x becomes it."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return fused_add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, prefix: str) -> WeightSlots:
        return {f"{prefix}.weight": _OnePlus(self.weight) if self.is_zero_centred else self.weight}


class Attention(nn.Module):
    """Grouped-query attention over a paged KV cache, whose values are the stored ones times the scales, or 1."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.config = layer = config.attention[index]
        self.eps = config.norms.eps
        self.sizes = {
            "q_proj": layer.num_heads * layer.head_dim,
            "k_proj": layer.num_kv_heads * layer.head_dim,
            "v_proj": layer.num_kv_heads * layer.head_dim,
        }
        self.qkv_proj = Linear(config.hidden_size, self.sizes, bias=layer.qkv_bias)
        self.o_proj = Linear(self.sizes["q_proj"], {"o_proj": config.hidden_size}, bias=layer.o_bias)
        self.q_norm = RmsNorm(layer.head_dim, config.norms) if layer.qk_norm else None
        self.k_norm = RmsNorm(layer.head_dim, config.norms) if layer.qk_norm else None
        self.sinks = empty_parameter(layer.num_heads) if layer.sinks else None
        # A window of W tokens is the token itself and W - 1 before it.
        self.window_size = (-1, -1) if layer.window is None else (layer.window - 1, -1)

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
        """Give the layer its cache, and the rotary table that layers of its kind share."""
        self.k_cache, self.v_cache = _in_storage_of_its_own(k_cache), _in_storage_of_its_own(v_cache)
        self.cos_sin_cache = cos_sin_cache

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        qkv = self.qkv_proj(hidden, metadata.lora).split(list(self.sizes.values()), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in qkv)
        q_norm, k_norm = self.q_norm, self.k_norm
        q = qk_norm_rope_and_cache(
            q,
            k,
            v,
            self.k_cache,
            self.v_cache,
            metadata.slot_mapping,
            positions,
            self.cos_sin_cache,
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=self.eps,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        out = q.new_empty(q.shape)
        paged_attention(
            q,
            self.k_cache,
            self.v_cache,
            block_table=metadata.block_table,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            max_seqlen_q=metadata.max_seqlen_q,
            softmax_scale=self.config.softmax_scale,
            window_size=self.window_size,
            sinks=self.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            plan=metadata.plan,
            out=out,
        )
        projected: torch.Tensor = self.o_proj(out.flatten(-2), metadata.lora)
        return projected

    def weight_slots(self, prefix: str) -> WeightSlots:
        slots = self.qkv_proj.weight_slots(prefix) | self.o_proj.weight_slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.weight_slots(f"{prefix}.q_norm") | self.k_norm.weight_slots(f"{prefix}.k_norm")
        if self.sinks is not None:
            slots[f"{prefix}.sinks"] = self.sinks
        return slots


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, self.activation = config.intermediate_size, config.activation
        self.gate_up_proj = Linear(config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=config.mlp_bias)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None = None) -> torch.Tensor:
        """May write its result over x."""
        in_parts = x.device.type == "cpu" and len(x) > _CPU_ROWS and lora is None
        if in_parts and not torch.compiler.is_dynamo_compiling():
            for rows in x.split(_CPU_ROWS):
                rows.copy_(self._project(rows, None))
            return x
        return self._project(x, lora)

    def _project(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        activated = silu_and_mul(self.gate_up_proj(x, lora), activation=self.activation)
        projected: torch.Tensor = self.down_proj(activated, lora)
        return projected

    def weight_slots(self, prefix: str) -> WeightSlots:
        return self.gate_up_proj.weight_slots(f"{prefix}.mlp") | self.down_proj.weight_slots(f"{prefix}.mlp")
