"""Tiny random checkpoints of every family, as transformers saves them, beside transformers' own model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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
# Of the 16 wavelengths from 6.3 to 35,000 positions, two fall below 32 / 4, two between, the rest beyond 32 / 1.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES: dict[str, PreTrainedConfig] = {
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
    "llama": LlamaConfig(**_SIZES),
    "llama_tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama_biases_linear_rope": LlamaConfig(
        **_SIZES,
        hidden_act="gelu",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    ),
    "llama3_rope": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "mistral": MistralConfig(**_SIZES, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen2_yarn_window_in_one_layer": Qwen2Config(
        **_SIZES,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "qwen3": Qwen3Config(**_SIZES, attention_bias=True),
    "qwen3_window_in_one_layer": Qwen3Config(
        **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=False),
    "qwen3_moe_normalised": Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=True),
    "qwen3_moe_with_dense_layer": Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, mlp_only_layers=[0], hidden_act="gelu_pytorch_tanh"
    ),
    "qwen3_moe_every_second_layer": Qwen3MoeConfig(**_SIZES, **_EXPERTS, decoder_sparse_step=2),
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
