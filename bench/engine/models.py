"""The models of the engine's benchmarks, and executors of them with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paged import LlmExecutor
from paged.bench.environment import benchmark_dtype
from paged.executors.command_line.checkpoint_summary import summarize
from paged.models import registry
from paged.models.families.llama import Llama
from paged.models.layers.config import DecoderConfig
from paged.models.network_loader import meta_network

BLOCK_SIZE = 16
# Of the free memory, for weights and cache; the rest is for graphs and the allocator.
_MEMORY_SHARE = 0.95
_QWEN3: dict[str, Any] = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8000,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# What config.json says of them: of the Qwens as published, as far as it matters here; Llama-8B is Qwen3-8B without its
# norms of queries and keys, and with a small vocabulary.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-10M": {
        **_LLAMA,
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "Llama-100M": {
        **_LLAMA,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 13,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
    },
    "Llama-8B": {**_LLAMA, **_8B},
    "Qwen3-8B": {
        **_QWEN3,
        **_8B,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}


def random_executor(config: Mapping[str, Any], device: torch.device, num_tokens: int) -> LlmExecutor:
    """The model of a config.json with random weights made on the device, and a cache of num_tokens or of what fits."""
    dtype = benchmark_dtype(device)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(registry, "load_network", _random_network):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        if device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            room = summarize(Path(folder), device_bytes=int(free_bytes * _MEMORY_SHARE), dtype=dtype).kv_tokens
            num_tokens = min(num_tokens, room or 0)
        return LlmExecutor.from_pretrained(
            folder, device=device, dtype=dtype, num_blocks=-(-num_tokens // BLOCK_SIZE), block_size=BLOCK_SIZE
        )


def _random_network(
    network_class: type[Llama],
    config: DecoderConfig,
    _folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    **_: bool,
) -> Llama:
    """In place of loading: normal numbers that keep the variance of what passes through, and norms of 1."""
    network = meta_network(network_class, config, dtype).to_empty(device=device)
    for weight in network.weight_slots().values():
        assert isinstance(weight, torch.Tensor)
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5)
    return network
