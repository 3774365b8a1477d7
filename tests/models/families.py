"""Tiny random checkpoints of every family, as transformers saves them, beside transformers' own model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from paged.models.paged_lm import PagedCausalLM

VOCAB_SIZE = 128
WINDOW = 8

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    # The default 0.02 leaves all logits near 0.
    "initializer_range": 0.1,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
# Of the 16 wavelengths from 6.3 to 35,000 positions, two fall below 32 / 4, two between, the rest beyond 32 / 1.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.3,
    "logits_scaling": 8.0,
}
# Factors of the 6 pairs that 12 of a head's 16 elements make.
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [1.0 + 2.0 * pair for pair in range(6)],
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
}

# These run in all ways that there are.
FAMILIES: dict[str, PreTrainedConfig] = {
    "cohere2": Cohere2Config(**_SIZES | {"head_dim": 16}, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "gemma2": Gemma2Config(
        **_SIZES,
        sliding_window=WINDOW,
        query_pre_attn_scalar=48,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_SIZES,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=48,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "gemma4_moe": Gemma4TextConfig(
        **_SIZES,
        num_experts=4,
        moe_intermediate_size=32,
        top_k_experts=2,
        enable_moe_block=True,
        global_head_dim=64,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attention_k_eq_v=True,
        final_logit_softcapping=3.0,
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
        rope_parameters=_GEMMA4_ROPE,
    ),
    "gemma4_shared_kv": Gemma4TextConfig(
        **_SIZES | {"num_hidden_layers": 5, "head_dim": 16},
        global_head_dim=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", *_ALTERNATING, *_ALTERNATING],
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=24,
        vocab_size_per_layer_input=VOCAB_SIZE + 8,
        rope_parameters=_GEMMA4_ROPE,
    ),
    "glm": GlmConfig(**_SIZES, pad_token_id=0),
    "glm4": Glm4Config(**_SIZES, pad_token_id=0),
    "glm4_moe": Glm4MoeConfig(
        **_SIZES,
        **_ROUTED,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        n_shared_experts=2,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "gpt_oss": GptOssConfig(
        **_SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    "granite": GraniteConfig(**_SIZES, **_MULTIPLIERS),
    "granite_moe_shared": GraniteMoeSharedConfig(
        **_SIZES, **_MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48
    ),
    "llama": LlamaConfig(**_SIZES),
    "llama3_rope": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama4": Llama4TextConfig(
        **_SIZES, pad_token_id=0, num_local_experts=4, no_rope_layers=[1, 0], floor_scale=8, attn_scale=0.5
    ),
    "llama_biases_linear_rope": LlamaConfig(
        **_SIZES,
        hidden_act="gelu",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    ),
    "llama_tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "minimax_m2": MiniMaxM2Config(**_SIZES, num_local_experts=8, num_experts_per_tok=3, rotary_dim=16),
    "ministral": MinistralConfig(**_SIZES, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "ministral3": Ministral3Config(
        **_SIZES, rope_parameters=_YARN_ROPE | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8}
    ),
    "mistral": MistralConfig(**_SIZES, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": Olmo2Config(**_SIZES),
    "olmo3": Olmo3Config(
        **_SIZES,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": _YARN_ROPE,
        },
    ),
    "phi3": Phi3Config(
        **_SIZES | {"head_dim": 16},
        pad_token_id=0,
        original_max_position_embeddings=128,
        rope_parameters=dict(_LONG_ROPE),
    ),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen2_moe": Qwen2MoeConfig(**_SIZES, **_EXPERTS, shared_expert_intermediate_size=48, norm_topk_prob=True),
    "qwen2_yarn_window_in_one_layer": Qwen2Config(
        **_SIZES,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "qwen3": Qwen3Config(**_SIZES, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=False),
    "qwen3_moe_every_second_layer": Qwen3MoeConfig(**_SIZES, **_EXPERTS, decoder_sparse_step=2),
    "qwen3_moe_normalised": Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=True),
    "qwen3_moe_with_dense_layer": Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, mlp_only_layers=[0], hidden_act="gelu_pytorch_tanh"
    ),
    "qwen3_window_in_one_layer": Qwen3Config(
        **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, tie_word_embeddings=True
    ),
    "smollm3": SmolLM3Config(**_SIZES, pad_token_id=0, no_rope_layer_interval=2),
}
# Other options of them, for which one way is enough.
VARIANTS: dict[str, PreTrainedConfig] = {
    "gemma4_one_head_size": Gemma4TextConfig(
        **_SIZES,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "cohere2_biases_untied": Cohere2Config(
        **_SIZES | {"head_dim": 16},
        attention_bias=True,
        logit_scale=0.5,
        tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters=_LLAMA3_ROPE,
    ),
    "gemma2_without_soft_caps": Gemma2Config(
        **_SIZES,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "glm4_moe_in_every_layer": Glm4MoeConfig(
        **_SIZES, **_ROUTED, first_k_dense_replace=0, norm_topk_prob=False, n_shared_experts=1
    ),
    "glm_without_biases_tied": GlmConfig(
        **_SIZES,
        pad_token_id=0,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters=_LLAMA3_ROPE | {"partial_rotary_factor": 0.25},
    ),
    "glm4_without_biases": Glm4Config(
        **_SIZES, pad_token_id=0, attention_bias=False, rope_parameters=_LLAMA3_ROPE | {"partial_rotary_factor": 0.25}
    ),
    "granite_biases_tied": GraniteConfig(
        **_SIZES, **_MULTIPLIERS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "granite_moe": GraniteMoeConfig(**_SIZES, **_MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2),
    "granite_moe_shared_biases_tied": GraniteMoeSharedConfig(
        **_SIZES,
        **_MULTIPLIERS,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=32,
        hidden_act="gelu",
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=_LLAMA3_ROPE,
    ),
    "llama4_dense_layer": Llama4TextConfig(
        **_SIZES,
        pad_token_id=0,
        intermediate_size_mlp=80,
        attention_chunk_size=8,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        rope_parameters=_LLAMA3_ROPE,
    ),
    "minimax_m2_rotates_all": MiniMaxM2Config(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "ministral_whole_tied": MinistralConfig(
        **_SIZES,
        sliding_window=WINDOW,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
        rope_parameters=_YARN_ROPE,
    ),
    "ministral3_window": Ministral3Config(
        **_SIZES, sliding_window=WINDOW, rope_parameters=_YARN_ROPE | {"llama_4_scaling_beta": 0.1}
    ),
    "olmo2_biases_tied": Olmo2Config(**_SIZES, attention_bias=True, tie_word_embeddings=True),
    "olmo3_whole": Olmo3Config(**_SIZES, layer_types=["full_attention"] * 2, attention_bias=True),
    "phi3_window": Phi3Config(
        **_SIZES | {"head_dim": 16}, pad_token_id=0, sliding_window=WINDOW, tie_word_embeddings=True
    ),
    "qwen2_moe_windows_dense_layer": Qwen2MoeConfig(
        **_SIZES,
        **_EXPERTS,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        qkv_bias=False,
    ),
    "smollm3_window": SmolLM3Config(
        **_SIZES,
        pad_token_id=0,
        no_rope_layers=[0, 1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
}


@dataclass(frozen=True)
class Case:
    """One checkpoint in both worlds."""

    theirs: Any
    ours: PagedCausalLM

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits after every token, [n, V]."""
        with torch.no_grad():
            logits: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0]
        return logits


def save_checkpoint(config: PreTrainedConfig, folder: Path, **save_options: Any) -> Any:
    """A random model of the family, saved by transformers. Norms and biases are random too, not ones and zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0.1, 0.4)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **save_options)
    return model


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def assert_same_logits(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Equal within 1e-4 of the largest logit: float32 rounding through two layers gives below 1e-6."""
    assert actual is not None
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    error = float((actual.cpu() - expected).abs().max() / expected.abs().max())
    assert error < 1e-4, f"largest error {error:.1e} of the largest logit"
