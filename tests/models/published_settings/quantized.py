"""quantization_config blocks as models on the Hub have them, by the model that has them. Group sizes of 128 are 32
here, as matrices are smaller. Tensors have the names and shapes of those models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.models.edits import Tensors
from tests.models.quantization.packers import (
    E4M3,
    Format,
    awq,
    e4m3,
    e4m3_blocks,
    gptq,
    nvfp4,
)

Make = Callable[[int, int], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Published(Format):
    """base: a family of `PACKABLE` or of `BASES`. beside: the block stands in hf_quant_config.json, under this key."""

    base: str = "llama"
    beside: str = ""


def _renamed(make: Make, **names: str) -> Make:
    """Under other names, and what has one value without dimensions."""

    def made(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        tensors, numbers = make(rows, columns)
        scalar = {names.get(end, end): one.reshape(()) if one.numel() == 1 else one for end, one in tensors.items()}
        return scalar, numbers

    return made


def e4m3_rows(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    """With a scale for each row."""
    codes, scale = torch.randn(rows, columns).to(E4M3), (torch.rand(rows, 1) + 0.5) / columns**0.5
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


_AWQ = {"bits": 4, "group_size": 32, "quant_method": "awq", "version": "gemm", "zero_point": True}
_GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "quant_method": "gptq", "sym": True}
_GPTQ |= {"true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"}
_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_MISTRAL = {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None}
_MISTRAL |= {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}
_MODELOPT = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quant_method": "modelopt", "ignore": ["lm_head"]}
_OPEN = {"actorder": None, "block_structure": None, "group_size": None, "observer_kwargs": {}, "symmetric": True}
_FLOAT8, _INT8 = _OPEN | {"num_bits": 8, "type": "float"}, _OPEN | {"num_bits": 8, "type": "int"}
_TENSOR = {"dynamic": False, "observer": "minmax", "strategy": "tensor"}
_CHANNEL, _TOKEN = _TENSOR | {"strategy": "channel"}, {"dynamic": True, "observer": None, "strategy": "token"}
_INT4 = _OPEN | _TENSOR | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_mistral = _renamed(e4m3, weight_scale="weight_scale_inv", input_scale="activation_scale")
_static = _renamed(e4m3)


def _compressed(form: str, weights: Any, inputs: Any = None, targets: str = "Linear", *ignore: str) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": [targets], "weights": weights}
    common = {"global_compression_ratio": 1.5, "ignore": ["lm_head", *ignore], "kv_cache_scheme": None}
    return common | {
        "config_groups": {"group_0": group},
        "format": form,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
    }


_DYNAMIC = _compressed("float-quantized", _FLOAT8 | _CHANNEL, _FLOAT8 | _TOKEN)
_STATIC = _compressed("float-quantized", _FLOAT8 | _TENSOR, _FLOAT8 | _TENSOR)
_W4A16 = _compressed("pack-quantized", _INT4)
_ROUTERS = {"ignore": ["lm_head", "re:.*mlp.gate$"]}
# Their weights beside projections are what transformers saves.
BASES = {
    # Each token takes every expert, so that rounding changes no choice.
    "deepseek_v3": """DeepseekV3 hidden_size=256 intermediate_size=384 moe_intermediate_size=128 n_routed_experts=4
        n_group=1 topk_group=1 num_experts_per_tok=4 n_shared_experts=1 first_k_dense_replace=1 num_key_value_heads=4
        head_dim=64 kv_lora_rank=128 q_lora_rank=128 qk_nope_head_dim=32 qk_rope_head_dim=64 v_head_dim=32""",
    "gpt_oss": "GptOss hidden_size=256 head_dim=64 intermediate_size=128 local_experts window yarn_gpt_oss",
    "nemotron": "Nemotron hidden_size=256 head_dim=64 intermediate_size=384",
    "minimax_m2": """MiniMaxM2 hidden_size=256 head_dim=64 intermediate_size=128 num_local_experts=4
        num_experts_per_tok=2 rotary_dim=32""",
    "ministral3": "Ministral3 hidden_size=256 head_dim=64 intermediate_size=384 yarn_ministral3",
}
PUBLISHED = {
    "Qwen/Qwen2.5-7B-Instruct-AWQ": Published(_AWQ | {"modules_to_not_convert": None}, awq),
    "casperhansen/llama-3-8b-instruct-awq": Published(_AWQ | {"version": "GEMM"}, awq),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": Published(
        _AWQ | {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None}, awq
    ),
    "TheBloke/Llama-2-7B-Chat-GPTQ": Published(_GPTQ, gptq(4, symmetric=True)),
    "TheBloke/Mistral-7B-Instruct-v0.2-GPTQ": Published(
        _GPTQ | {"desc_act": True}, gptq(4, symmetric=True, order=True)
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Published(
        _GPTQ | {"checkpoint_format": "gptq", "damp_percent": 0.01, "static_groups": False}, gptq(4, symmetric=True)
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": Published(_GPTQ | {"bits": 8}, gptq(8, symmetric=True)),
    "ModelCloud/Meta-Llama-3.1-8B-Instruct-gptq-4bit": Published(
        _GPTQ | {"lm_head": False, "checkpoint_format": "gptq", "meta": {"quantizer": "gptqmodel:0.9.9"}},
        gptq(4, symmetric=True),
    ),
    "GPTQModel without its older key": Published(
        _GPTQ | {"format": "gptq_v2", "method": "gptq"}, gptq(4, symmetric=True, version=2)
    ),
    "Qwen/Qwen3-8B-FP8": Published(_BLOCKS, e4m3_blocks, "e4m3 groups"),
    "Qwen/Qwen3-30B-A3B-FP8": Published(
        _BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"]},
        e4m3_blocks,
        "e4m3 groups",
        base="experts",
    ),
    "deepseek-ai/DeepSeek-V3": Published(_BLOCKS, e4m3_blocks, "e4m3 groups", base="deepseek_v3"),
    "MiniMaxAI/MiniMax-M2": Published(
        _BLOCKS | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        e4m3_blocks,
        "e4m3 groups",
        base="minimax_m2",
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": Published(_MISTRAL, _mistral, "e4m3 static", base="ministral3"),
    "mistralai/Devstral-Small-2-24B-Instruct-2512": Published(_MISTRAL, _mistral, "e4m3 static", base="ministral3"),
    "RedHatAI/Meta-Llama-3-8B-Instruct-FP8": Published(
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}, e4m3, "e4m3 static"
    ),
    "mgoin/Minitron-4B-Base-FP8": Published(
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        e4m3,
        "e4m3 static",
        base="nemotron",
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": Published(_STATIC, rounds="e4m3 static"),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": Published(_DYNAMIC, rounds="e4m3"),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": Published(
        _compressed("int-quantized", _INT8 | _CHANNEL, _INT8 | _TOKEN), rounds="int8"
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": Published(_W4A16),
    "RedHatAI/Qwen3-30B-A3B-FP8-dynamic": Published(_DYNAMIC | _ROUTERS, e4m3_rows, "e4m3", base="experts"),
    "RedHatAI/Qwen3-30B-A3B-quantized.w4a16": Published(_W4A16 | _ROUTERS, base="experts"),
    "openai/gpt-oss-20b by llm-compressor's FP8_DYNAMIC": Published(_DYNAMIC, e4m3_rows, "e4m3", base="gpt_oss"),
    "a class of modules by llm-compressor": Published(
        _compressed("float-quantized", _FLOAT8 | _CHANNEL, _FLOAT8 | _TOKEN, "LlamaMLP"), e4m3_rows, "e4m3"
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP8": Published(
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, _static, "e4m3 static", beside="quantization"
    ),
    "nvidia/Llama-3.1-8B-Instruct-FP4": Published(
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]},
        _renamed(nvfp4),
        beside="quantization",
    ),
    "ModelOpt's keys in a section": Published(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, _static, "e4m3 static"
    ),
    "nvidia/Qwen3-8B-FP8": Published(
        _MODELOPT | {"quant_algo": "FP8", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        _static,
        "e4m3 static",
    ),
}
