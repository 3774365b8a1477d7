"""Models for the engine's benchmarks, and executors with random weights for them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paged import LlmExecutor
from paged.bench.benchmark import benchmark_dtype
from paged.bench.watchdog import WATCHDOG
from paged.executors import llm_executor
from paged.executors.progress import tracked
from paged.kernels.attention.tiles import default_block_size
from paged.kernels.core.device import device_of
from paged.models import registry
from paged.models.families.network import Network
from paged.models.layers.config import DecoderConfig
from paged.models.network_loader import meta_network
from paged.serving.command_line.checkpoint_summary import summarize

# Fraction of free memory for weights and cache; the rest is for graphs and the allocator.
_MEMORY_SHARE = 0.95
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _config(architecture: str, model_type: str, *sizes: int, **options: Any) -> dict[str, Any]:
    """Return a config.json. sizes: values of _SIZES."""
    shared = {"max_position_embeddings": 40_960, "rms_norm_eps": 1e-6}
    named = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    return {**named, **shared, **dict(zip(_SIZES, sizes, strict=True)), **options}


_SMALL: dict[str, Any] = {"vocab_size": 8000, "tie_word_embeddings": True}
_TIED: dict[str, Any] = {"vocab_size": 151_936, "tie_word_embeddings": True}
_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "tie_word_embeddings": False, "head_dim": 128, "rope_theta": 1e6}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_8B = (4096, 12_288, 36, 32, 8)
_FEW_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
_HALF_EXPERTS = _EXPERTS | {"moe_intermediate_size": 384}
_NEXT_EXPERTS = _EXPERTS | {
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
_GATED_DELTA = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_OSS_EXPERTS = {
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Model -> relevant keys of its config.json. Qwen3-8B and larger Qwens have published sizes. Llama-8B is Qwen3-8B with a
# small vocabulary and without norms of heads. Llama-6-layers has the sizes of a 0.4B model. Llama-0.5B and Llama-1.5B
# have Qwen2.5's sizes, because llama.cpp's process can write only a Llama as GGUF.
MODELS = {
    "Llama-10M": _config("Llama", "llama", 288, 768, 8, 9, 3, **_SMALL),
    "Llama-20M": _config("Llama", "llama", 512, 1536, 6, 8, 4, **_SMALL),
    "Llama-100M": _config("Llama", "llama", 768, 2304, 13, 12, 3, **_SMALL),
    "Llama-8B": _config("Llama", "llama", *_8B, **_SMALL),
    "Llama-6-layers": _config("Llama", "llama", 1024, 4096, 6, 16, 16, **_SMALL),
    "Llama-0.5B": _config("Llama", "llama", 896, 4864, 24, 14, 2, **_TIED),
    "Llama-1.5B": _config("Llama", "llama", 1536, 8960, 28, 12, 2, **_TIED),
    "Qwen3-MoE-110M": _config("Qwen3Moe", "qwen3_moe", 512, 1024, 8, 8, 2, head_dim=64, **_SMALL, **_FEW_EXPERTS),
    "Qwen2.5-0.5B": _config("Qwen2", "qwen2", 896, 4864, 24, 14, 2, rope_theta=1e6, **_TIED),
    "Qwen3-8B": _config("Qwen3", "qwen3", *_8B, **_QWEN3),
    # Models with few and smaller layers than Qwen3-30B-A3B, Qwen3-Next-80B-A3B and gpt-oss-20b: a small machine holds
    # several copies.
    "Qwen3-MoE": _config("Qwen3Moe", "qwen3_moe", 1024, 3072, 4, 16, 2, head_dim=128, **_SMALL, **_HALF_EXPERTS),
    "Qwen3-Next": _config(
        "Qwen3Next", "qwen3_next", 1024, 2560, 4, 8, 1, head_dim=256, **_SMALL, **_NEXT_EXPERTS, **_GATED_DELTA
    ),
    "gpt-oss": _config("GptOss", "gpt_oss", 1536, 1536, 4, 32, 4, head_dim=64, **_SMALL, **_OSS_EXPERTS),
    "Qwen3-30B-A3B": _config("Qwen3Moe", "qwen3_moe", 2048, 6144, 48, 32, 4, **_QWEN3, **_EXPERTS),
}


def random_prompts(rng: random.Random, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return a prompt of random tokens for each length."""
    prompts = []
    for length in lengths:
        prompts.append([rng.randrange(vocab_size) for _ in range(length)])
    return prompts


def save_random(config: Mapping[str, Any], dtype: torch.dtype, folder: str, device: str = "cpu") -> Any:
    """Save a checkpoint for all engines, made on the device, and return transformers' model.

    The weights are so large that the logits of a text are far apart.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {name: value for name, value in config.items() if name != "model_type"}
    full = AutoConfig.for_model(config["model_type"], **sizes, initializer_range=0.1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(full, dtype=dtype).eval()
    for weight in model.parameters():
        if weight.dim() == 3:  # transformers may leave experts uninitialised
            weight.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def load(folder: str | Path, device: torch.device, dtype: torch.dtype, num_tokens: int, **options: Any) -> LlmExecutor:
    """Load a checkpoint with a cache for num_tokens, in the device's default block size."""
    block_size = default_block_size(device_of(device).arch)
    num_blocks = -(-num_tokens // block_size)
    return LlmExecutor.from_pretrained(
        folder, device=device, dtype=dtype, num_blocks=num_blocks, block_size=block_size, **options
    )


def random_executor(
    config: Mapping[str, Any],
    device: torch.device,
    num_tokens: int,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> LlmExecutor:
    """Return a config.json's model with random weights made on the device. Its cache holds num_tokens if they fit.

    dtype: None for the dtype of benchmarks on the device. options: options of `LoadOptions`.
    """
    dtype = dtype or benchmark_dtype(device)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(registry, "load_network", _random_network):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        if device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            room = summarize(Path(folder), device_bytes=int(free_bytes * _MEMORY_SHARE), dtype=dtype)["kv_tokens"]
            num_tokens = min(num_tokens, room or 0)
        return load(folder, device, dtype, num_tokens, progress=False, **options)


def warm_up(executor: LlmExecutor) -> None:
    """Warm up an executor; every kernel and every graph counts as progress for the watchdog."""

    def watched(items: Sequence[Any], **options: Any) -> Iterator[Any]:
        for item in tracked(items, **options):
            WATCHDOG.progress()
            yield item

    with mock.patch.object(llm_executor, "tracked", watched):
        executor.warmup()
    WATCHDOG.progress()


def _random_network(
    network_class: type[Network],
    config: DecoderConfig,
    _folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    **_: bool,
) -> Network:
    """Replace loading by random weights: normal weights that keep the variance of activations, and norms of 1.

    Codes of MXFP4 are uniform, with a scale of 2^-7.
    """
    network = meta_network(network_class, config, dtype).to_empty(device=device)
    for weight in network.parameters():
        if weight.dtype == torch.int32:
            weight.data.random_()
        elif weight.dtype == torch.uint8:
            weight.data.fill_(127 - 7)
        elif weight.dim() == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, weight.shape[-1] ** -0.5)
    return network
