"""Models of the sizes that are served, as their config.json has it, with one layer of each kind and weights of zero."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paged.executors.llm_executor import LlmExecutor
from paged.models import registry
from paged.models.network_loader import meta_network

_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 131_072, "tie_word_embeddings": False}

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
    },
    "Qwen3-30B-A3B": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 1e6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 150_000.0,
    },
    "gemma-3-4b": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
}


def executor_of(name: str, **options: Any) -> LlmExecutor:
    """An executor of these sizes in bfloat16 on the current device, whose weights are not loaded."""

    def without_weights(network_class: Any, config: Any, _: Path, *, dtype: Any, device: Any, **__: Any) -> Any:
        return meta_network(network_class, config, dtype).to_empty(device=device)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(registry, "load_network", without_weights):
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        return LlmExecutor.from_pretrained(folder, device="cuda", dtype=torch.bfloat16, **options)
