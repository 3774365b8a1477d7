"""Kimi K3's text model by its formulas, one sequence at a time: transformers 5.23 has no class for it.

The formulas are those of vLLM 0.33 (`vllm/models/kimi_k3`) and SGLang 0.5.23 (`srt/models/kimi_k3.py`).
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from tests.models.formula_model import FormulaModel


class KimiK3(FormulaModel):
    """config: transformers' KimiLinearConfig with the keys that K3 has beside it."""

    architecture = "KimiK3LinearForCausalLM"

    def __init__(self, config: Any) -> None:
        super().__init__(config, {name: _drawn(name, shape) for name, shape in _shapes(config).items()})

    def __call__(self, ids: torch.Tensor) -> Any:
        config = self.config
        added, total = self.tensors["model.embed_tokens.weight"][ids[0]], None  # [T, hidden_size]
        snapshots: list[torch.Tensor] = []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            total = added if total is None else total + added
            x = self._mix([*snapshots, total], f"{prefix}.self_attention_res")
            if layer % config.attn_res_block_size == 0:
                snapshots.append(total)
                total = None
            x = self._norm(x, f"{prefix}.input_layernorm")
            if layer + 1 in config.linear_attn_config["kda_layers"]:
                attended = self._delta(x, f"{prefix}.self_attn")
            else:
                attended = self._attention(x, f"{prefix}.self_attn")
            total = attended if total is None else total + attended
            x = self._mix([*snapshots, total], f"{prefix}.mlp_res")
            x = self._norm(x, f"{prefix}.post_attention_layernorm")
            is_dense = layer < config.first_k_dense_replace
            added = self._mlp(x, f"{prefix}.mlp") if is_dense else self._experts(x, f"{prefix}.block_sparse_moe")
        x = self._mix([*snapshots, total + added], "model.output_attn_res")
        logits = self._norm(x, "model.norm") @ self.tensors["lm_head.weight"].T
        return SimpleNamespace(logits=logits[None])

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def _mix(self, rows: list[torch.Tensor], name: str) -> torch.Tensor:
        values = torch.stack(rows, 1)  # [T, rows, hidden_size]
        scores = self._product(self._norm(values, f"{name}_norm"), f"{name}_proj")
        return (scores.softmax(1) * values).sum(1)

    def _delta(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        linear = self.config.linear_attn_config
        heads = linear["num_heads"], linear["head_dim"]
        q, k, v = (self._convolved(x, prefix, part).unflatten(-1, heads) for part in "qkv")  # [T, H, K]
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        raw = (
            self._product(self._product(x, f"{prefix}.f_a_proj"), f"{prefix}.f_b_proj")
            + self.tensors[f"{prefix}.dt_bias"]
        )
        rate = self.tensors[f"{prefix}.A_log"].exp()[:, None]
        decay = (linear["gate_lower_bound"] * (rate * raw.unflatten(-1, heads)).sigmoid()).exp()
        beta = self._product(x, f"{prefix}.b_proj").sigmoid()[..., None]
        state = x.new_zeros(heads[0], heads[1], heads[1])  # [H, K, V]
        rows = []
        for token in range(len(x)):
            state = state * decay[token, :, :, None]
            change = beta[token] * (v[token] - torch.einsum("hkv,hk->hv", state, k[token]))
            state = state + k[token, :, :, None] * change[:, None]
            rows.append(torch.einsum("hkv,hk->hv", state, q[token]) * heads[1] ** -0.5)
        gate = self._product(x, f"{prefix}.g_proj").unflatten(-1, heads).sigmoid()
        normed = self._norm(torch.stack(rows), f"{prefix}.o_norm") * gate
        return self._product(normed.flatten(1), f"{prefix}.o_proj")

    def _convolved(self, x: torch.Tensor, prefix: str, part: str) -> torch.Tensor:
        weight = self.tensors[f"{prefix}.{part}_conv1d.weight"]  # [channels, 1, W]
        padded = functional.pad(self._product(x, f"{prefix}.{part}_proj").T, (weight.shape[2] - 1, 0))
        return functional.silu(functional.conv1d(padded, weight, groups=len(weight))).T

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        config = self.config
        nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        latent_q = self._norm(self._product(x, f"{prefix}.q_a_proj"), f"{prefix}.q_a_layernorm")
        q = self._product(latent_q, f"{prefix}.q_b_proj").unflatten(-1, (config.num_attention_heads, -1))
        latent, shared = self._product(x, f"{prefix}.kv_a_proj_with_mqa").split((rank, rope), -1)
        expanded = self._product(self._norm(latent, f"{prefix}.kv_a_layernorm"), f"{prefix}.kv_b_proj")
        k, v = expanded.unflatten(-1, (config.num_attention_heads, -1)).split((nope, config.v_head_dim), -1)
        k = torch.cat([k, shared[:, None].expand(-1, config.num_attention_heads, -1)], -1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * (nope + rope) ** -0.5
        is_later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).flatten(1) * self._product(x, f"{prefix}.g_proj").sigmoid()
        return self._product(out, f"{prefix}.o_proj")

    def _experts(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        config = self.config
        scores = self._product(x, f"{prefix}.gate").sigmoid()
        chosen = (
            (scores + self.tensors[f"{prefix}.gate.e_score_correction_bias"]).topk(config.num_experts_per_tok).indices
        )
        weights = scores.gather(1, chosen)
        weights = config.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
        latent = self._product(x, f"{prefix}.routed_expert_down_proj")
        rows = []
        for row, experts, shares in zip(latent, chosen.tolist(), weights, strict=True):
            parts = [self._mlp(row, f"{prefix}.experts.{expert}", ("w1", "w3", "w2")) for expert in experts]
            rows.append((torch.stack(parts) * shares[:, None]).sum(0))
        routed = self._norm(torch.stack(rows), f"{prefix}.routed_expert_norm")
        return self._product(routed, f"{prefix}.routed_expert_up_proj") + self._mlp(x, f"{prefix}.shared_experts")

    def _mlp(
        self, x: torch.Tensor, prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> torch.Tensor:
        gate, up = (self._product(x, f"{prefix}.{name}") for name in names[:2])
        softcapped = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate)
        return self._product(softcapped * (25.0 * torch.tanh(up / 25.0)), f"{prefix}.{names[2]}")


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by their published names."""
    hidden, size = config.hidden_size, config.linear_attn_config["num_heads"] * config.linear_attn_config["head_dim"]
    head_dim, width = config.linear_attn_config["head_dim"], config.linear_attn_config["short_conv_kernel_size"]
    heads, latent = config.num_attention_heads, config.routed_expert_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    delta = {
        **{f"{part}_proj.weight": (size, hidden) for part in "qkvg"},
        **{f"{part}_conv1d.weight": (size, 1, width) for part in "qkv"},
        "f_a_proj.weight": (head_dim, hidden),
        "f_b_proj.weight": (size, head_dim),
        "b_proj.weight": (config.linear_attn_config["num_heads"], hidden),
        "A_log": (config.linear_attn_config["num_heads"],),
        "dt_bias": (size,),
        "o_norm.weight": (head_dim,),
        "o_proj.weight": (hidden, size),
    }
    attention = {
        "q_a_proj.weight": (config.q_lora_rank, hidden),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "g_proj.weight": (heads * config.v_head_dim, hidden),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    experts = {
        "gate.weight": (config.num_local_experts, hidden),
        "gate.e_score_correction_bias": (config.num_local_experts,),
        "routed_expert_down_proj.weight": (latent, hidden),
        "routed_expert_norm.weight": (latent,),
        "routed_expert_up_proj.weight": (hidden, latent),
        **_mlp_shapes("shared_experts.", hidden, config.moe_intermediate_size * config.n_shared_experts),
    }
    for expert in range(config.num_local_experts):
        names = ("w1", "w3", "w2")
        experts |= _mlp_shapes(f"experts.{expert}.", latent, config.moe_intermediate_size, names)
    for layer in range(config.num_hidden_layers):
        parts: dict[str, tuple[int, ...]] = {}
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            parts[f"{name}.weight"] = (hidden,)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            parts[f"{name}.weight"] = (1, hidden)
        mixer = delta if layer + 1 in config.linear_attn_config["kda_layers"] else attention
        parts |= {f"self_attn.{name}": shape for name, shape in mixer.items()}
        if layer < config.first_k_dense_replace:
            parts |= _mlp_shapes("mlp.", hidden, config.intermediate_size)
        else:
            parts |= {f"block_sparse_moe.{name}": shape for name, shape in experts.items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _mlp_shapes(
    prefix: str, width: int, size: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    return {
        f"{prefix}{gate}.weight": (size, width),
        f"{prefix}{up}.weight": (size, width),
        f"{prefix}{down}.weight": (width, size),
    }


def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(-2, 0)
    if name.endswith("e_score_correction_bias"):
        return torch.empty(shape).uniform_(0.1, 0.4)
    if len(shape) == 1:
        return torch.empty(shape).uniform_(0.5, 1.5)
    return 0.15 * torch.randn(shape)
