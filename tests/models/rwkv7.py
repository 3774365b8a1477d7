"""RWKV-7 by its formulas, one sequence and one token at a time: transformers 5.23 has no class for it.

The formulas and names are those of flash-linear-attention 0.6 (`fla/models/rwkv7`, `fla/layers/rwkv7.py`).
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, PreTrainedConfig

from tests.models.formula_model import FormulaModel


class Rwkv7Config(PreTrainedConfig):  # type: ignore[misc]
    """flash-linear-attention's keys and defaults."""

    model_type = "rwkv7"

    attn_mode: str = "chunk"
    vocab_size: int = 32000
    hidden_size: int = 2048
    hidden_ratio: float | None = 4
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    head_dim: int | None = 64
    num_heads: int | None = None
    value_dim: int | list[int] | None = None
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 16
    hidden_act: str = "sqrelu"
    max_position_embeddings: int = 2048
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    attn: dict[str, Any] | None = None
    fuse_norm: bool = True
    tie_word_embeddings: bool = False


AutoConfig.register("rwkv7", Rwkv7Config, exist_ok=True)


class Rwkv7(FormulaModel):
    architecture = "RWKV7ForCausalLM"

    def __init__(self, config: Any) -> None:
        super().__init__(config, {name: _drawn(name, shape) for name, shape in _shapes(config).items()})

    def __call__(self, ids: torch.Tensor) -> Any:
        hidden = self.tensors["model.embeddings.weight"][ids[0]]  # [T, hidden_size]
        first_values = None
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            if layer == 0 and self.config.norm_first:
                hidden = self._norm(hidden, f"{prefix}.pre_norm")
            mixed, values = self._time_mix(self._norm(hidden, f"{prefix}.attn_norm"), f"{prefix}.attn", first_values)
            first_values = values if layer == 0 else first_values
            hidden = hidden + mixed
            hidden = hidden + self._channel_mix(self._norm(hidden, f"{prefix}.ffn_norm"), f"{prefix}.ffn")
        head = self.tensors["model.embeddings.weight" if self.config.tie_word_embeddings else "lm_head.weight"]
        return SimpleNamespace(logits=(self._norm(hidden, "model.norm") @ head.T)[None])

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self.config.norm_eps)

    def _adapted(self, x: torch.Tensor, name: str, activation: Any = None) -> torch.Tensor:
        inner = self._product(x, f"{name}.lora.0")
        return self._product(inner if activation is None else activation(inner), f"{name}.lora.2")

    def _shifted(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x moved towards the x of the token before, which is 0 for the first."""
        before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        return x + (before - x) * self.tensors[name].flatten()

    def _time_mix(
        self, x: torch.Tensor, prefix: str, first_values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = self.tensors[f"{prefix}.r_k"].shape  # H, K
        r = self._product(self._shifted(x, f"{prefix}.x_r"), f"{prefix}.r_proj")
        k = self._product(self._shifted(x, f"{prefix}.x_k"), f"{prefix}.k_proj")
        for_v = self._shifted(x, f"{prefix}.x_v")
        values = v = self._product(for_v, f"{prefix}.v_proj")
        if first_values is not None:
            share = self._adapted(for_v, f"{prefix}.v_lora").sigmoid()
            v = v + share * (first_values - v)
        raw = self._adapted(self._shifted(x, f"{prefix}.x_w"), f"{prefix}.w_lora", torch.tanh)
        decay = torch.exp(-math.exp(-0.5) * raw.sigmoid()).unflatten(-1, heads)
        rate = self._adapted(self._shifted(x, f"{prefix}.x_a"), f"{prefix}.a_lora").sigmoid()
        gate = self._adapted(self._shifted(x, f"{prefix}.x_g"), f"{prefix}.g_lora", torch.sigmoid)
        erased = (k * self.tensors[f"{prefix}.k_k"]).unflatten(-1, heads)
        squares = erased.square().sum(-1, keepdim=True)
        if self.config.fuse_norm:
            erased = erased / (squares + 1e-6).sqrt()
        else:
            erased = erased / squares.sqrt().clamp(min=1e-12)
        k = k * (1 + (rate - 1) * self.tensors[f"{prefix}.k_a"])
        r, k, rate = (part.unflatten(-1, heads) for part in (r, k, rate))  # [T, H, K]
        v = v.unflatten(-1, (heads[0], -1))  # [T, H, V]
        state = x.new_zeros(*heads, v.shape[-1])  # [H, K, V]
        rows = []
        for token in range(len(x)):
            read = torch.einsum("hkv,hk->hv", state, -erased[token])
            added = (erased * rate)[token, :, :, None] * read[:, None] + k[token, :, :, None] * v[token, :, None]
            state = state * decay[token, :, :, None] + added
            rows.append(torch.einsum("hkv,hk->hv", state, r[token]))
        weight, bias = self.tensors[f"{prefix}.g_norm.weight"], self.tensors[f"{prefix}.g_norm.bias"]
        out = functional.group_norm(
            torch.stack(rows).flatten(1), heads[0], weight, bias, heads[1] * self.config.norm_eps
        )
        bonus = (r * k * self.tensors[f"{prefix}.r_k"]).sum(-1, keepdim=True) * v
        return self._product((out + bonus.flatten(1)) * gate, f"{prefix}.o_proj"), values

    def _channel_mix(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        inner = self._product(self._shifted(x, f"{prefix}.x_k"), f"{prefix}.key")
        return self._product(inner.relu().square(), f"{prefix}.value")


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by their published names."""
    hidden, head_dim = config.hidden_size, config.head_dim or config.hidden_size // config.num_heads
    sizes = config.value_dim
    values = sizes[0] if isinstance(sizes, list) else sizes or hidden
    inner = config.intermediate_size or math.ceil(int(hidden * (config.hidden_ratio or 4)) / 32) * 32
    layer: dict[str, tuple[int, ...]] = {
        **{f"attn.x_{name}": (1, 1, hidden) for name in "rwkvag"},
        "attn.k_k": (hidden,),
        "attn.k_a": (hidden,),
        "attn.r_k": (hidden // head_dim, head_dim),
        "attn.r_proj.weight": (hidden, hidden),
        "attn.k_proj.weight": (hidden, hidden),
        "attn.v_proj.weight": (values, hidden),
        "attn.o_proj.weight": (hidden, values),
        **_adapter_shapes("attn.w_lora", hidden, config.decay_low_rank_dim, hidden),
        **_adapter_shapes("attn.a_lora", hidden, config.a_low_rank_dim, hidden),
        **_adapter_shapes("attn.v_lora", hidden, config.v_low_rank_dim, values),
        **_adapter_shapes("attn.g_lora", hidden, config.gate_low_rank_dim, values),
        "attn.g_norm.weight": (values,),
        "attn.g_norm.bias": (values,),
        "ffn.x_k": (hidden,),
        "ffn.key.weight": (inner, hidden),
        "ffn.value.weight": (hidden, inner),
    }
    del layer["attn.g_lora.lora.2.bias"]
    norms = ["model.norm"]
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        for name, shape in layer.items():
            if index or "v_lora" not in name:
                shapes[f"{prefix}.{name}"] = shape
        norms += [f"{prefix}.attn_norm", f"{prefix}.ffn_norm"]
        if index == 0 and config.norm_first:
            norms.append(f"{prefix}.pre_norm")
    for name in norms:
        shapes[f"{name}.weight"] = (hidden,)
        if config.norm_bias:
            shapes[f"{name}.bias"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _adapter_shapes(name: str, hidden: int, rank: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.lora.0.weight": (rank, hidden),
        f"{name}.lora.2.weight": (size, rank),
        f"{name}.lora.2.bias": (size,),
    }


def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if ".x_" in name:
        return torch.rand(shape)
    if name.endswith("w_lora.lora.2.bias"):
        return torch.empty(shape).uniform_(-6, 1)  # from long memory to short
    if name.endswith(("lora.2.bias", "r_k")):
        return 0.3 * torch.randn(shape)
    if len(shape) == 1:
        return torch.empty(shape).uniform_(0.5, 1.5)
    return 0.15 * torch.randn(shape)
