"""Values for keys that a config.json omits: by family, as in transformers 5.23.

Sizes are of families in multimodal models, whose published text_config holds only what differs from them, and of
Mixtral. Other families have what published or saved files omit, and what would be read as another value if missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
)
_MISTRAL = (32_000, 4096, 14_336, 32, 32, 8, None, 131_072)
_QWEN = (151_936, 4096, 22_016, 32, 32, 32)
_QWEN_VL = (152_064, 8192, 29_568, 80, 64, 8, None, 32_768, 1e-5, 1e6)
# model_type -> values of _KEYS. None: num_key_value_heads is the number of heads; head_dim is hidden size / heads.
_SIZES: Mapping[str, tuple[float | None, ...]] = {
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 4, 256, 131_072, 1e-6, 1e6),
    "gemma4_text": (262_144, 2304, 9216, 30, 8, 4, 256, 131_072, 1e-6, 1e4),
    "glm4v_moe_text": (151_424, 4096, 10_944, 46, 96, 8, None, 65_536, 1e-5, 1e4),
    "glm4v_text": (151_552, 4096, 13_696, 40, 32, 2, None, 32_768, 1e-5, 1e4),
    "gpt_oss": (201_088, 2880, 2880, 36, 64, 8, 64, 131_072, 1e-5, 150_000.0),
    "llama": (32_000, 4096, 11_008, 32, 32, None, None, 2048, 1e-6, 1e4),
    "llama4_text": (202_048, 5120, 8192, 48, 40, 8, 128, 131_072, 1e-5, 5e5),
    "ministral3": (131_072, 4096, 14_336, 34, 32, 8, 128, 262_144, 1e-5, 1e4),
    "mistral": (*_MISTRAL, 1e-6, 1e4),
    "mixtral": (*_MISTRAL, 1e-5, 1e6),
    "mistral4": (131_072, 4096, 12_288, 36, 32, 32, None, 1_048_576, 1e-6, 1e4),
    "qwen2": (*_QWEN, None, 32_768, 1e-6, 1e4),
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_vl_text": _QWEN_VL,
    "qwen3": (*_QWEN, 128, 32_768, 1e-6, 1e4),
    "qwen3_5_moe_text": (248_320, 2048, None, 40, 16, 2, 256, 32_768, 1e-6, 1e4),
    "qwen3_5_text": (248_320, 4096, 12_288, 32, 16, 4, 256, 32_768, 1e-6, 1e4),
    "qwen3_moe": (151_936, 2048, 6144, 24, 32, 4, None, 32_768, 1e-6, 1e4),
    "qwen3_vl_moe_text": (151_936, 2048, 5632, 24, 16, 16, None, 128_000, 1e-6, 5e5),
    "qwen3_vl_text": (151_936, 4096, 22_016, 32, 32, 32, 128, 128_000, 1e-6, 5e5),
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MISTRAL4_ROPE = {
    **_MINISTRAL3_ROPE, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_HALF_ROTATES = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
_APERTUS_ROPE = {
    "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_LATENT = {"q_lora_rank": 1536, "v_head_dim": 128}
_SUM_TO_1 = {"norm_topk_prob": True}
_GLM4_MOE = {
    **_GROUPS, **_SUM_TO_1, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_routed_experts": 128,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
_GATED_DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
}  # fmt: skip
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
_TIED = {"tie_word_embeddings": True}
# model_type -> other keys, except those whose default is null, false or empty.
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"hidden_act": "xielu", "rope_theta": 1.2e7, "rope_parameters": _APERTUS_ROPE},
    "arcee": {"hidden_act": "relu2"},
    "cohere2": {**_TIED, "sliding_window": 4096, "sliding_window_pattern": 4},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, **_SUM_TO_1, "num_mtp_layers": 1},
    "deepseek_v32": {**_LATENT, **_SUM_TO_1},
    "dots1": {**_GROUPS, "sliding_window": 4096},
    "ernie4_5": {**_TIED, "head_dim": 128, "rope_theta": 5e5},
    "ernie4_5_moe": {**_TIED, "rope_theta": 5e5},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma": {**_TIED, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        **_GEMMA, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA, "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4, "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {
        **_GEMMA, "sliding_window": 512, "rope_parameters": _GEMMA4_ROPE, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    },
    "glm": _HALF_ROTATES,
    "glm4": _HALF_ROTATES,
    "glm4_moe_lite": {**_SUM_TO_1, "q_lora_rank": 768, "v_head_dim": 256, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**_SUM_TO_1, "v_head_dim": 256},
    "glm4_moe": {**_GLM4_MOE, "num_nextn_predict_layers": 1},
    "glm4v_moe_text": {**_GLM4_MOE, "attention_bias": True},
    "gpt_oss": {
        "num_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True,
        "rope_parameters": _GPT_OSS_ROPE,
    },
    "granitemoehybrid": {"shared_intermediate_size": 1024},
    "helium": {"head_dim": 128, "rope_theta": 1e5},
    "lfm2": {**_TIED, "rope_theta": 1e6, "intermediate_size": 12_288},
    "lfm2_moe": {**_TIED, **_SUM_TO_1, "rope_theta": 1e6},
    "llama4_text": {
        "intermediate_size_mlp": 16_384, "num_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True,
        "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
        "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
    },
    "minicpm3": {**_TIED, "q_lora_rank": 768, "scale_depth": 1.4, "dim_model_base": 256},
    "minimax_m2": {"head_dim": 128, "rope_theta": 5e6},
    "ministral": {"sliding_window": 4096},
    "ministral3": {"rope_parameters": _MINISTRAL3_ROPE},
    "mistral": {"sliding_window": 4096},
    "mistral4": {
        **_GROUPS, **_SUM_TO_1, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True, "n_routed_experts": 128,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 0,
        "rope_parameters": _MISTRAL4_ROPE,
    },
    "mixtral": {"num_experts": 8, "num_experts_per_tok": 2},
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "nemotron_h": {
        **_GROUPS, **_SUM_TO_1, "head_dim": 128, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    "olmo3": {"rope_theta": 5e5, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen2": _QWEN_WINDOW,
    "qwen2_5_vl_text": {"sliding_window": 4096, "max_window_layers": 80},
    "qwen2_moe": {"sliding_window": 4096, "qkv_bias": True},
    "qwen2_vl_text": {"sliding_window": 4096, "max_window_layers": 80},
    "qwen3": _QWEN_WINDOW,
    "qwen3_5_moe_text": {
        **_GATED_DELTA, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
        "num_experts": 256, "num_experts_per_tok": 8,
    },
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_next": {"head_dim": 256, **_GATED_DELTA, **_SUM_TO_1},
    "qwen3_moe": {
        "sliding_window": 4096, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "qwen3_vl_moe_text": {
        "moe_intermediate_size": 1408, "decoder_sparse_step": 1, "num_experts": 60, "num_experts_per_tok": 4,
    },
    "seed_oss": {"head_dim": 128, "attention_bias": True},
    "smollm3": {**_TIED, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    "solar_open": {**_SUM_TO_1, "head_dim": 128, "rope_theta": 1e6},
    "starcoder2": {**_TIED, "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
}  # fmt: skip


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Return the values of a family's keys; None where the code's own default counts."""
    sizes = _SIZES.get(model_type, ())
    own = dict(zip(_KEYS, sizes, strict=bool(sizes)))
    return {"head_dim": None, "rope_theta": 1e4, "hidden_act": "silu", **own, **_OTHERS.get(model_type, {})}
