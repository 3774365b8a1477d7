"""Tiny checkpoints of random weights, without tokenizers, and an adapter, for engines to load."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

VOCABULARY, HIDDEN, LAYERS, HEADS, HEAD_DIM = 512, 128, 4, 4, 32
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": 1024,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_WINDOW = {"sliding_window": 32}
_SCALED = {**_WINDOW, "query_pre_attn_scalar": HEAD_DIM}
_ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LONG = {"max_position_embeddings": 4096}
# vLLM makes blocks of 16 tokens so long that one holds a state, by default of 128 x 128 float32 a head: 528, 816 and
# 1,056 tokens.
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5 528": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 4},
    "qwen3.5 816": {
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "qwen3.5 1056": {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
# The family, and what it has besides _COMMON.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "one KV head": ("Llama", {"num_key_value_heads": 1}),
    "gemma2": ("Gemma2", _SCALED),
    "gemma3": ("Gemma3Text", _SCALED),
    "gpt-oss": ("GptOss", {"num_experts_per_tok": 2, "num_local_experts": 8, **_WINDOW}),
    "qwen3-moe": ("Qwen3Moe", _ROUTED),
    **{name: ("Qwen3_5Text", {**_LONG, **options}) for name, options in _HYBRIDS.items()},
}


def checkpoint(folder: Path, name: str, dtype: str) -> Path:
    """A checkpoint of CONFIGS, made where it is not yet there."""
    path = folder / f"{name.replace(' ', '-')}-{dtype}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        family, options = CONFIGS[name]
        config = getattr(transformers, f"{family}Config")(**{**_COMMON, **options})
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 3 or parameter_name.endswith("sinks"):  # which are made without values
                torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() >= 3 else 1.0)
        if name.startswith("gemma"):  # it multiplies embeddings, and would repeat every token
            model.get_input_embeddings().weight.data *= 0.1
        model.config.dtype = getattr(torch, dtype)
        model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def adapter(folder: Path, rank: int = 8) -> Path:
    """A LoRA adapter of "llama", of its attention's projections."""
    path = folder / "adapter"
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    widths = {"q_proj": HEADS * HEAD_DIM, "k_proj": 2 * HEAD_DIM, "v_proj": 2 * HEAD_DIM, "o_proj": HIDDEN}
    tensors = {}
    for layer in range(LAYERS):
        for module, width in widths.items():
            inner = HEADS * HEAD_DIM if module == "o_proj" else HIDDEN
            for side, shape in (("A", (rank, inner)), ("B", (width, rank))):
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight"
                tensors[name] = 0.2 * torch.randn(shape, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*widths], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
