"""Models of the sizes that are served, as their config.json has it, with one layer of each kind and weights of zero."""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paged.executors.llm_executor import LlmExecutor
from paged.models import registry
from paged.models.network_loader import meta_network


def _config(family: str, vocab_size: int, hidden: int, intermediate: int, heads: tuple[int, int], **others: Any) -> Any:
    """heads: of queries, and of keys and values."""
    return {
        "architectures": [f"{family}ForCausalLM"], "vocab_size": vocab_size, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "num_hidden_layers": len(others.get("layer_types", [0])), "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072, "tie_word_embeddings": False, **others,
    }  # fmt: skip


_WINDOW_IN_ONE = {"layer_types": ["sliding_attention", "full_attention"]}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _config("Llama", 128_256, 4096, 14_336, (32, 8), model_type="llama", rope_theta=500_000.0),
    "Qwen3-30B-A3B": _config(
        "Qwen3Moe", 151_936, 2048, 6144, (32, 4), model_type="qwen3_moe", head_dim=128, rope_theta=1e6,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "gpt-oss-20b": _config(
        "GptOss", 201_088, 2880, 2880, (64, 8), model_type="gpt_oss", head_dim=64, rope_theta=150_000.0,
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128, **_WINDOW_IN_ONE,
    ),
    "gemma-3-4b": _config(
        "Gemma3", 262_208, 2560, 10_240, (8, 4), model_type="gemma3_text", head_dim=256, query_pre_attn_scalar=256,
        rope_theta=1e6, rope_local_base_freq=10_000.0, sliding_window=1024, **_WINDOW_IN_ONE, tie_word_embeddings=True,
    ),
}  # fmt: skip


def executor_of(name: str, **options: Any) -> LlmExecutor:
    """An executor of these sizes in bfloat16 on the current device, whose weights are not loaded."""

    def without_weights(network_class: Any, config: Any, _: Path, *, dtype: Any, device: Any, **__: Any) -> Any:
        return meta_network(network_class, config, dtype).to_empty(device=device)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(registry, "load_network", without_weights):
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        return LlmExecutor.from_pretrained(folder, device="cuda", dtype=torch.bfloat16, **options)
